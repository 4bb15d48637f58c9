package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/dtype"
	_ "github.com/tutti-go/tutti/internal/heaptest"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

var openGPUs = gputest.Open

// reduces says what NCCL computes on.
func reduces(dt dtype.DType, op comm.ReduceOp) bool {
	switch dt {
	case dtype.I16, dtype.U16, dtype.Bool:
		return false
	case dtype.FP8E4M3, dtype.FP8E5M2:
		return op != comm.Avg
	}
	return true
}

// TestConformanceOfProcesses runs the suites with a process per GPU, when the
// test binary itself was started by a launcher:
//
//	go test -c ./comm/nccl && mpirun -n 2 ./nccl.test -test.run OfProcesses
//
// With NCCL_HOSTID set to the rank, NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 and
// NCCL_SOCKET_IFNAME=lo they are as if on two hosts.
func TestConformanceOfProcesses(t *testing.T) {
	gputest.Processes(t, conforms, connect, func(t *testing.T, b commtest.Backend) { distributedtest.Run(t, b) })
}

func connect(ctx context.Context, rt *cuda.Runtime) (*nccl.Comm, error) { return nccl.FromEnv(ctx, rt) }

// conforms is what the suite has to know of this backend.
var conforms = commtest.Backend{
	Name:          "nccl",
	Unsupported:   func(dt dtype.DType, op comm.ReduceOp) bool { return !reduces(dt, op) },
	NoTags:        true,
	NoFixedOrder:  true,
	NoMismatch:    true,
	NoPeerFailure: true,

	NoLoneSelfReceive: true,

	// A GPU runs the kernels of some 8 streams at a time (CUDA_DEVICE_MAX_CONNECTIONS), and each communicator has one.
	Communicators: 8,
}

// goroutines is the backend of the suites over the GPUs of this process, a
// goroutine each.
func goroutines(t *testing.T) commtest.Backend {
	return gputest.Goroutines(t, conforms, func(ctx context.Context, gpus []*cuda.Runtime) ([]*nccl.Comm, error) {
		return nccl.InProcess(ctx, gpus)
	})
}

func TestConformance(t *testing.T) {
	commtest.Run(t, goroutines(t), commtest.Timeout(gputest.Suites))
}

// TestConformanceWithoutNewerCalls runs the suite on what replaces the calls
// that NCCL 2.18 does not have.
func TestConformanceWithoutNewerCalls(t *testing.T) {
	suite := goroutines(t)
	most := suite.Sizes[len(suite.Sizes)-1]
	suite.Sizes = []int{most}
	require.NoError(t, nccl.WithoutNewerCalls(func() {
		commtest.Run(t, suite, commtest.Timeout(gputest.Suites))
		assert.NoError(t, suite.Run(t.Context(), most, func(ctx context.Context, r commtest.Rank) error {
			c := r.Comm.(*nccl.Comm)
			if _, err := c.Shrink(ctx, most); !errors.Is(err, comm.ErrUnsupported) {
				return fmt.Errorf("shrink: got error %v", err)
			}
			return symmetricCollectives(ctx, c, 1000) // on plain memory
		}))
	}))
}

// TestDistributed runs the suite of package distributed: tensors, and gradient
// buckets that are ordered against the compute stream by events.
func TestDistributed(t *testing.T) {
	distributedtest.Run(t, goroutines(t))
}

// each runs f for all communicators, each on its own goroutine.
func each(world []*nccl.Comm, f func(c *nccl.Comm) error) error {
	return gputest.Each(len(world), func(r int) error { return f(world[r]) })
}

func TestWithoutNCCL(t *testing.T) {
	if _, _, err := nccl.Version(); err == nil {
		t.Skip("this machine has NCCL")
	}
	_, err := nccl.InProcess(t.Context(), nil)
	assert.ErrorIs(t, err, comm.ErrUnavailable)
	assert.ErrorContains(t, err, "TUTTI_NCCL_LIB")
}

func TestHostMemoryIsRefused(t *testing.T) {
	runtimes := openGPUs(t)
	world, err := nccl.InProcess(t.Context(), runtimes[:1])
	require.NoError(t, err)
	defer world[0].Close() //nolint:errcheck
	assert.NoError(t, world[0].CheckDevice(runtimes[0].Device()))
	assert.ErrorIs(t, world[0].CheckDevice(runtime.Device{Kind: runtime.CPU}), comm.ErrDevice)
}

