package noop_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func TestConformance(t *testing.T) {
	rt := cpu.New()
	t.Cleanup(func() { require.NoError(t, rt.Close()) })
	commtest.Run(t, commtest.Backend{
		Name:  "noop",
		Sizes: []int{1},
		Run: func(ctx context.Context, _ int, body func(context.Context, commtest.Rank) error) error {
			c := noop.New(rt)
			return errors.Join(body(ctx, commtest.Rank{Comm: c, Runtime: rt}), c.Close())
		},
	})
}

// world returns a communicator and n vectors of four float32 on a runtime that
// the test closes, so that a leak fails it.
func world(t *testing.T, n int) (comm.Communicator, *cpu.Runtime, []uintptr) {
	rt := cpu.New()
	c := noop.New(rt)
	t.Cleanup(func() {
		assert.NoError(t, c.Close())
		assert.NoError(t, rt.Close())
	})
	bufs := make([]uintptr, n)
	for i := range bufs {
		x := float32(i)
		tensor, err := runtime.FromSlice(rt, []float32{x, x + 0.25, x + 0.5, x + 0.75}, 4)
		require.NoError(t, err)
		bufs[i], err = tensor.Ptr()
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, tensor.Free()) })
	}
	return c, rt, bufs
}

// first returns the first element of a vector.
func first(t *testing.T, rt runtime.Runtime, buf uintptr) float32 {
	var b [4]byte
	require.NoError(t, rt.CopyOut(b[:], buf))
	var f [1]float32
	require.NoError(t, dtype.ToFloat32(f[:], b[:], dtype.F32))
	return f[0]
}

func TestMessageToOneselfWithoutGroup(t *testing.T) {
	for name, order := range map[string][2]int{"send first": {0, 1}, "receive first": {1, 0}} {
		t.Run(name, func(t *testing.T) {
			c, rt, bufs := world(t, 4)
			calls := [2]func(src, dst uintptr, tag uint32) error{
				func(src, _ uintptr, tag uint32) error { return c.Send(src, 4, dtype.F32, 0, tag) },
				func(_, dst uintptr, tag uint32) error { return c.Recv(dst, 4, dtype.F32, 0, tag) },
			}
			// Two messages of one tag: the first sent is the first received.
			for _, which := range order {
				require.NoError(t, calls[which](bufs[0], bufs[2], 9))
				require.NoError(t, calls[which](bufs[1], bufs[3], 9))
			}
			require.NoError(t, c.Sync(t.Context()))
			assert.Equal(t, float32(0), first(t, rt, bufs[2]))
			assert.Equal(t, float32(1), first(t, rt, bufs[3]))
		})
	}
}

// A collective that follows a message uses what the message brings.
func TestCollectiveWaitsForMessage(t *testing.T) {
	c, rt, bufs := world(t, 3)
	require.NoError(t, c.Recv(bufs[1], 4, dtype.F32, 0, 1))
	require.NoError(t, c.AllReduce(bufs[1], bufs[2], 4, dtype.F32, comm.Sum))
	assert.Equal(t, float32(2), first(t, rt, bufs[2]), "the receive is not done yet")
	require.NoError(t, c.Send(bufs[0], 4, dtype.F32, 0, 1))
	require.NoError(t, c.Sync(t.Context()))
	assert.Equal(t, float32(0), first(t, rt, bufs[2]))
}

// Sync waits for a message that another goroutine sends.
func TestSyncWaitsForAnotherGoroutine(t *testing.T) {
	c, rt, bufs := world(t, 2)
	require.NoError(t, c.Recv(bufs[0], 4, dtype.F32, 0, 1))
	synced := make(chan error)
	go func() { synced <- c.Sync(t.Context()) }()
	require.NoError(t, c.Send(bufs[1], 4, dtype.F32, 0, 1))
	require.NoError(t, <-synced)
	assert.Equal(t, float32(1), first(t, rt, bufs[0]))
}

func TestMessageOfAnotherLength(t *testing.T) {
	c, _, bufs := world(t, 2)
	require.NoError(t, c.Send(bufs[0], 4, dtype.F32, 0, 1))
	assert.ErrorIs(t, c.Recv(bufs[1], 3, dtype.F32, 0, 1), comm.ErrMismatch)
	err := c.Sync(t.Context())
	assert.ErrorIs(t, err, comm.ErrBroken)
	assert.ErrorIs(t, err, comm.ErrMismatch)
}

