package mpi_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/internal/cc"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/jobtest"
)

// launcher starts processes of one MPI implementation.
type launcher struct {
	name string
	// mpirun and mpicc are names to look up, the implementation's own first:
	// Debian installs several side by side.
	mpirun, mpicc []string
	// keep are options that leave the other processes alone when one dies.
	keep []string
	// keepEnv does the same for the library: UCX, under MPICH, ends a process
	// that finds its peer's memory gone. keepAway is a program that starts
	// another one out of the launcher's reach, as Hydra kills the process
	// groups of the survivors whatever it is told.
	keepEnv  []string
	keepAway string
	// copied has the sender's processor take part in long messages, where the receiver
	// alone could read them.
	copied []string
	// crowded makes the library get along with more processes than processors. preloaded is the
	// source of a library that does so, where it can be compiled.
	crowded   []string
	preloaded string
	env       []string
	// version is text that `mpirun --version` prints.
	version string
}

var launchers = []launcher{
	{
		name:   "openmpi",
		mpirun: []string{"mpirun.openmpi", "mpirun"}, mpicc: []string{"mpicc.openmpi", "mpicc"},
		keep: []string{"--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"},
		env: []string{
			"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
			"OMPI_MCA_rmaps_base_oversubscribe=1",
			"OMPI_MCA_odls_base_sigkill_timeout=0", // for jobs that it ends
		},
		copied:  []string{"OMPI_MCA_btl_vader_single_copy_mechanism=none"},
		crowded: []string{"OMPI_MCA_mpi_yield_when_idle=1", "OMPI_MCA_hwloc_base_binding_policy=none"},
		version: "Open MPI",
	},
	{
		name:   "mpich",
		mpirun: []string{"mpirun.mpich", "mpiexec.hydra", "mpirun"}, mpicc: []string{"mpicc.mpich", "mpicc"},
		keep:    []string{"-disable-auto-cleanup"},
		keepEnv: []string{"UCX_TLS=^cma"}, keepAway: "setsid",
		copied:    []string{"UCX_TLS=^cma"},
		preloaded: filepath.Join("testdata", "crowded.c"),
		version:   "HYDRA",
	},
}

// installHint is what a skipped test says.
const installHint = "no MPI launcher found; install Open MPI (openmpi-bin libopenmpi3) or MPICH (mpich libmpich12)"

// mpirunPath finds the launcher's mpirun.
func (l launcher) mpirunPath() (string, bool) {
	path := mpiruns()[l.name]
	return path, path != ""
}

// mpiruns are the paths of the launchers that there are.
var mpiruns = sync.OnceValue(func() map[string]string {
	paths := map[string]string{}
	for _, l := range launchers {
		for _, name := range slices.Backward(l.mpirun) {
			path, err := exec.LookPath(name)
			if err != nil {
				continue
			}
			out, err := exec.Command(path, "--version").CombinedOutput()
			if err == nil && strings.Contains(string(out), l.version) {
				paths[l.name] = path
			}
		}
	}
	return paths
})

// preloads are the libraries that preload has compiled, by source.
var preloads sync.Map

// preload returns the library that ranks have preloaded, if any.
func (l launcher) preload(t testing.TB) string {
	_, missing := os.Stat(l.preloaded)
	_, failed := exec.LookPath("cc")
	if l.preloaded == "" || missing != nil || failed != nil || runtime.GOOS != "linux" {
		return ""
	}
	made, _ := preloads.LoadOrStore(l.preloaded, sync.OnceValue(func() string {
		library, err := cc.Build(t, "cc", l.preloaded, "", "-O2", "-shared", "-fPIC", "-ldl")
		require.NoError(t, err)
		return library
	}))
	return made.(func() string)()
}

// forEachMPI runs a test under every MPI implementation of the machine.
func forEachMPI(t *testing.T, test func(t *testing.T, l launcher)) {
	t.Helper()
	if isChild() {
		t.Skip("this is a process of an MPI job")
	}
	t.Parallel()
	found := false
	for _, l := range launchers {
		if _, ok := l.mpirunPath(); !ok {
			continue
		}
		found = true
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			test(t, l)
		})
	}
	if !found {
		t.Skip(installHint)
	}
}

// forOneMPI is forEachMPI of what is the same code under every implementation: the test's name decides which one it
// runs under, and with TUTTI_EXTENDED set it runs under all.
func forOneMPI(t *testing.T, test func(t *testing.T, l launcher)) {
	t.Helper()
	chosen := launchers[crc32.ChecksumIEEE([]byte(t.Name()))%uint32(len(launchers))]
	forEachMPI(t, func(t *testing.T, l launcher) {
		if _, ok := chosen.mpirunPath(); ok && l.name != chosen.name && !extended {
			t.Skip("runs under the other library; set TUTTI_EXTENDED")
		}
		test(t, l)
	})
}

// childVariable marks processes that a test of this package has launched; its
// value is the directory for their files.
const childVariable = "TUTTI_MPI_TEST_CHILD"

// lossVariable says how TestRankVictim loses a rank.
const lossVariable = "TUTTI_MPI_TEST_LOSS"

// offVariable is the rank of TestRankShared that does not share memory.
const offVariable = "TUTTI_MPI_TEST_OFF"

// extended asks for what takes long and is much like what the tests do anyway.
var extended = os.Getenv("TUTTI_EXTENDED") != ""

// withoutSharing is the environment of a job in which everything goes through MPI.
var withoutSharing = []string{env.MPIShared + "=off"}

