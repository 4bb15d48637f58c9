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
	open  int // events that were not destroyed
	reach runtime.Kind
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

func (s *streamed) CopyOut(dst []byte, src uintptr) error {
	s.note("copyout")
	return s.Runtime.CopyOut(dst, src)
}

type streamedComm struct {
	comm.Communicator
	s *streamed
}

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

func (c streamedComm) Group(f func() error) error {
	c.s.note("group")
	return c.Communicator.Group(f)
}

func (c streamedComm) Sync(context.Context) error {
	c.s.note("HOST-WAITS")
	return nil
}

func (c streamedComm) CreateEvent() (uintptr, error) {
	c.s.open++
	return 5, nil
}

func (c streamedComm) DestroyEvent(event uintptr) error {
	c.s.open--
	return nil
}

func (c streamedComm) RecordOnCommStream(event uintptr) error {
	c.s.note("comm-records")
	return c.Communicator.Sync(context.Background())
}

func (c streamedComm) RecordOnStream(event, stream uintptr) error {
	c.s.note("%d-records", stream)
	return nil
}

func (c streamedComm) CommStreamWaitEvent(event uintptr) error {
	c.s.note("comm-waits")
	return nil
}

func (c streamedComm) StreamWaitEvent(stream, event uintptr) error {
	c.s.note("%d-waits", stream)
	return nil
}

func (c streamedComm) SyncCommStream() error { return nil }

// withStreams runs body with one rank that has streams.
func withStreams(t *testing.T, body func(ctx context.Context, s *streamed, c comm.Communicator)) {
	s := &streamed{Runtime: cpu.New(), reach: runtime.CPU}
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		// Streams are found through decorators.
		body(ctx, s, comm.NewMeter(streamedComm{c, s}))
		return nil
	}))
	assert.Zero(t, s.open, "events that were not destroyed")
	assert.NoError(t, s.Close())
}

const fenced = "77-records comm-waits %s comm-records 77-waits"

// TestStreams checks that with streams on both sides events order them, and
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
		require.NoError(t, topk.AllReduce(ctx, g))
		assert.Equal(t, fmt.Sprintf(fenced, "group allgather allgather"), s.take())
		require.NoError(t, topk.Close())

		sized, err := distributed.NewSparse(s, c, 64, distributed.Config{Pattern: "topkAopt", Density: 0.1})
		require.NoError(t, err)
		require.NoError(t, sized.AllReduce(ctx, g))
		assert.Equal(t, fmt.Sprintf(fenced, "allgather")+" copyout "+fmt.Sprintf(fenced, "group"), s.take())
		require.NoError(t, sized.Close())

		s.reach = runtime.CUDA
		assert.ErrorIs(t, distributed.AllReduce(ctx, c, g, comm.Sum), comm.ErrDevice)
		_, err = distributed.NewSparse(s, c, 64, distributed.Config{})
		assert.ErrorIs(t, err, comm.ErrDevice)
	})
}

// gradients returns tensors of 100 elements.
func gradients(t *testing.T, rt runtime.Runtime, count int) []*runtime.Tensor {
	tensors := make([]*runtime.Tensor, count)
	for i := range tensors {
		g, err := runtime.New(rt, dtype.F32, 100)
		require.NoError(t, err)
		tensors[i] = g
	}
	return tensors
}

func free(t *testing.T, tensors []*runtime.Tensor) {
	for _, g := range tensors {
		assert.NoError(t, g.Free())
	}
}

// TestCloseInFlight checks that Close frees no bucket that the communicator
// still works on: memory of the compute stream is reused after the stream has
// waited for it.
func TestCloseInFlight(t *testing.T) {
	withStreams(t, func(ctx context.Context, s *streamed, c comm.Communicator) {
		params := gradients(t, s, 2)
		defer free(t, params)
		g, err := distributed.NewGradientSync(s, c, params, distributed.GradientConfig{})
		require.NoError(t, err)
		require.NoError(t, errors.Join(g.Ready(ctx, 0), g.Ready(ctx, 1)))
		s.take()
		require.NoError(t, g.Close())
		assert.Equal(t, "comm-records 77-waits", s.take())
	})
}

// TestBucketsOverlap checks that a bucket is submitted as soon as it and those
// before it are ready, and that the compute stream waits only in Wait.
func TestBucketsOverlap(t *testing.T) {
	withStreams(t, func(ctx context.Context, s *streamed, c comm.Communicator) {
		params := gradients(t, s, 4)
		defer free(t, params)
		g, err := distributed.NewGradientSync(s, c, params, distributed.GradientConfig{BucketBytes: 800})
		require.NoError(t, err)
		assert.Equal(t, [][]int{{3, 2}, {1, 0}}, g.Buckets())
		const launch = "77-records comm-waits allreduce"
		for _, k := range []struct {
			ready int
			want  string
		}{
			{3, ""},
			{0, ""},
			{1, ""}, // bucket 1 is full, but waits for bucket 0
			{2, launch + " " + launch},
		} {
			require.NoError(t, g.Ready(ctx, k.ready))
			assert.Equal(t, k.want, s.take(), "ready %d", k.ready)
		}
		require.NoError(t, g.Wait(ctx))
		assert.Equal(t, "comm-records 77-waits", s.take())
		require.NoError(t, g.Close())
	})
}