func TestCheckDevice(t *testing.T) {
	c, rt, _ := world(t, 0)
	reacher, ok := comm.As[backend.MemoryChecker](c)
	require.True(t, ok)
	assert.NoError(t, reacher.CheckDevice(rt.Device()))
	assert.ErrorIs(t, reacher.CheckDevice(runtime.Device{Kind: runtime.CUDA, Index: 3}), comm.ErrDevice)
}

func TestCollectivesDoNotAllocate(t *testing.T) {
	c, _, bufs := world(t, 2)
	ctx := t.Context()
	one, zero := []int{4}, []int{0}
	allocs := testing.AllocsPerRun(100, func() {
		_ = c.AllReduce(bufs[0], bufs[1], 4, dtype.F32, comm.Sum)
		_ = c.AllReduce(bufs[0], bufs[0], 4, dtype.F32, comm.Sum)
		_ = c.Broadcast(bufs[0], 4, dtype.F32, 0)
		_ = c.AllGatherV(bufs[0], bufs[1], one, zero, dtype.F32)
		_ = c.AllToAllV(bufs[0], one, zero, bufs[1], one, zero, dtype.F32)
		_ = c.Sync(ctx)
		_ = c.Barrier(ctx)
	})
	assert.Zero(t, allocs)
}

func BenchmarkAllReduceInPlace(b *testing.B) {
	rt := cpu.New()
	defer rt.Close()
	c := noop.New(rt)
	defer c.Close()
	buf, err := rt.Allocate(4096)
	require.NoError(b, err)
	defer func() { require.NoError(b, rt.Deallocate(buf)) }()
	b.ReportAllocs()
	for b.Loop() {
		if err := c.AllReduce(buf, buf, 1024, dtype.F32, comm.Sum); err != nil {
			b.Fatal(err)
		}
	}
}

// failing is a runtime whose copies fail.
type failing struct {
	runtime.Runtime
	err error
}

func (f *failing) Copy(dst, src uintptr, bytes int) error {
	if f.err != nil {
		return f.err
	}
	return f.Runtime.Copy(dst, src, bytes)
}

// An error of a call that had to wait reaches the one who waits for it, not only
// whoever submits next.
func TestErrorOfADeferredCallStays(t *testing.T) {
	_, rt, bufs := world(t, 3)
	broken := errors.New("no copy")
	f := &failing{Runtime: rt}
	c := noop.New(f)
	defer c.Close()
	require.NoError(t, c.Recv(bufs[0], 4, dtype.F32, 0, 1))
	require.NoError(t, c.AllReduce(bufs[1], bufs[2], 4, dtype.F32, comm.Sum))
	f.err = broken
	assert.ErrorIs(t, c.Send(bufs[0], 4, dtype.F32, 0, 1), broken)
	f.err = nil
	assert.ErrorIs(t, c.Sync(t.Context()), broken)
	assert.ErrorIs(t, c.Barrier(t.Context()), comm.ErrBroken)
}

// A message without a partner fails the wait for it, whenever the communicator aborts.
func TestSyncBesideAbort(t *testing.T) {
	rt := cpu.New()
	defer rt.Close()
	for range 5000 {
		c := noop.New(rt)
		require.NoError(t, c.Send(64, 0, dtype.U8, 0, 0))
		var both sync.WaitGroup
		var failed error
		both.Go(func() { failed = c.Sync(t.Context()) })
		both.Go(func() { c.Abort(nil) })
		both.Wait()
		require.ErrorIs(t, failed, comm.ErrBroken)
		require.NoError(t, c.Close())
	}
}

// Each communicator has a name in flight records, which no other one has, unless the process has one.
func TestRunIsNamed(t *testing.T) {
	name := func() string {
		c, _, _ := world(t, 0)
		named, ok := comm.As[interface{ RunName() string }](c)
		require.True(t, ok)
		return named.RunName()
	}
	first := name()
	assert.NotEmpty(t, first)
	assert.NotEqual(t, first, name())
	t.Setenv(env.Run, "of the launcher")
	assert.Equal(t, "of the launcher", name())
}
