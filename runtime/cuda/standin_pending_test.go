package cuda

import (
	"context"
	"errors"
	goruntime "runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/runtime"
)

// stall gives a stream work that does not end until the result is called.
func (f *standIn) stall(t *testing.T, rt *Runtime, s *Stream) (end func()) {
	t.Helper()
	p, err := rt.Allocate(64)
	require.NoError(t, err)
	f.Stall.Call(s.Handle(), 1)
	require.NoError(t, rt.CopyInAsync(s, p, make([]byte, 8)))
	require.NoError(t, rt.Deallocate(p))
	done, err := s.Done()
	require.NoError(t, err)
	require.False(t, done)
	return func() { f.Stall.Call(s.Handle(), 0) }
}

// cacheMost leaves most of a GPU's memory in the cache of a runtime.
func cacheMost(t *testing.T, rt *Runtime) {
	t.Helper()
	p, err := rt.Allocate(1200 << 20)
	require.NoError(t, err)
	require.NoError(t, rt.Deallocate(p))
}

// Work of other runtimes and frameworks on the GPU delays neither a flush nor Close.
func TestStandInWorkOfOthersIsNotWaitedFor(t *testing.T) {
	f := openStandIn(t)
	rt, other := openRuntime(t, 1), openRuntime(t, 1)
	theirs, err := other.NewStream(0)
	require.NoError(t, err)
	end := f.stall(t, other, theirs)
	cacheMost(t, rt)
	p, err := rt.Allocate(1300 << 20)
	require.NoError(t, err, "the cache went back")
	require.NoError(t, rt.Deallocate(p))
	require.NoError(t, rt.Close())
	end()
	require.NoError(t, other.Close())
	assert.Empty(t, f.alive())
}

func TestStandInFlushGivesUp(t *testing.T) {
	f := openStandIn(t)
	before := f.alive()
	for _, which := range []string{"compute stream", "adopted compute stream", "another stream"} {
		t.Run(which, func(t *testing.T) {
			owner := openRuntime(t, 1)
			rt, s := owner, owner.Stream()
			switch which {
			case "adopted compute stream":
				rt = openRuntime(t, 1, WithComputeStream(s.Handle()))
			case "another stream":
				var err error
				s, err = rt.NewStream(0)
				require.NoError(t, err)
			}
			rt.flushTime = time.Millisecond
			cacheMost(t, rt)
			end := f.stall(t, rt, s)
			objects := f.alive()
			cached := rt.Stats().CachedBytes
			const bytes = 1300 << 20
			_, err := rt.Allocate(bytes)
			require.ErrorIs(t, err, runtime.ErrOutOfMemory)
			assert.ErrorContains(t, err, "CUDA_ERROR_OUT_OF_MEMORY")
			assert.ErrorContains(t, err, "the cache could not be freed: cuda:1: work that may use the memory did not end within 1ms")
			_, err = rt.Trim()
			assert.ErrorContains(t, err, "did not end within 1ms")
			assert.Equal(t, cached, rt.Stats().CachedBytes)
			assert.Equal(t, objects, f.alive(), "the events of the waits are gone")
			cacheMost(t, rt) // can still be used

			end()
			p, err := rt.Allocate(bytes)
			require.NoError(t, err)
			require.NoError(t, rt.Deallocate(p))
			require.NoError(t, rt.Close())
			require.NoError(t, owner.Close())
			assert.Equal(t, before, f.alive())
		})
	}
}

func TestStandInReleaseMapping(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	rt.flushTime = time.Millisecond
	p, err := rt.AllocateMapping(5 << 20)
	require.NoError(t, err)
	end := f.stall(t, rt, rt.Stream())
	mappings := f.alive()["mappings"]
	require.NoError(t, rt.ReleaseMapping(p), "goes back later")
	assert.Equal(t, mappings, f.alive()["mappings"])
	assert.ErrorIs(t, rt.ReleaseMapping(p), runtime.ErrDoubleFree)
	end()
	other, err := rt.AllocateMapping(5 << 20)
	require.NoError(t, err)
	assert.NotEqual(t, p, other)
	require.NoError(t, rt.Deallocate(other))
	require.NoError(t, rt.Close())
	assert.ErrorIs(t, rt.ReleaseMapping(p), runtime.ErrClosed)
	assert.Empty(t, f.alive())
}

