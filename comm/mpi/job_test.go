package mpi_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/internal/env"
)

// The tests in this file launch jobs; rank_test.go has what the ranks do.

func TestLifecycle(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) { l.mustRun(t, job{ranks: 2, test: "TestRankLifecycle"}) })
}

// TestRunIsNamed has worlds of one rank. [TestShared] and [TestNative] have larger ones.
func TestRunIsNamed(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) {
		for range 2 {
			l.mustRunNamed(t, job{ranks: 1, test: "TestRankRunIsNamed"})
		}
	})
}

// names are those of all runs, of mustRunNamed.
var names sync.Map

// mustRunNamed runs a job whose tests include TestRankRunIsNamed: the flight records of all its ranks have one name,
// which no other run has.
func (l launcher) mustRunNamed(t *testing.T, j job) {
	t.Helper()
	j.dir = t.TempDir()
	l.mustRun(t, j)
	first, err := os.ReadFile(nameOf(j.dir, 0))
	require.NoError(t, err)
	assert.NotEmpty(t, first)
	for rank := range j.ranks {
		name, err := os.ReadFile(nameOf(j.dir, rank))
		require.NoError(t, err)
		assert.Equal(t, string(first), string(name), "rank %d", rank)
	}
	_, taken := names.LoadOrStore(string(first), true)
	assert.False(t, taken, string(first))
}

// TestForgottenClose: a sub-communicator that is garbage without Close is logged, once.
func TestForgottenClose(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) { l.mustRun(t, job{ranks: 2, test: "TestRankForgottenClose"}) })
}

// TestPair has two ranks of one job run several tests.
func TestPair(t *testing.T) {
	const tests = "TestRankDisagreement|TestRankSteadyState|TestRankSendFirst|TestRankGroupMessages|" +
		"TestRankBusyProgress|TestRankWrongLength|TestRankForeignHead|TestRankRefusedHead"
	forOneMPI(t, func(t *testing.T, l launcher) { l.mustRun(t, job{ranks: 2, test: tests}) })
}

// TestShared has ranks share memory, and one that does not want to.
func TestShared(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) {
		l.mustRunNamed(t, job{ranks: 3, test: "TestRankRunIsNamed|TestRankShared|TestRankProgress"})
		l.mustRun(t, job{ranks: 3, test: "TestRankShared", env: []string{offVariable + "=1"}})
	})
}

// TestClosedMemory closes a communicator in the middle of a collective.
func TestClosedMemory(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) {
		l.mustPass(t, job{ranks: 2, test: "TestRankClosedMemory"})
	})
}

func TestSerialized(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) { l.mustRun(t, job{ranks: 2, test: "TestRankSerialized"}) })
}

func TestNative(t *testing.T) {
	forEachMPI(t, func(t *testing.T, l launcher) {
		test := "TestRankNative|TestRankRunIsNamed"
		if l.name == "openmpi" || extended {
			test += "|TestRankFaults"
		}
		l.mustRunNamed(t, job{ranks: 3, test: test, env: []string{env.MPICollectives + "=native"}})
	})
}

// TestKilledRank kills a process in the middle of a collective. The launcher
// lets the others live, so that they can report their errors.
func TestKilledRank(t *testing.T) { loseRank(t, "killed", 2) }

// TestExitedRank ends a process there, without MPI_Finalize.
func TestExitedRank(t *testing.T) { loseRank(t, "exits", 2) }

// TestStoppedRank stops a process there, and lets it go on when the others have
// aborted.
func TestStoppedRank(t *testing.T) { loseRank(t, "stopped", 3) }

// loseRank loses the last rank in a way, and looks at what some ranks tell.
func loseRank(t *testing.T, how string, tell int) {
	forOneMPI(t, func(t *testing.T, l launcher) {
		_, verdicts := l.losing(t, job{ranks: 3, test: "TestRankVictim", env: []string{lossVariable + "=" + how}}, []int{0, 1, 2}[:tell]...)
		for rank, verdict := range verdicts {
			assert.Equal(t, "ok", verdict, "rank %d", rank)
		}
	})
}

func TestAbort(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) {
		out, err := l.run(t, job{ranks: 2, test: "TestRankAbort"})
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit, "%s", out)
		assert.Equal(t, 7, exit.ExitCode(), "%s", out)
	})
}

// TestLateInit has a rank leave MPI_Init behind, to which another one does not come.
func TestLateInit(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) { l.mustPass(t, job{ranks: 2, test: "TestRankLateInit"}) })
}

