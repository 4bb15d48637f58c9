package distributed_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

const computeStream = 77

// streamed is a runtime and a communicator with a stream each, which write
// down how they are ordered. (The work itself is done on the host at once.)
type streamed struct {
	*cpu.Runtime
	log   []string
	reach runtime.Kind
	in    int // copies to the device, which wait for the stream

	syncFails, orderFails error // of the communicator
}

func (s *streamed) note(format string, args ...any) {
	s.log = append(s.log, fmt.Sprintf(format, args...))
}

func (s *streamed) take() string {
	log := strings.Join(s.log, " ")
	s.log = nil
	return log
}

func (s *streamed) ComputeStream() uintptr { return computeStream }

func (s *streamed) Synchronize(context.Context) error {
	s.note("HOST-WAITS")
	return nil
}

func (s *streamed) CopyIn(dst uintptr, src []byte) error {
	s.in++
	return s.Runtime.CopyIn(dst, src)
}

func (s *streamed) CopyOut(dst []byte, src uintptr) error {
	s.note("copyout")
	return s.Runtime.CopyOut(dst, src)
}

type streamedComm struct {
	comm.Communicator
	s *streamed
}

func newStreamedComm(c comm.Communicator, s *streamed) streamedComm { return streamedComm{c, s} }

func (c streamedComm) CheckDevice(d runtime.Device) error {
	if d.Kind != c.s.reach {
		return fmt.Errorf("%w: %v", comm.ErrDevice, d)
	}
	return nil
}

func (c streamedComm) AllReduce(send, recv uintptr, n int, dt dtype.DType, op comm.ReduceOp) error {
	c.s.note("allreduce")
	if err := c.Communicator.AllReduce(send, recv, n, dt, op); err != nil {
		return err
	}
	return c.Communicator.Sync(context.Background())
}

func (c streamedComm) AllGather(send, recv uintptr, n int, dt dtype.DType) error {
	c.s.note("allgather")
	return c.Communicator.AllGather(send, recv, n, dt)
}

func (c streamedComm) Group(calls ...comm.Call) error {
	c.s.note("group")
	return c.Communicator.Group(calls...)
}

func (c streamedComm) Sync(context.Context) error {
	c.s.note("HOST-WAITS")
	return c.s.syncFails
}

func (c streamedComm) CommStream() uintptr { return 5 }

func (c streamedComm) CommAfter(stream uintptr) error {
	c.s.note("comm-after-%d", stream)
	return nil
}

func (c streamedComm) AfterComm(stream uintptr) error {
	if c.s.orderFails != nil {
		return c.s.orderFails
	}
	c.s.note("%d-after-comm", stream)
	return c.Communicator.Sync(context.Background())
}

// withStreams runs body with one rank that has streams.
func withStreams(t *testing.T, body func(ctx context.Context, s *streamed, c comm.Communicator)) {
	s := &streamed{Runtime: cpu.New(), reach: runtime.CPU}
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		// Streams are found through decorators.
		body(ctx, s, comm.NewMeter(newStreamedComm(c, s)))
		return nil
	}))
	assert.NoError(t, s.Close())
}

const fenced = "comm-after-77 %s 77-after-comm"

// TestStreams checks that with streams on both sides these are ordered, and
// that the host waits only where it needs a number.
func TestStreams(t *testing.T) {
	withStreams(t, func(ctx context.Context, s *streamed, c comm.Communicator) {
		g, err := runtime.FromSlice(s, normal(64, 1), 64)
		require.NoError(t, err)
		defer g.Free()

		require.NoError(t, distributed.AllReduce(ctx, c, g, comm.Sum))
		assert.Equal(t, fmt.Sprintf(fenced, "allreduce"), s.take())

		topk, err := distributed.NewSparse(s, c, 64, distributed.Config{Pattern: "topkA", Density: 0.1})
		require.NoError(t, err)
		copies := s.in
		require.NoError(t, topk.AllReduce(ctx, g))
		assert.Equal(t, copies, s.in)
		assert.Equal(t, fmt.Sprintf(fenced, "allgather"), s.take())
		require.NoError(t, topk.Close())

		sized, err := distributed.NewSparse(s, c, 64, distributed.Config{Pattern: "topkAopt", Density: 0.1})
		require.NoError(t, err)
		require.NoError(t, sized.AllReduce(ctx, g))
		assert.Equal(t, fmt.Sprintf(fenced, "allgather"), s.take(), "lengths go with the lists")
		require.NoError(t, sized.Close())

		s.reach = runtime.CUDA
		assert.ErrorIs(t, distributed.AllReduce(ctx, c, g, comm.Sum), comm.ErrDevice)
		_, err = distributed.NewSparse(s, c, 64, distributed.Config{})
		assert.ErrorIs(t, err, comm.ErrDevice)
	})
}