// Libraries free what they made also on a broken device and during Close, but
// not without a context.
func TestStandInCurrentToFree(t *testing.T) {
	f := openStandIn(t)
	before := f.alive()
	rt := openRuntime(t, 0)
	var current uintptr
	look := func() {
		c, err := rt.drv.get(-1, rt.drv.sym.CtxGetCurrent)
		require.NoError(t, err)
		current = uintptr(c)
	}
	f.inContext(t, rt, func() { rt.CurrentToFree(look) })
	assert.Equal(t, rt.Context(), current)
	f.inContext(t, rt, func() {
		assert.Panics(t, func() { rt.CurrentToFree(func() { panic("inside") }) })
	})

	f.Break.Call(700, 0)
	require.ErrorIs(t, rt.Fill(64, 1, dtype.F32, 1), runtime.ErrBroken)
	require.ErrorIs(t, rt.Current(func() error { return nil }), runtime.ErrBroken)
	current = 0
	rt.CurrentToFree(look)
	assert.Equal(t, rt.Context(), current)

	inside, leave := make(chan struct{}), make(chan struct{})
	go rt.CurrentToFree(func() {
		close(inside)
		<-leave
	})
	<-inside
	closed := make(chan error)
	go func() { closed <- rt.Close() }()
	for !rt.frees.isShut() {
		goruntime.Gosched()
	}
	assert.Equal(t, before["contexts"]+1, f.alive()["contexts"], "the context stays while it is in use")
	close(leave)
	assert.ErrorIs(t, <-closed, runtime.ErrBroken)
	rt.CurrentToFree(func() { t.Error("was called without a context") })
	assert.Equal(t, before, f.alive())
}

// While Close waits for work, what makes that end can be done.
func TestStandInCurrentToFreeEndsTheWork(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	end := f.stall(t, rt, rt.Stream())
	closed := make(chan error)
	go func() { closed <- rt.Close() }()
	for !rt.gate.isShut() {
		goruntime.Gosched()
	}
	require.ErrorIs(t, rt.Current(func() error { return nil }), runtime.ErrClosed)
	rt.CurrentToFree(end)
	require.NoError(t, <-closed)
	assert.Empty(t, f.alive())
}

func TestStandInCloseGivesUpOnALibrary(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	rt.closeTime = time.Millisecond
	inside, leave, left := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(left)
		rt.CurrentToFree(func() {
			close(inside)
			<-leave
		})
	}()
	<-inside
	assert.ErrorContains(t, rt.Close(), "closed while a library frees its memory, which did not end within 1ms")
	assert.Contains(t, f.alive(), "contexts", "the library still needs it")
	close(leave)
	<-left
	require.NoError(t, rt.releaseAll())
	assert.Empty(t, f.alive())
}

// Libraries that free their memory in the background may wait until the graphs
// are gone that captured their work, so these go first, at the latest when the
// wait for the work ends.
func TestStandInCloseDestroysGraphsFirst(t *testing.T) {
	f := openStandIn(t)
	for _, stalled := range []bool{false, true} {
		rt := openRuntime(t, 0)
		before := f.alive()["graphs"]
		graph, err := rt.Stream().Capture(func() error { return nil })
		require.NoError(t, err)
		end := func() {}
		if stalled {
			end = f.stall(t, rt, rt.Stream())
			rt.closeTime = 300 * time.Millisecond
		}
		done := make(chan error, 1)
		rt.Background(func() {
			for f.alive()["graphs"] != before {
				goruntime.Gosched()
			}
			end()
			done <- rt.Current(func() error { return nil })
		})
		require.NoError(t, rt.Close())
		assert.NoError(t, <-done)
		assert.NoError(t, graph.Close())
		assert.ErrorIs(t, graph.Launch(rt.Stream()), runtime.ErrClosed)
	}
	assert.Empty(t, f.alive())
}

