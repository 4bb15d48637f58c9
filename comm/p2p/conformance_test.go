package p2p_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/comm/p2p"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/env"
	_ "github.com/tutti-go/tutti/internal/heaptest"
	"github.com/tutti-go/tutti/runtime/cuda"
)

var each = gputest.Each

// maker makes a communicator: p2p.New or everything.
type maker func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) (*p2p.Comm, error)

// everything makes a communicator that passes as little as possible to the base.
func everything(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) (*p2p.Comm, error) {
	return p2p.NewWithLimit(ctx, base, rt, 1<<40)
}

// world makes a world over NCCL on the GPUs given.
func world(ctx context.Context, gpus []*cuda.Runtime, form maker) ([]*p2p.Comm, error) {
	bases, err := nccl.InProcess(ctx, gpus)
	if err != nil {
		return nil, err
	}
	comms := make([]*p2p.Comm, len(gpus))
	return comms, each(len(gpus), func(r int) (err error) {
		comms[r], err = form(ctx, bases[r], gpus[r])
		return err
	})
}

// conforms is what the suite has to know.
var conforms = commtest.Backend{
	NoTags:            true,
	NoFixedOrder:      true,
	NoMismatch:        true,
	NoPeerFailure:     true,
	NoLoneSelfReceive: true,
	Communicators:     8, // as those of NCCL below
}

func goroutines(t *testing.T, form maker) commtest.Backend {
	return gputest.Goroutines(t, conforms, func(ctx context.Context, gpus []*cuda.Runtime) ([]*p2p.Comm, error) {
		return world(ctx, gpus, form)
	})
}

// connect makes the communicator of a process.
func connect(ctx context.Context, rt *cuda.Runtime, form maker) (*p2p.Comm, error) {
	base, err := nccl.FromEnv(ctx, rt)
	if err != nil {
		return nil, err
	}
	return form(ctx, base, rt)
}

func TestConformance(t *testing.T) {
	commtest.Run(t, goroutines(t, p2p.New), commtest.Timeout(gputest.Suites))
}

// TestConformanceOfEverything passes as little as possible to the base.
func TestConformanceOfEverything(t *testing.T) {
	commtest.Run(t, goroutines(t, everything), commtest.Timeout(gputest.Suites))
}

// TestConformanceOfFixedOrder gives the base no reduction.
func TestConformanceOfFixedOrder(t *testing.T) {
	b := goroutines(t, p2p.NewFixedOrder)
	b.NoFixedOrder = false
	commtest.Run(t, b, commtest.Timeout(gputest.Suites))
}

// TestConformanceOfProcesses runs the suite with a process per GPU, when a launcher
// started the test binary.
func TestConformanceOfProcesses(t *testing.T) {
	form := func(ctx context.Context, rt *cuda.Runtime) (*p2p.Comm, error) { return connect(ctx, rt, p2p.New) }
	suites := conforms
	suites.NoFixedOrder = os.Getenv(env.P2POrder) == ""
	gputest.Processes(t, suites, form,
		func(t *testing.T, b commtest.Backend) { distributedtest.Run(t, b) })
}

func TestDistributed(t *testing.T) { distributedtest.Run(t, goroutines(t, p2p.New)) }

// One process of a job is killed. The waits of the others end at the first of their deadlines, in
// eager calls and in a graph, and name the missing rank. The others go on with a communicator
// of the survivors.
func TestAKilledRank(t *testing.T) {
	if way := os.Getenv(gputest.VictimVariable); way != "" {
		rankOfAKilledJob(t, way)
		return
	}
	gputest.LoseARank(t, 4, "eager", "graph")
}

// One that ends in peace, and one that stands still, are no different.
func TestAnExitedRank(t *testing.T) { gputest.LoseARank(t, 4, gputest.Exits) }
func TestAStoppedRank(t *testing.T) { gputest.LoseARank(t, 4, gputest.Stops) }

func rankOfAKilledJob(t *testing.T, way string) {
	j := gputest.Job(t)
	rt := gputest.Own(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := connect(ctx, rt, everything)
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
	if way != "graph" {
		replay = some
	}
	require.NoError(t, replay())
	require.NoError(t, c.Sync(ctx))
	gputest.Meet(t)
	victim := j.WorldSize - 1
	if j.Rank == victim {
		gputest.BeLost(t, way)
	}
	for range 10 {
		require.NoError(t, replay())
	}
	wait, cancelWait := context.WithTimeout(ctx, 2*time.Second)
	defer cancelWait()
	began := time.Now()
	err = c.Sync(wait)
	t.Logf("after %v: %v", time.Since(began).Round(time.Millisecond), err)
	want := comm.ErrPeerFailed // a rank whose deadline passed before told this one
	if errors.Is(err, comm.ErrTimeout) {
		want = comm.ErrTimeout
		require.ErrorIs(t, wait.Err(), context.DeadlineExceeded)
	} else {
		require.ErrorContains(t, err, "aborted")
	}
	require.ErrorIs(t, err, want)
	require.ErrorContains(t, err, fmt.Sprintf("waited for rank %d", victim))
	require.ErrorIs(t, c.AllReduce(buf, buf, 1, dtype.F32, comm.Sum), comm.ErrBroken)
	done, err := stream.Done()
	require.NoError(t, err)
	require.True(t, done, "nothing is left on the GPU")
	require.NoError(t, rt.Fill(buf, n, dtype.F32, 1))
	require.NoError(t, rt.Synchronize(ctx))

	// The survivors of the base communicator make a new one.
	base, ok := comm.As[*nccl.Comm](c)
	require.True(t, ok)
	rest, err := base.Shrink(ctx, victim)
	require.NoError(t, err)
	again, err := everything(ctx, rest, rt)
	require.NoError(t, err)
	require.NoError(t, again.AllReduce(buf, buf, n, dtype.F32, comm.Sum))
	require.NoError(t, again.Sync(ctx))
	got := make([]byte, n*4)
	require.NoError(t, rt.CopyOut(got, buf))
	for i := range n {
		value := math.Float32frombits(binary.NativeEndian.Uint32(got[i*4:]))
		require.Equal(t, float32(j.WorldSize-1), value, "element %d", i)
	}
	t.Log("went on")
	require.NoError(t, graph.Close())
	require.NoError(t, rt.Deallocate(buf))
	assert.NoError(t, again.Close())
	assert.NoError(t, c.Close())
	assert.NoError(t, rt.Close())
}