// TestCloseInFlight checks that Close frees no bucket that the communicator
// still works on. The host waits: an event would bound no time and could fail.
func TestCloseInFlight(t *testing.T) {
	withStreams(t, func(ctx context.Context, s *streamed, c comm.Communicator) {
		params := gradients(t, s, 2)
		defer free(t, params)
		live := s.Stats().LiveBlocks
		g, err := distributed.NewGradientSync(ctx, s, c, params, distributed.GradientConfig{})
		require.NoError(t, err)
		require.NoError(t, errors.Join(g.Ready(ctx, 0, params[0]), g.Ready(ctx, 1, params[1])))
		s.take()
		require.NoError(t, g.Close())
		assert.Equal(t, "HOST-WAITS", s.take())
		assert.Equal(t, live, s.Stats().LiveBlocks, "the bucket was given back")
	})
}

// TestCloseStuck checks that memory which the communicator may still write is
// not given back, whether the step was given up before Wait or failed in it.
func TestCloseStuck(t *testing.T) {
	unordered := errors.New("order lost")
	s := &streamed{Runtime: cpu.New(), reach: runtime.CPU}
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		c = newStreamedComm(c, s)
		params := gradients(t, s, 2)
		defer free(t, params)
		for _, orderFails := range []error{nil, unordered} {
			live := s.Stats().LiveBlocks
			g, err := distributed.NewGradientSync(ctx, s, c, params, distributed.GradientConfig{})
			require.NoError(t, err)
			require.NoError(t, errors.Join(g.Ready(ctx, 0, params[0]), g.Ready(ctx, 1, params[1])))
			if orderFails != nil {
				s.orderFails = orderFails
				require.ErrorIs(t, g.Wait(ctx), unordered)
			}
			s.syncFails = comm.ErrTimeout
			err = g.Close()
			require.ErrorIs(t, err, comm.ErrTimeout)
			assert.ErrorContains(t, err, "not given back")
			assert.Equal(t, live+1, s.Stats().LiveBlocks, "the bucket may still be written")
			require.ErrorIs(t, g.Close(), comm.ErrTimeout, "again")
			s.syncFails = comm.ErrClosed
			require.NoError(t, g.Close(), "nobody writes any more")
			assert.Equal(t, live, s.Stats().LiveBlocks)
			s.syncFails, s.orderFails = nil, nil
		}
		return nil
	}))
	assert.NoError(t, s.Close())
}

// TestSparseCloseWaits is for a step that failed behind its communication: the
// host waits before the memory is given back, and keeps it if that fails.
func TestSparseCloseWaits(t *testing.T) {
	unordered := errors.New("order lost")
	s := &streamed{Runtime: cpu.New(), reach: runtime.CPU}
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		c = newStreamedComm(c, s)
		for _, syncFails := range []error{nil, comm.ErrTimeout} {
			g, err := runtime.FromSlice(s, normal(64, 1), 64)
			require.NoError(t, err)
			live := s.Stats().LiveBlocks
			topk, err := distributed.NewSparse(s, c, 64, distributed.Config{Pattern: "topkA", Density: 0.1})
			require.NoError(t, err)
			s.orderFails, s.syncFails = unordered, syncFails
			require.ErrorIs(t, topk.AllReduce(ctx, g), unordered)
			s.take()
			err = topk.Close()
			assert.Equal(t, "HOST-WAITS", s.take())
			require.ErrorIs(t, err, syncFails)
			assert.Equal(t, syncFails == nil, s.Stats().LiveBlocks == live, "memory is given back exactly if nobody writes it")
			s.orderFails, s.syncFails = nil, comm.ErrClosed
			require.NoError(t, topk.Close())
			s.syncFails = nil
			require.NoError(t, g.Free())
		}
		return nil
	}))
	assert.NoError(t, s.Close())
}