// Close does not touch a capture that goes on, which ends well.
func TestStandInCloseWaitsForACapture(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	closed := make(chan error)
	graph, err := rt.Stream().Capture(func() error {
		go func() { closed <- rt.Close() }()
		for !rt.graphs.isShut() {
			goruntime.Gosched()
		}
		_, err := rt.Stream().Capture(func() error { return nil })
		assert.ErrorIs(t, err, runtime.ErrClosed)
		return rt.do(rt.drv.sym.StreamGetCtx, rt.ComputeStream(), hostmem.AddrOf(new(uint64)))
	})
	require.NoError(t, err)
	require.NoError(t, <-closed)
	require.NoError(t, graph.Close())
	assert.Empty(t, f.alive())
}

// A capture that Close did not wait for any longer ends all the same.
func TestStandInCaptureOutlastsClose(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	rt.closeTime = time.Millisecond
	graph, err := rt.Stream().Capture(func() error {
		assert.ErrorContains(t, rt.Close(), "did not end within 1ms")
		return nil
	})
	require.ErrorIs(t, err, runtime.ErrClosed)
	require.Nil(t, graph)
	capturing := new(uint32)
	require.NoError(t, rt.free(rt.drv.sym.StreamIsCapturing, rt.ComputeStream(), hostmem.AddrOf(capturing)))
	assert.Zero(t, *capturing)
	require.NoError(t, rt.releaseAll())
	assert.Empty(t, f.alive())
}

// Close waits for what streams have to do that were closed before.
func TestStandInCloseWaitsForClosedStreams(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	p, err := rt.Allocate(8)
	require.NoError(t, err)
	host, err := rt.AllocatePinned(8)
	require.NoError(t, err)
	s, err := rt.NewStream(0)
	require.NoError(t, err)
	streams := f.alive()["streams"]
	f.Stall.Call(s.Handle(), 1)
	require.NoError(t, rt.CopyInAsync(s, p, host))
	require.NoError(t, s.Close())
	assert.Equal(t, streams-1, f.alive()["streams"], "nobody waits for that")
	assert.False(t, rt.idle())
	f.Stall.Call(s.Handle(), 0)
	assert.True(t, rt.idle())
	require.NoError(t, errors.Join(rt.FreePinned(host), rt.Deallocate(p), rt.Close()))
	assert.Empty(t, f.alive())
}

// A stream may be asked whether it is idle while a capture begins.
func TestStandInIdleBesideCaptures(t *testing.T) {
	openStandIn(t)
	rt := openRuntime(t, 0)
	s := rt.Stream()
	assert.True(t, s.Idle())
	begun, over, asked := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(asked)
		s.Idle()
		close(begun)
		for {
			select {
			case <-over:
				return
			default:
				s.Idle()
			}
		}
	}()
	<-begun
	for range 2000 {
		graph, err := s.Capture(func() error {
			assert.False(t, s.Idle(), "not known")
			return nil
		})
		require.NoError(t, err)
		require.NoError(t, graph.Close())
	}
	close(over)
	<-asked
	assert.True(t, s.Idle())
	require.NoError(t, rt.Close())
	assert.False(t, s.Idle(), "it is closed")
}