// A rank that never joins must not hold up the others beyond their deadline.
func TestInitEndsAtTheDeadline(t *testing.T) {
	runtimes := openGPUs(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err := nccl.From(ctx, lonely{}, runtimes[0])
	assert.ErrorIs(t, err, comm.ErrTimeout)
}

// lonely pretends to be rank 0 of two, of which the other never comes.
type lonely struct{ comm.Communicator }

func (lonely) Rank() int                                                           { return 0 }
func (lonely) WorldSize() int                                                      { return 2 }
func (lonely) AllReduce(_, _ uintptr, _ int, _ dtype.DType, _ comm.ReduceOp) error { return nil }
func (lonely) Broadcast(uintptr, int, dtype.DType, int) error                      { return nil }
func (lonely) Sync(context.Context) error                                          { return nil }

// The other rank of two stops submitting: the survivor's wait ends at its
// deadline, and it goes on alone.
func TestShrinkAfterALostPeer(t *testing.T) {
	runtimes := openGPUs(t)
	if len(runtimes) < 2 {
		t.Skip("needs two GPUs")
	}
	world, err := nccl.InProcess(t.Context(), runtimes[:2])
	require.NoError(t, err)
	survivor := world[0]
	rt := survivor.Runtime()
	const n = 1 << 20
	buf, err := rt.Allocate(n * 4)
	require.NoError(t, err)
	require.NoError(t, rt.Fill(buf, n, dtype.F32, 3))
	require.NoError(t, rt.Synchronize(t.Context()))

	_, err = survivor.Shrink(t.Context())
	require.ErrorIs(t, err, comm.ErrArgument, "nobody excluded, and nothing broken by that")

	require.NoError(t, survivor.AllReduce(buf, buf, n, dtype.F32, comm.Sum))
	patient := make(chan error)
	go func() { patient <- survivor.Sync(context.Background()) }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	require.ErrorIs(t, survivor.Sync(ctx), comm.ErrTimeout)
	require.ErrorIs(t, <-patient, comm.ErrBroken, "another wait must not take the abort for the end of the work")
	event, err := survivor.CreateEvent()
	require.NoError(t, err)
	require.ErrorIs(t, survivor.RecordOnCommStream(event), comm.ErrBroken)
	require.NoError(t, survivor.DestroyEvent(event))
	require.ErrorIs(t, survivor.AllReduce(buf, buf, n, dtype.F32, comm.Sum), comm.ErrBroken)

	ctx, cancel = context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	alone, err := survivor.Shrink(ctx, 1)
	require.NoError(t, err)
	assert.Equal(t, 1, alone.WorldSize())
	require.NoError(t, rt.Fill(buf, n, dtype.F32, 3))
	require.NoError(t, rt.Synchronize(ctx))
	require.NoError(t, alone.AllReduce(buf, buf, n, dtype.F32, comm.Sum))
	require.NoError(t, alone.Sync(ctx))
	got, err := read(rt, buf, n)
	require.NoError(t, err)
	assert.EqualValues(t, 3, got[n-1])
	for _, c := range []*nccl.Comm{alone, survivor, world[1]} {
		assert.NoError(t, c.Close())
	}
	require.NoError(t, rt.Deallocate(buf))
}

// End closes sub-communicators as well, and does not wait for work in flight.
func TestEnd(t *testing.T) {
	runtimes := openGPUs(t)
	if len(runtimes) < 2 {
		t.Skip("needs two GPUs")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	world, err := nccl.InProcess(ctx, runtimes[:2])
	require.NoError(t, err)
	parts := make([]comm.Communicator, 2)
	require.NoError(t, each(world, func(c *nccl.Comm) (err error) {
		parts[c.Rank()], err = c.Split(ctx, 0, c.Rank())
		return err
	}))
	buf, err := runtimes[0].Allocate(4096)
	require.NoError(t, err)
	require.NoError(t, parts[0].AllReduce(buf, buf, 1024, dtype.F32, comm.Sum)) // the peer never comes
	cause := errors.New("aborted")
	waiting := make(chan error)
	go func() { waiting <- parts[0].Sync(context.Background()) }()
	require.NoError(t, comm.CloseAll(world[0], cause))
	err = <-waiting
	require.True(t, errors.Is(err, cause) || errors.Is(err, comm.ErrClosed), "%v", err)
	require.NoError(t, comm.CloseAll(world[1], nil))
	for i, c := range []comm.Communicator{world[0], parts[0], world[1], parts[1]} {
		assert.ErrorIs(t, c.Barrier(ctx), comm.ErrClosed, "%d", i)
		assert.NoError(t, c.Close(), "twice")
	}
	assert.NoError(t, runtimes[0].Deallocate(buf))
}

func TestAllReduceDoesNotAllocate(t *testing.T) {
	runtimes := openGPUs(t)
	world, err := nccl.InProcess(t.Context(), runtimes[:1])
	require.NoError(t, err)
	c := world[0]
	defer c.Close() //nolint:errcheck
	buf, err := runtimes[0].Allocate(4096)
	require.NoError(t, err)
	defer runtimes[0].Deallocate(buf) //nolint:errcheck
	ctx := context.Background()
	race.NoAllocs(t, 100, func() error {
		return errors.Join(c.AllReduce(buf, buf, 1024, dtype.F32, comm.Sum), c.Sync(ctx))
	})
}