// transports are the environments for jobs over shared memory and through MPI. Each library has one of them, unless
// TUTTI_EXTENDED is set.
func (l launcher) transports() [][]string {
	switch {
	case extended:
		return [][]string{nil, withoutSharing}
	case l.name == "mpich":
		return [][]string{withoutSharing}
	}
	return [][]string{nil}
}

func isChild() bool { return os.Getenv(childVariable) != "" }

// onlyChild skips a test that is one rank's part of another.
func onlyChild(t *testing.T) {
	t.Helper()
	if !isChild() {
		t.Skip("runs inside an MPI job that another test launches")
	}
}

// job is an MPI job of this test binary.
type job struct {
	ranks   int
	test    string   // the test that the ranks run, or several: "A|B"
	options []string // for mpirun
	env     []string
	dir     string // for the ranks' files, a new one if empty
	limit   time.Duration
	through string // a program that starts the ranks
}

// slots limits how many jobs run side by side: most of the suites' time is
// waiting for deadlines, but their ranks also keep processors busy.
var slots = make(chan struct{}, max(4, runtime.NumCPU()/4))

// TestMain has as many tests go on side by side, unless -parallel says otherwise. A rank finalizes MPI when all tests of
// its job have ended.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", strconv.Itoa(cap(slots))); err != nil {
		panic(err)
	}
	code := m.Run()
	if isChild() {
		if err := mpi.Finalize(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, "FAIL: Finalize:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// run runs a job and returns its output and how it ended.
func (l launcher) run(t testing.TB, j job) (string, error) {
	t.Helper()
	mpirun, ok := l.mpirunPath()
	if !ok {
		t.Skip(installHint)
	}
	self, err := os.Executable()
	require.NoError(t, err)
	if j.limit == 0 {
		j.limit = 4 * time.Minute
	}
	slots <- struct{}{}
	defer func() { <-slots }()
	ctx, cancel := context.WithTimeout(t.Context(), j.limit)
	defer cancel()

	args := append([]string{}, j.options...)
	args = append(args, "-n", fmt.Sprint(j.ranks))
	if j.through != "" {
		args = append(args, j.through)
	}
	args = append(args, self, "-test.run=^("+j.test+")$", "-test.failfast", "-test.v=false", "-test.timeout="+j.limit.String(),
		fmt.Sprintf("-test.short=%t", testing.Short()))
	cmd := exec.CommandContext(ctx, mpirun, args...)
	cmd.Env = slices.Concat(jobtest.Environment(t), l.env, j.env, l.crowded)
	if j.dir == "" {
		j.dir = t.TempDir()
	}
	cmd.Env = append(cmd.Env, childVariable+"="+j.dir)
	if library := l.preload(t); library != "" {
		cmd.Env = append(cmd.Env, "LD_PRELOAD="+library)
	}
	cmd.WaitDelay = 5 * time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	if ctx.Err() != nil {
		err = fmt.Errorf("job did not end within %v: %w", j.limit, err)
	}
	return out.String(), err
}

// mustPass runs a job of which every rank has to pass, as [passed] says, without leaving
// as MPI expects.
func (l launcher) mustPass(t *testing.T, j job) {
	t.Helper()
	j.dir = t.TempDir()
	out, err := l.run(t, j)
	require.Error(t, err, "%s", out)
	require.NotContains(t, out, "DATA RACE")
	for rank := range j.ranks {
		require.FileExists(t, passedReport(j.dir, rank), "%s", out)
	}
}

// mustRun runs a job that has to succeed.
func (l launcher) mustRun(t *testing.T, j job) string {
	t.Helper()
	out, err := l.run(t, j)
	require.NoError(t, err, "%s, %d ranks of %s:\n%s", l.name, j.ranks, j.test, out)
	return out
}

// losing runs a job that loses ranks, and returns its output and what a survivor tells. Whether
// such a job succeeds is the launcher's to say, and whether the launcher waits for survivors.
func (l launcher) losing(t *testing.T, j job, survivors ...int) (out string, verdicts []string) {
	t.Helper()
	if l.keepAway != "" {
		if _, err := exec.LookPath(l.keepAway); err != nil {
			t.Skipf("needs %s", l.keepAway)
		}
	}
	if j.dir == "" {
		j.dir = t.TempDir()
	}
	j.options, j.through, j.env = l.keep, l.keepAway, append(slices.Clone(l.keepEnv), j.env...)
	out, _ = l.run(t, j)
	for _, rank := range survivors {
		var verdict []byte
		require.Eventually(t, func() (found bool) {
			var err error
			verdict, err = os.ReadFile(verdictOf(j.dir, rank))
			return err == nil
		}, time.Minute, 10*time.Millisecond, "%v: rank %d has left no verdict:\n%s", j.env, rank, out)
		verdicts = append(verdicts, string(verdict))
	}
	return out, verdicts
}

// verdictOf is the file in which a survivor of losing tells what it saw.
func verdictOf(dir string, rank int) string {
	return filepath.Join(dir, fmt.Sprintf("survivor-%d", rank))
}

// tell writes the verdict of this rank. It is renamed when it is complete, as the parent looks
// for it all the time.
func tell(t *testing.T, rank int, verdict string) {
	report := verdictOf(os.Getenv(childVariable), rank)
	require.NoError(t, os.WriteFile(report+".part", []byte(verdict), 0o600))
	require.NoError(t, os.Rename(report+".part", report))
}

// compile builds a C program with the compiler wrapper of an MPI
// implementation.
func (l launcher) compile(t testing.TB, source string, flags ...string) string {
	t.Helper()
	made, err := cc.Build(t, strings.Join(l.mpicc, " "), source, "", append([]string{"-O3"}, flags...)...)
	require.NoError(t, err)
	return made
}