// A framework's capture goes on while others ask whether streams and events are done, and wait for them: its
// capture forbids calls that may disturb it to all threads.
func TestStandInQueriesBesideForeignCaptures(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	foreign, err := rt.NewStream(0)
	require.NoError(t, err)
	event, err := rt.NewEvent()
	require.NoError(t, err)
	require.NoError(t, rt.Stream().Record(event))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	const global = 0
	for name, ask := range map[string]func() error{
		"idle":        func() error { assert.True(t, rt.Stream().Idle()); return nil },
		"done":        func() error { _, err := rt.Stream().Done(); return err },
		"event":       func() error { _, err := event.Done(); return err },
		"synchronize": func() error { return rt.Synchronize(ctx) },
		"wait":        func() error { return rt.Synchronize(context.Background()) },
		"wait, event": func() error { return event.Synchronize(context.Background()) },
	} {
		var graph uintptr
		require.NoError(t, rt.Current(func() error {
			assert.Zero(t, f.BeginCapture.Int(foreign.Handle(), global))
			asked := make(chan error)
			go func() { asked <- ask() }()
			assert.NoError(t, <-asked, name)
			assert.NoError(t, ask(), "%s, on the thread that captures", name)
			status := f.EndCapture.Int(foreign.Handle(), hostmem.AddrOf(&graph))
			require.Zero(t, status, "%s ended the capture", name)
			assert.Zero(t, f.GraphDestroy.Int(graph))
			return nil
		}))
	}
	require.NoError(t, event.Close())
	require.NoError(t, foreign.Close())
	require.NoError(t, rt.Close())
}

func TestStandInWaitsInACaptureAreRecognised(t *testing.T) {
	openStandIn(t)
	rt := openRuntime(t, 0)
	s := rt.Stream()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for name, wait := range map[string]func() error{
		"synchronize":        func() error { return s.Synchronize(context.Background()) },
		"synchronize, polls": func() error { return s.Synchronize(ctx) },
		"done":               func() error { _, err := s.Done(); return err },
	} {
		var waitErr error
		_, err := s.Capture(func() error {
			waitErr = wait()
			return nil
		})
		var e *Error
		require.ErrorAs(t, waitErr, &e, name)
		assert.True(t, e.InCapture(), name)
		assert.ErrorContains(t, e, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (900): operation not permitted when stream is capturing; "+
			"the stream is being captured, wait outside Capture", name)
		require.ErrorAs(t, err, &e, "the capture is invalid")
		assert.True(t, e.InCapture(), name)
		assert.NotContains(t, e.Error(), "wait outside")
		require.NoError(t, wait(), "the stream and the device are sound")
	}
	require.NoError(t, rt.Close())
}

func TestInCapture(t *testing.T) {
	for status, want := range map[Status]bool{0: false, 600: false, 700: false, 899: false, 900: true, 904: true, 907: true, 908: true, 909: false} {
		assert.Equal(t, want, (&Error{Status: status}).InCapture(), "%d", status)
		assert.False(t, want && errors.Is(&Error{Status: status}, runtime.ErrBroken), "%d", status)
	}
}

// A flush waits for room in a stream that is full. Nothing else waits for that: other objects come
// and go, and the stream itself is destroyed when the flush has done with it.
func TestStandInFlushIntoAFullStream(t *testing.T) {
	f := openStandIn(t)
	before := f.alive()
	rt := openRuntime(t, 0)
	full, err := rt.NewStream(0)
	require.NoError(t, err)
	p, err := rt.Allocate(64 << 20)
	require.NoError(t, err)
	pinned, err := rt.AllocatePinned(64)
	require.NoError(t, err)
	require.NoError(t, rt.Deallocate(p))
	f.Full.Call(full.Handle(), 1)
	trimmed := make(chan error, 1)
	go func() {
		_, err := rt.Trim()
		trimmed <- err
	}()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, poll.Until(ctx, func() (bool, error) { return f.Full.Int(full.Handle(), 1) == 1, nil }))
	others := make(chan error, 1)
	go func() {
		s, err := rt.NewStream(0)
		if err != nil {
			others <- err
			return
		}
		others <- errors.Join(s.Close(), rt.FreePinned(pinned), full.Close())
	}()
	select {
	case err := <-others:
		require.NoError(t, err)
	case <-ctx.Done():
		f.Full.Call(full.Handle(), 0)
		require.Fail(t, "they wait for the flush")
	}
	streams := f.alive()["streams"]
	f.Full.Call(full.Handle(), 0)
	require.NoError(t, <-trimmed)
	assert.Equal(t, streams-1, f.alive()["streams"], "the flush used it until now")
	require.NoError(t, rt.Close())
	assert.Equal(t, before, f.alive())
}
