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
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/dtype"
)

// TestGraphOfKernelsAndCollectives captures a step of both streams, ordered by
// events, and replays it. A replay halves the numbers and adds up those of all
// ranks, so it multiplies by half the world size.
func TestGraphOfKernelsAndCollectives(t *testing.T) {
	runtimes := openGPUs(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	world, err := nccl.InProcess(ctx, runtimes)
	require.NoError(t, err)
	for _, symmetric := range []bool{false, true} {
		assert.NoError(t, each(world, func(c *nccl.Comm) error { return replay(ctx, c, symmetric) }), "symmetric: %t", symmetric)
	}
	require.NoError(t, each(world, (*nccl.Comm).Close))
}

func replay(ctx context.Context, c *nccl.Comm, symmetric bool) error {
	const n, replays = 1000, 5
	rt := c.Runtime()
	allocate, free := buffers(ctx, c, symmetric)
	buf, err := allocate(n * 4)
	if err != nil {
		return err
	}
	event, err := c.CreateEvent()
	if err != nil {
		return err
	}
	stream := rt.ComputeStream()
	if err := errors.Join(rt.Fill(buf, n, dtype.F32, 3), rt.Synchronize(ctx)); err != nil {
		return err
	}
	graph, err := rt.Stream().Capture(func() error {
		return errors.Join(
			rt.Kernels().Store(buf, dtype.F32, buf, n, 0.5, 0),
			c.RecordOnStream(event, stream), c.CommStreamWaitEvent(event),
			c.AllReduce(buf, buf, n, dtype.F32, comm.Sum),
			c.RecordOnCommStream(event), c.StreamWaitEvent(stream, event))
	})
	if err != nil {
		return err
	}
	for range replays {
		if err := graph.Launch(rt.Stream()); err != nil {
			return err
		}
	}
	got, err := read(rt, buf, n)
	if err != nil {
		return err
	}
	want := float32(3)
	for range replays {
		want *= float32(c.WorldSize()) / 2
	}
	for i, v := range got {
		if v != want {
			return fmt.Errorf("element %d is %v after %d replays, want %v", i, v, replays, want)
		}
	}
	return errors.Join(graph.Close(), c.DestroyEvent(event), c.Barrier(ctx), free(buf))
}

// Waiting inside a capture is a mistake of the caller's alone.
func TestSyncInACapture(t *testing.T) {
	runtimes := openGPUs(t)
	ctx := t.Context()
	world, err := nccl.InProcess(ctx, runtimes[:1])
	require.NoError(t, err)
	c := world[0]
	var inside error
	_, err = c.Stream().Capture(func() error {
		inside = c.Sync(ctx)
		return nil
	})
	t.Log(inside, "; ", err)
	assert.ErrorContains(t, inside, "captur")
	assert.NotErrorIs(t, inside, comm.ErrBroken)
	assert.NoError(t, c.Barrier(ctx), "the communicator goes on")
	assert.NoError(t, c.Close())
}
