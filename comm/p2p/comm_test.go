package p2p_test

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/comm/p2p"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cuda"
)

func job(t testing.TB) rendezvous.Job {
	t.Helper()
	j, err := rendezvous.FromEnv(os.Getenv)
	require.NoError(t, err)
	return j
}

// openGPUs opens every GPU, or skips the test where NCCL or GPUs are missing.
func openGPUs(t testing.TB) []*cuda.Runtime {
	t.Helper()
	if j := job(t); j.WorldSize > 1 {
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
		t.Cleanup(func() { assert.NoError(t, runtimes[i].Close()) })
	}
	return runtimes
}

// each runs f for every rank at once.
func each(n int, f func(rank int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() { errs[r] = f(r) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// world makes a world over NCCL on the GPUs given.
func world(ctx context.Context, gpus []*cuda.Runtime, opts ...p2p.Option) ([]*p2p.Comm, error) {
	bases, err := nccl.InProcess(ctx, gpus)
	if err != nil {
		return nil, err
	}
	comms := make([]*p2p.Comm, len(gpus))
	return comms, each(len(gpus), func(r int) (err error) {
		comms[r], err = p2p.New(ctx, bases[r], gpus[r], opts...)
		return err
	})
}

// conforms is what the suite has to know.
var conforms = commtest.Backend{
	NoTags:            true,
	NoMismatch:        true,
	NoPeerFailure:     true,
	NoLoneSelfReceive: true,
}

func goroutines(t *testing.T, opts ...p2p.Option) commtest.Backend {
	gpus := openGPUs(t)
	worlds := map[int][]*p2p.Comm{}
	t.Cleanup(func() {
		for _, w := range worlds {
			assert.NoError(t, each(len(w), func(r int) error { return w[r].Close() }))
		}
	})
	suite := conforms
	for n := 1; n <= len(gpus); n++ {
		suite.Sizes = append(suite.Sizes, n)
	}
	suite.Run = func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
		if worlds[size] == nil {
			w, err := world(ctx, gpus[:size], opts...)
			if err != nil {
				return err
			}
			worlds[size] = w
		}
		return each(size, func(r int) error { return body(ctx, commtest.Rank{Comm: worlds[size][r], Runtime: gpus[r]}) })
	}
	return suite
}

func TestConformance(t *testing.T) {
	commtest.Run(t, goroutines(t), commtest.Timeout(20*time.Second))
}

// TestConformanceOfEverything takes everything over that can be.
func TestConformanceOfEverything(t *testing.T) {
	commtest.Run(t, goroutines(t, p2p.WithLimit(1<<40)), commtest.Timeout(20*time.Second))
}

// TestConformanceOfProcesses runs the suite with a process per GPU, when a launcher
// started the test binary.
func TestConformanceOfProcesses(t *testing.T) {
	j := job(t)
	if j.WorldSize == 1 {
		t.Skip("not started by mpirun, torchrun or srun with several processes")
	}
	rt, err := cuda.Open(j.LocalRank)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	base, err := nccl.FromEnv(ctx, rt)
	require.NoError(t, err)
	c, err := p2p.New(ctx, base, rt)
	require.NoError(t, err)
	suite := conforms
	suite.Sizes = []int{j.WorldSize}
	suite.Run = func(ctx context.Context, _ int, body func(context.Context, commtest.Rank) error) error {
		return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
	}
	commtest.Run(t, suite, commtest.Timeout(20*time.Second))
	assert.NoError(t, c.Close())
	assert.NoError(t, rt.Close())
}

func TestDistributed(t *testing.T) { distributedtest.Run(t, goroutines(t)) }

// victimVariable marks the processes of TestAKilledRank, and says what they do.
const victimVariable = "TUTTI_TEST_VICTIM"

// One process of a job is killed: the waits of the other end at its deadline, in
// eager calls and in a graph, it is told who did not come, and the process goes on.
func TestAKilledRank(t *testing.T) {
	if way := os.Getenv(victimVariable); way != "" {
		rankOfAKilledJob(t, way)
		return
	}
	if job(t).WorldSize > 1 {
		t.Skip("starts processes of its own")
	}
	if n, err := cuda.Count(); err != nil || n < 2 {
		t.Skip("needs two GPUs")
	}
	for _, way := range []string{"eager", "graph"} {
		t.Run(way, func(t *testing.T) {
			self, err := os.Executable()
			require.NoError(t, err)
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			_, port, err := net.SplitHostPort(listener.Addr().String())
			require.NoError(t, err)
			require.NoError(t, listener.Close())
			processes := make([]*exec.Cmd, 2)
			outputs := make([]strings.Builder, 2)
			for rank := range processes {
				p := exec.CommandContext(t.Context(), self, "-test.run", "^TestAKilledRank$", "-test.v")
				p.Env = append(os.Environ(), victimVariable+"="+way,
					"RANK="+strconv.Itoa(rank), "LOCAL_RANK="+strconv.Itoa(rank), "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2",
					"MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port, rendezvous.SecretVariable+"=a test")
				p.Stdout, p.Stderr = &outputs[rank], &outputs[rank]
				require.NoError(t, p.Start())
				processes[rank] = p
			}
			assert.ErrorContains(t, processes[1].Wait(), "kill", "the victim: %s", &outputs[1])
			assert.NoError(t, processes[0].Wait(), "%s", &outputs[0])
			assert.Contains(t, outputs[0].String(), "went on")
			t.Log(&outputs[0])
		})
	}
}

func rankOfAKilledJob(t *testing.T, way string) {
	j := job(t)
	rt, err := cuda.Open(j.LocalRank)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	base, err := nccl.FromEnv(ctx, rt)
	require.NoError(t, err)
	c, err := p2p.New(ctx, base, rt, p2p.WithLimit(1<<40))
	require.NoError(t, err)
	const n = 1 << 18
	buf, err := rt.Allocate(n * 4)
	require.NoError(t, err)
	require.NoError(t, rt.Fill(buf, n, dtype.F32, 0))
	require.NoError(t, rt.Synchronize(ctx))
	stream := rt.WrapStream(c.CommStream())
	some := func() error {
		for range 20 {
			if err := c.AllReduce(buf, buf, n, dtype.F32, comm.Sum); err != nil {
				return err
			}
		}
		return nil
	}
	graph, err := stream.Capture(some)
	require.NoError(t, err)
	replay := func() error { return graph.Launch(stream) }
	if way == "eager" {
		replay = some
	}
	require.NoError(t, replay())
	require.NoError(t, c.Sync(ctx))
	if j.Rank == 1 {
		self, err := os.FindProcess(os.Getpid())
		require.NoError(t, err)
		require.NoError(t, self.Kill())
		select {}
	}
	for range 10 {
		require.NoError(t, replay())
	}
	wait, cancelWait := context.WithTimeout(ctx, 2*time.Second)
	defer cancelWait()
	began := time.Now()
	err = c.Sync(wait)
	t.Logf("after %v: %v", time.Since(began).Round(time.Millisecond), err)
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.ErrorContains(t, err, "rank 0 waited for rank 1")
	require.ErrorIs(t, c.AllReduce(buf, buf, 1, dtype.F32, comm.Sum), comm.ErrBroken)
	done, err := stream.Done()
	require.NoError(t, err)
	require.True(t, done, "nothing is left on the GPU")
	require.NoError(t, rt.Fill(buf, n, dtype.F32, 1))
	require.NoError(t, rt.Synchronize(ctx))
	t.Log("went on")
	require.NoError(t, graph.Close())
	require.NoError(t, rt.Deallocate(buf))
	assert.NoError(t, c.Close())
	assert.NoError(t, rt.Close())
}
