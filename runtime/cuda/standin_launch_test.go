package cuda

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// Goroutines launch graphs with kernels of one runtime on different streams, and one launches such kernels eagerly: no
// two of them overlap.
func TestStandInLaunchesOfManyGoroutines(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	second := openRuntime(t, 0)
	p, err := rt.Allocate(64)
	require.NoError(t, err)
	kernels := rt.Kernels()
	store := func() error { return kernels.Store(p, dtype.F32, p, 16, 2, 0) }
	// The second work has another stream, which launches of both are ordered with.
	side, err := rt.NewStream(0)
	require.NoError(t, err)
	both := func() error {
		rt.Serialize(ordered{side})
		return errors.Join(side.WaitFor(rt.Stream()), store())
	}
	const launches = 2000
	var graphs []*Graph
	for _, submit := range []func() error{store, both, store} {
		g, err := rt.Stream().Capture(submit)
		require.NoError(t, err)
		graphs = append(graphs, g)
	}
	var goroutines sync.WaitGroup
	f.Exclusive.Call(1)
	for i, g := range graphs {
		owner := []*Runtime{rt, second, rt}[i]
		stream, err := owner.NewStream(0)
		require.NoError(t, err)
		goroutines.Go(func() {
			for range launches {
				assert.NoError(t, g.Launch(stream))
			}
			assert.NoError(t, g.Close())
		})
	}
	goroutines.Go(func() {
		for range launches {
			assert.NoError(t, store())
		}
	})
	goroutines.Wait()
	assert.Zero(t, f.Exclusive.Call(0), "launches that overlap with others")
	require.NoError(t, rt.Deallocate(p))
	require.NoError(t, second.Close())
	require.NoError(t, rt.Close())
}

// Runtimes of one context know of each other's captures: a stream of one has the work of another.
func TestStandInCapturesOfAnotherRuntime(t *testing.T) {
	f := openStandIn(t)
	worker := openRuntime(t, 0)
	program := openRuntime(t, 0)
	elsewhere := openRuntime(t, 0, WithContext(f.Context.Call(0)))
	launched, err := program.NewStream(0)
	require.NoError(t, err)
	p, err := worker.Allocate(64)
	require.NoError(t, err)
	fill := func() error { return program.Fill(p, 8, dtype.U64, 1) }
	home := worker.WrapStream(program.ComputeStream())
	assert.True(t, home.Idle())
	assert.False(t, worker.HasCaptured())

	g, err := program.Stream().Capture(func() error {
		assert.False(t, home.Idle(), "a question would end the capture")
		worker.Serialize(ordered{home})
		return fill()
	})
	require.NoError(t, err)
	assert.True(t, worker.HasCaptured())
	assert.False(t, elsewhere.HasCaptured(), "in its own context")
	for range 2 {
		require.NoError(t, fill())
		require.NoError(t, g.Launch(launched))
		assert.Equal(t, f.Submitted.Call(home.Handle()), f.Waited.Call(launched.Handle(), home.Handle()), "work before it")
		assert.Equal(t, f.Submitted.Call(launched.Handle()), f.Waited.Call(home.Handle(), launched.Handle()), "work behind it")
	}
	require.NoError(t, g.Close())
	require.NoError(t, worker.Deallocate(p))
	require.NoError(t, program.Close())
	assert.False(t, worker.HasCaptured(), "there are no graphs of runtimes that are closed")
	for _, rt := range []*Runtime{worker, elsewhere} {
		require.NoError(t, rt.Close())
	}
}

// A graph that is launched elsewhere while the stream of its work is captured would become part of
// that capture.
func TestStandInLaunchBesideACapture(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	other, err := rt.NewStream(0)
	require.NoError(t, err)
	p, err := rt.Allocate(64)
	require.NoError(t, err)
	capture := func(beside func()) *Graph {
		g, err := rt.Stream().Capture(func() error {
			rt.Serialize(ordered{rt.Stream()})
			beside()
			return rt.Fill(p, 8, dtype.U64, 1)
		})
		require.NoError(t, err)
		return g
	}
	first := capture(func() {})
	second := capture(func() {
		refused := make(chan error)
		go func() { refused <- first.Launch(other) }()
		err := <-refused
		assert.ErrorIs(t, err, runtime.ErrArgument)
		assert.ErrorContains(t, err, "is being captured")
	})
	assert.Zero(t, f.Submitted.Call(other.Handle()))
	assert.Zero(t, f.Waited.Call(other.Handle(), rt.ComputeStream()))
	for _, g := range []*Graph{first, second} {
		require.NoError(t, g.Launch(other), "the capture is over")
		require.NoError(t, g.Close())
	}
	require.NoError(t, rt.Deallocate(p))
	require.NoError(t, rt.Close())
}

// Where later work cannot be made to wait for a graph that runs, the launch waits for it.
func TestStandInLaunchThatNothingWaitsFor(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	rt.flushTime = time.Millisecond
	other, err := rt.NewStream(0)
	require.NoError(t, err)
	p, err := rt.Allocate(64)
	require.NoError(t, err)
	g, err := rt.Stream().Capture(func() error {
		rt.Serialize(ordered{rt.Stream()})
		return rt.Fill(p, 8, dtype.U64, 1)
	})
	require.NoError(t, err)
	require.NoError(t, g.Launch(other), "makes the events")
	for _, call := range []string{"cuEventRecord", "cuStreamWaitEvent"} {
		f.failCall(call, 400, 1)
		before := f.Submitted.Call(other.Handle())
		require.Error(t, g.Launch(other), "nothing has happened")
		assert.Equal(t, before, f.Submitted.Call(other.Handle()))

		f.failCall(call, 400, 2)
		require.NoError(t, g.Launch(other), "which is over")
		assert.Equal(t, before+1, f.Submitted.Call(other.Handle()))

		f.failCall(call, 400, 2)
		f.Stall.Call(other.Handle(), 1)
		err := g.Launch(other)
		require.ErrorContains(t, err, "a graph runs that later work does not wait for")
		var e *Error
		require.ErrorAs(t, err, &e)
		assert.EqualValues(t, 400, e.Status)
		f.Stall.Call(other.Handle(), 0)
	}
	require.NoError(t, g.Close())
	require.NoError(t, rt.Deallocate(p))
	require.NoError(t, rt.Close())
}