// otherStream is the runtime of a device on another compute stream.
type otherStream struct{ *cpu.Runtime }

func (otherStream) ComputeStream() uintptr { return computeStream + 1 }

// TestTwoRuntimesOfOneDevice: events order one compute stream against the
// communicator, so memory of a runtime with another is refused, before anything
// is sent.
func TestTwoRuntimesOfOneDevice(t *testing.T) {
	withStreams(t, func(ctx context.Context, s *streamed, c comm.Communicator) {
		other := otherStream{cpu.New()}
		mine, theirs := gradients(t, s, 2), gradients(t, other, 1)
		defer func() {
			free(t, mine)
			free(t, theirs)
			assert.NoError(t, other.Close())
		}()
		assert.ErrorIs(t, distributed.AllGather(ctx, c, mine[0], theirs[0]), runtime.ErrDevice)
		assert.ErrorIs(t, distributed.AllToAll(ctx, c, theirs[0], mine[0]), runtime.ErrDevice)
		_, err := distributed.NewGradientSync(ctx, s, c, append(mine, theirs...), distributed.GradientConfig{})
		assert.ErrorIs(t, err, runtime.ErrDevice)
		assert.ErrorContains(t, err, "gradient 2")
		topk, err := distributed.NewSparse(s, c, 100, distributed.Config{Pattern: "topkA", Density: 0.1})
		require.NoError(t, err)
		assert.ErrorIs(t, topk.AllReduce(ctx, theirs[0]), runtime.ErrDevice)
		require.NoError(t, topk.Close())
		assert.Empty(t, s.take())

		// One runtime's tensors, whichever it is, are ordered by its own stream.
		require.NoError(t, distributed.AllGather(ctx, c, mine[0], mine[1]))
		assert.Equal(t, fmt.Sprintf(fenced, "allgather"), s.take())
		require.NoError(t, distributed.AllReduce(ctx, c, theirs[0], comm.Sum))
		assert.Equal(t, "comm-after-78 allreduce 78-after-comm", s.take())
	})
}

// TestTwoRuntimesWithoutStreams: without streams all work is done when a method
// returns, so there is nothing to order.
func TestTwoRuntimesWithoutStreams(t *testing.T) {
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		one, two := cpu.New(), cpu.New()
		dst, src := gradients(t, one, 1), gradients(t, two, 1)
		require.NoError(t, src[0].Fill(3))
		require.NoError(t, distributed.AllGather(ctx, c, dst[0], src[0]))
		values, err := runtime.ToSlice[float32](dst[0])
		require.NoError(t, err)
		assert.EqualValues(t, 3, values[99])
		free(t, dst)
		free(t, src)
		return errors.Join(one.Close(), two.Close())
	}))
}

// TestBucketsOverlap checks that a bucket is submitted as soon as it and those
// before it are ready, and that the compute stream waits only in Wait.
func TestBucketsOverlap(t *testing.T) {
	withStreams(t, func(ctx context.Context, s *streamed, c comm.Communicator) {
		params := gradients(t, s, 4)
		defer free(t, params)
		g, err := distributed.NewGradientSync(ctx, s, c, params, distributed.GradientConfig{BucketBytes: 800})
		require.NoError(t, err)
		assert.Equal(t, [][]int{{3, 2}, {1, 0}}, g.Buckets())
		const launch = "comm-after-77 allreduce"
		for _, k := range []struct {
			ready int
			want  string
		}{
			{3, ""},
			{0, ""},
			{1, ""}, // bucket 1 is full, but waits for bucket 0
			{2, launch + " " + launch},
		} {
			require.NoError(t, g.Ready(ctx, k.ready, params[k.ready]))
			assert.Equal(t, k.want, s.take(), "ready %d", k.ready)
		}
		require.NoError(t, g.Wait(ctx))
		assert.Equal(t, "77-after-comm", s.take())
		require.NoError(t, g.Close())
	})
}