// TestLateInitIsBounded has a rank wait without a deadline.
func TestLateInitIsBounded(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) {
		l.mustPass(t, job{ranks: 2, test: "TestRankLateInitIsBounded", env: []string{env.ConnectTimeout + "=1s"}})
	})
}

// TestMixedUp opens one implementation's library under the other's launcher.
func TestMixedUp(t *testing.T) {
	for _, l := range launchers {
		if _, ok := l.mpirunPath(); !ok {
			t.Skip("needs both Open MPI and MPICH")
		}
	}
	forEachMPI(t, func(t *testing.T, l launcher) {
		other := map[string]string{"openmpi": "libmpich.so.12", "mpich": "libmpi.so.40"}[l.name]
		l.mustRun(t, job{ranks: 2, test: "TestRankMixedUp", env: []string{env.MPILibrary + "=" + other}})
	})
}

// TestStandardABI runs ranks on a stand-in for a library with the ABI of MPI 5, as
// Debian has none: MPICH behind handles, constants and statuses of that ABI.
func TestStandardABI(t *testing.T) {
	forEachMPI(t, func(t *testing.T, l launcher) {
		if l.name != "mpich" {
			t.Skip("the stand-in is made of MPICH")
		}
		lib := filepath.Join(t.TempDir(), "libmpi_abi.so.0")
		require.NoError(t, os.Symlink(l.compile(t, filepath.Join("testdata", "abi.c"), "-shared", "-fPIC"), lib))
		library := env.MPILibrary + "=" + lib
		if extended {
			l.mustRun(t, job{ranks: 3, test: "TestRankConformance", env: append(slices.Clone(withoutSharing), library)})
			l.mustRun(t, job{ranks: 3, test: "TestRankDisagreement", env: []string{library}})
		}
		native := env.MPICollectives + "=native"
		l.mustRun(t, job{ranks: 3, test: "TestRankStandardABI|TestRankNative", env: []string{library, native}})
		l.mustRun(t, job{ranks: 2, test: "TestRankManyMessages", env: []string{library}})
		l.mustPass(t, job{ranks: mixedRanks, test: "TestRankMixedCollectives", env: []string{library, nativeVariable + "=2"}})
	})
}

// TestRankStandardABI sees to it that it is the stand-in that ranks run on.
func TestRankStandardABI(t *testing.T) {
	newRank(t)
	info, err := mpi.Library()
	require.NoError(t, err)
	assert.Equal(t, "MPI-5", info.ABI)
	assert.Equal(t, "MPI_THREAD_MULTIPLE", info.Threads)
}

// TestWithoutLauncher starts the test binary by itself, a world of one.
func TestWithoutLauncher(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) {
		self, err := os.Executable()
		require.NoError(t, err)
		library := map[string]string{"openmpi": "libmpi.so.40", "mpich": "libmpich.so.12"}[l.name]
		cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestRankLifecycle$")
		cmd.Env = append(append(os.Environ(), l.env...), childVariable+"="+t.TempDir(), env.MPILibrary+"="+library)
		out, err := cmd.CombinedOutput()
		assert.NoError(t, err, "%s", out)
	})
}

func TestWildCollectives(t *testing.T) {
	if isChild() {
		t.Skip("this is a process of an MPI job")
	}
	t.Setenv(env.MPICollectives, "natve")
	_, err := mpi.Init(context.Background())
	require.ErrorIs(t, err, comm.ErrArgument)
	assert.ErrorContains(t, err, `TUTTI_MPI_COLLECTIVES is "natve", want native or nothing`)
}

func TestWildShared(t *testing.T) {
	if isChild() {
		t.Skip("this is a process of an MPI job")
	}
	t.Setenv(env.MPIShared, "on")
	_, err := mpi.Init(context.Background())
	require.ErrorIs(t, err, comm.ErrArgument)
	assert.ErrorContains(t, err, `TUTTI_MPI_SHARED is "on", want off or nothing`)
}

func TestMissingLibrary(t *testing.T) {
	if isChild() {
		t.Skip("this is a process of an MPI job")
	}
	t.Setenv(env.MPILibrary, "libtutti-no-such-mpi.so")
	for name, open := range map[string]func() error{
		"Library": func() error { _, err := mpi.Library(); return err },
		"Init":    func() error { _, err := mpi.Init(context.Background()); return err },
	} {
		err := open()
		require.ErrorIs(t, err, comm.ErrUnavailable, name)
		assert.ErrorContains(t, err, "libtutti-no-such-mpi.so", name)
		assert.ErrorContains(t, err, "install Open MPI", name)
	}
}
