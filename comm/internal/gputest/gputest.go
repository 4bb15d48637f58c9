// Package gputest has common parts of the tests of backends for GPUs: GPUs of this process, one process per GPU,
// processes of which one dies, and libraries that stand in for the driver and NCCL.
package gputest

import (
	"cmp"
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/internal/faulttest"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/internal/cc"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Job is the launcher's description of this process.
func Job(t testing.TB) rendezvous.Job {
	t.Helper()
	j, err := rendezvous.FromEnv(os.Getenv)
	require.NoError(t, err)
	return j
}

// Open opens every GPU. It skips the test without NCCL or GPUs.
func Open(t testing.TB) []*cuda.Runtime {
	t.Helper()
	if Job(t).WorldSize > 1 {
		t.Skip("a process of a job has one GPU to itself")
	}
	n, err := cuda.Count()
	if err != nil {
		t.Skipf("needs NVIDIA GPUs: %v", err)
	}
	if _, _, err := nccl.Version(); err != nil {
		t.Skipf("needs NCCL: %v", err)
	}
	runtimes := make([]*cuda.Runtime, n)
	for i := range runtimes {
		runtimes[i], err = cuda.Open(i)
		require.NoError(t, err)
		t.Cleanup(func() {
			assert.NoError(t, runtimes[i].Close())
		})
	}
	return runtimes
}

// Own opens the GPU of this process of a job. A launcher may show each process only its own, as Slurm does with
// --gpus-per-task=1.
func Own(t testing.TB) *cuda.Runtime {
	t.Helper()
	gpus, err := cuda.Count()
	require.NoError(t, err)
	rt, err := cuda.Open(Job(t).LocalRank % gpus)
	require.NoError(t, err)
	return rt
}

// Each runs f for n ranks at once and returns their errors joined.
func Each(n int, f func(rank int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() { errs[r] = f(r) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Suites bounds the waits of the suites.
const Suites = 20 * time.Second

// Goroutines completes a backend for the suites by worlds of 1, 2, … GPUs of this
// process, which connect makes.
func Goroutines[C comm.Communicator](
	t *testing.T,
	b commtest.Backend,
	connect func(ctx context.Context, gpus []*cuda.Runtime) ([]C, error),
) commtest.Backend {
	gpus := Open(t)
	worlds := map[int][]C{}
	t.Cleanup(func() {
		for _, w := range worlds {
			assert.NoError(t, Each(len(w), func(r int) error {
				return w[r].Close()
			}))
		}
	})
	b.Sizes = nil
	for n := 1; n <= len(gpus); n++ {
		b.Sizes = append(b.Sizes, n)
	}
	b.Run = func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
		if worlds[size] == nil {
			w, err := connect(ctx, gpus[:size])
			if err != nil {
				return err
			}
			worlds[size] = w
		}
		return Each(size, func(r int) error {
			return body(ctx, commtest.Rank{Comm: worlds[size][r], Runtime: gpus[r]})
		})
	}
	return b
}

// Ranks returns the ranks of this process: one of a launcher's job, made by connect, or those of its GPUs, made by
// inProcess. It skips the test with fewer than minRanks, and uses at most maxRanks. They are closed when the test
// ends.
func Ranks[C comm.Communicator](
	t *testing.T,
	minRanks, maxRanks int,
	connect func(ctx context.Context, gpu *cuda.Runtime) (C, error),
	inProcess func(ctx context.Context, gpus []*cuda.Runtime) ([]C, error),
) ([]C, []*cuda.Runtime) {
	t.Helper()
	var comms []C
	var gpus []*cuda.Runtime
	if Job(t).WorldSize > 1 {
		gpus = []*cuda.Runtime{Own(t)}
		t.Cleanup(func() {
			assert.NoError(t, gpus[0].Close())
		})
		c, err := connect(t.Context(), gpus[0])
		require.NoError(t, err)
		comms = []C{c}
	} else {
		gpus = Open(t)
		if len(gpus) < minRanks {
			t.Skipf("needs %d GPUs, or a job of several processes", minRanks)
		}
		gpus = gpus[:min(len(gpus), maxRanks)]
		var err error
		comms, err = inProcess(t.Context(), gpus)
		require.NoError(t, err)
	}
	t.Cleanup(func() {
		assert.NoError(t, Each(len(comms), func(r int) error {
			return comms[r].Close()
		}))
	})
	return comms, gpus
}

// Faults returns ranks for the tests of faults.
func Faults[C comm.Communicator](t *testing.T, comms []C, gpus []*cuda.Runtime) faulttest.Backend {
	t.Helper()
	ranks := make([]faulttest.Rank, len(comms))
	for i, c := range comms {
		var err error
		ranks[i], err = faulttest.NewRank(c, gpus[i])
		require.NoError(t, err)
	}
	t.Cleanup(func() { // Close ends writes that may be in flight
		assert.NoError(t, Each(len(ranks), func(r int) error {
			return errors.Join(comms[r].Close(), ranks[r].Free())
		}))
	})
	return faulttest.Backend{Each: func(ctx context.Context, body func(context.Context, faulttest.Rank) error) error {
		return Each(len(ranks), func(r int) error { return body(ctx, ranks[r]) })
	}}
}

// Processes runs the suite of comm, and another one, with a process per GPU, if a
// launcher started the test binary, on communicators that connect makes.
func Processes[C comm.Communicator](
	t *testing.T,
	b commtest.Backend,
	connect func(ctx context.Context, gpu *cuda.Runtime) (C, error),
	extra func(*testing.T, commtest.Backend),
) {
	j := Job(t)
	if j.WorldSize == 1 {
		t.Skip("not started by mpirun, torchrun or srun with several processes")
	}
	rt := Own(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := connect(ctx, rt)
	require.NoError(t, err)
	b.Sizes = []int{j.WorldSize}
	b.Run = func(ctx context.Context, _ int, body func(context.Context, commtest.Rank) error) error {
		return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
	}
	t.Run("comm", func(t *testing.T) {
		commtest.Run(t, b, commtest.Timeout(Suites))
	})
	t.Run("other", func(t *testing.T) { extra(t, b) })
	assert.NoError(t, c.Close())
	assert.NoError(t, rt.Close())
}

// VictimVariable tells the processes of a job that one of them dies, and how.
const VictimVariable = "TUTTI_TEST_VICTIM"

// meetingVariable names the directory in which the processes of such a job meet.
const meetingVariable = "TUTTI_TEST_MEETING"

// Meet returns when every process of a job of which one dies has called it. They meet by files: a rank whose part of a
// barrier is complete may be lost before its peers complete theirs, which differs from a rank that is lost after the
// barrier.
func Meet(t testing.TB) {
	t.Helper()
	j := Job(t)
	dir := os.Getenv(meetingVariable)
	require.NoError(t, os.WriteFile(filepath.Join(dir, strconv.Itoa(j.Rank)), nil, 0o600))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, poll.Until(ctx, func() (bool, error) {
		present, err := os.ReadDir(dir)
		return len(present) == j.WorldSize, err
	}))
}

// Ways in which the last process of a job is lost. Any other way kills it, or the first one.
const (
	Exits = "exits"
	Stops = "stops"
	First = "first"
)

// Victim is the rank that is lost.
func Victim(way string, ranks int) int {
	if way == First {
		return 0
	}
	return ranks - 1
}

// stopSignal is SIGSTOP on Linux, where GPUs are.
const stopSignal = syscall.Signal(19)

// BeLost ends or stops this process, the victim.
func BeLost(t testing.TB, way string) {
	self, err := os.FindProcess(os.Getpid())
	require.NoError(t, err)
	switch way {
	case Exits:
		os.Exit(3)
	case Stops:
		require.NoError(t, self.Signal(stopSignal))
	default:
		require.NoError(t, self.Kill())
	}
	select {} // until the signal arrives
}

// LoseARank runs TestAKilledRank in up to maxRanks processes of a job, one for each GPU, and loses one of them in each
// of the ways. If there is one GPU, all share it, each as if on its own host.
func LoseARank(t *testing.T, maxRanks int, ways ...string) {
	if Job(t).WorldSize > 1 {
		t.Skip("starts processes itself")
	}
	n, err := cuda.Count()
	if err != nil {
		t.Skipf("needs NVIDIA GPUs: %v", err)
	}
	if _, _, err := nccl.Version(); err != nil {
		t.Skipf("needs NCCL: %v", err)
	}
	shared := n == 1
	n = min(n, maxRanks)
	if shared {
		n = maxRanks
	}
	for _, way := range ways {
		t.Run(way, func(t *testing.T) {
			killARank(t, "TestAKilledRank", way, n, shared)
		})
	}
}

// killARank runs a test again in n processes, a job, of which one is lost ([BeLost]), with
// hosts each as if on a separate host. The others print that they went on.
func killARank(t *testing.T, test, way string, n int, hosts bool) {
	self, err := os.Executable()
	require.NoError(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	_, port, err := net.SplitHostPort(listener.Addr().String())
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	meeting := t.TempDir()
	processes := make([]*exec.Cmd, n)
	outputs := make([]strings.Builder, n)
	for rank := range processes {
		p := exec.CommandContext(t.Context(), self, "-test.run", "^"+test+"$", "-test.v")
		p.Env = append(os.Environ(), VictimVariable+"="+way, meetingVariable+"="+meeting,
			"RANK="+strconv.Itoa(rank), "LOCAL_RANK="+strconv.Itoa(rank),
			"WORLD_SIZE="+strconv.Itoa(n), "LOCAL_WORLD_SIZE="+strconv.Itoa(n),
			"MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port, env.Secret+"=of a test, and long enough")
		if hosts { // as lab/as-a-host.sh has them
			p.Env = append(p.Env, "NCCL_HOSTID=host"+strconv.Itoa(rank), "NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1",
				"NCCL_SOCKET_IFNAME=lo")
		}
		p.Stdout = &outputs[rank]
		p.Stderr = &outputs[rank]
		require.NoError(t, p.Start())
		processes[rank] = p
	}
	for rank, p := range processes {
		ended := map[string]string{Exits: "exit status 3"}[way]
		lost := rank == Victim(way, n)
		if lost && way == Stops {
			require.NoError(t, p.Process.Kill())
		}
		err := p.Wait()
		if lost {
			assert.ErrorContains(t, err, cmp.Or(ended, "kill"), "the victim: %s", &outputs[rank])
			continue
		}
		assert.NoError(t, err, "rank %d: %s", rank, &outputs[rank])
		assert.Contains(t, outputs[rank].String(), "went on")
		t.Log(&outputs[rank])
	}
}

// The variables that name the libraries, and the one that marks the process of OnStandIns.
const (
	StandInVariable = "TUTTI_TEST_STAND_IN"
	LibraryVariable = "TUTTI_NCCL_LIB"
	DriverVariable  = "TUTTI_CUDA_LIB"
)

// OnStandIns runs tests of this package without a GPU, on stand-ins for NCCL, with one rank, and for the driver, which
// runs no kernels. The libraries are opened once per process, so the test binary runs again, with additional
// variables. It returns its output.
func OnStandIns(t *testing.T, run, skip string, env ...string) string {
	t.Helper()
	if os.Getenv(StandInVariable) != "" {
		t.Skip("is in the process of the stand-ins already")
	}
	build := func(source ...string) string {
		library, err := cc.Build(t, "cc", filepath.Join(source...), "", "-O2", "-shared", "-fPIC", "-lpthread")
		require.NoError(t, err)
		return library
	}
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, "-test.v", "-test.timeout=10m", "-test.run="+run, "-test.skip="+skip)
	cmd.Env = append(os.Environ(), StandInVariable+"=1", "FAKE_CUDA_MEMORY=2147483648",
		LibraryVariable+"="+build("..", "nccl", "testdata", "nccl.c"),
		DriverVariable+"="+build("..", "..", "runtime", "cuda", "testdata", "driver.c"))
	cmd.Env = append(cmd.Env, env...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS", "at least one test ran")
	return string(out)
}
