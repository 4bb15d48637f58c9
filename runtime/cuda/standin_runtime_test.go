package cuda

import (
	"context"
	"errors"
	"math"
	"os"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"weak"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// everything makes one of each thing that a runtime can make.
type everything struct {
	stream *Stream
	event  *Event
	graph  *Graph
	pinned []byte
}

func makeEverything(t *testing.T, rt *Runtime) (e everything) {
	t.Helper()
	p, err := rt.Allocate(4096)
	require.NoError(t, err)
	e.stream, err = rt.NewStream(0)
	require.NoError(t, err)
	e.event, err = rt.NewTimingEvent()
	require.NoError(t, err)
	e.pinned, err = rt.AllocatePinned(100)
	require.NoError(t, err)
	kernels := rt.Kernels() // which allocates
	e.graph, err = rt.Stream().Capture(func() error { return kernels.Store(p, dtype.F32, p, 10, 2, 0) })
	require.NoError(t, err)
	in, err := rt.CopyInStream()
	require.NoError(t, err)
	require.NoError(t, in.WaitFor(rt.Stream()))
	require.NoError(t, e.stream.WaitFor(in))
	require.NoError(t, rt.Stream().WaitFor(e.stream))
	require.NoError(t, rt.Deallocate(p))
	return e
}

func TestStandInCloseLeavesNothing(t *testing.T) {
	f := openStandIn(t)
	for index := range 2 {
		rt := openRuntime(t, index)
		e := makeEverything(t, rt)
		window, err := rt.OpenWindow(hostMemory(t, 4096))
		require.NoError(t, err)
		assert.Len(t, f.alive(), len(kinds), "one of each kind at least: %v", f.alive())
		require.NoError(t, window.Close())
		require.NoError(t, rt.FreePinned(e.pinned))
		require.NoError(t, rt.Close())
		assert.Empty(t, f.alive())

		for range 2 {
			assert.NoError(t, e.stream.Close())
			assert.NoError(t, e.event.Close())
			assert.NoError(t, e.graph.Close())
			assert.NoError(t, rt.WrapEvent(e.event.Handle()).Close())
		}
		for name, err := range map[string]error{
			"current":     rt.Current(func() error { return errors.New("was called") }),
			"launch":      e.graph.Launch(rt.Stream()),
			"record":      e.stream.Record(e.event),
			"wait":        e.stream.Wait(e.event),
			"wait for":    e.stream.WaitFor(rt.Stream()),
			"synchronize": e.event.Synchronize(t.Context()),
			"free pinned": rt.FreePinned(e.pinned),
			"pointer":     rt.CheckPointer(64),
			"stream":      rt.CheckStream(0),
		} {
			assert.ErrorIs(t, err, runtime.ErrClosed, name)
		}
		_, err = rt.CopyInStream()
		assert.ErrorIs(t, err, runtime.ErrClosed)
		_, err = rt.Stream().Capture(func() error { return nil })
		assert.ErrorIs(t, err, runtime.ErrClosed)
	}
}

func TestStandInFork(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	fork, err := rt.ForkStream()
	require.NoError(t, err)
	assert.Equal(t, rt.Device(), fork.Device())
	assert.NotEqual(t, rt.ComputeStream(), fork.ComputeStream())
	rt.Freeze()
	assert.True(t, fork.Stats().Frozen)
	rt.Freeze()
	late, err := rt.ForkStream()
	require.NoError(t, err)
	assert.True(t, late.Stats().Frozen, "it came when the parent was frozen")
	rt.Unfreeze()
	assert.True(t, late.Stats().Frozen, "as often as the parent")
	rt.Unfreeze()
	assert.False(t, fork.Stats().Frozen)
	assert.False(t, late.Stats().Frozen)
	require.NoError(t, errors.Join(fork.Close(), late.Close()))

	forgotten, err := rt.ForkStream()
	require.NoError(t, err)
	_, err = forgotten.Allocate(100)
	require.NoError(t, err)
	assert.ErrorIs(t, rt.Close(), runtime.ErrLeak)
	assert.Empty(t, f.alive())
	_, err = rt.ForkStream()
	assert.ErrorIs(t, err, runtime.ErrClosed)
}

// Cached memory of a parent or fork is available to its relatives.
func TestStandInForksShareMemory(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 1)
	var family []*Runtime
	for range 2 {
		b, err := rt.ForkStream()
		require.NoError(t, err)
		family = append(family, b.(*Runtime))
	}
	family = append(family, rt)
	for _, has := range family {
		for _, wants := range family {
			cacheMost(t, has)
			p, err := wants.Allocate(1300 << 20)
			require.NoError(t, err)
			require.NoError(t, wants.Deallocate(p))
			released, err := rt.Trim()
			require.NoError(t, err)
			assert.GreaterOrEqual(t, released, int64(1300<<20))
		}
	}
	require.NoError(t, rt.Close())
	assert.Empty(t, f.alive())
}

// Where a fork cannot give its memory back, who needs it is told.
func TestStandInForkKeepsMemory(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 1)
	fork, err := rt.ForkStream()
	require.NoError(t, err)
	b := fork.(*Runtime)
	b.flushTime = time.Millisecond
	cacheMost(t, b)
	end := f.stall(t, b, b.Stream())
	_, err = rt.Allocate(1300 << 20)
	require.ErrorIs(t, err, runtime.ErrOutOfMemory)
	assert.ErrorContains(t, err, "a fork or the parent returned no memory: cuda:1: work that may use the memory did not end within 1ms")
	end()
	p, err := rt.Allocate(1300 << 20)
	require.NoError(t, err)
	require.NoError(t, rt.Deallocate(p))
	require.NoError(t, rt.Close())
	assert.Empty(t, f.alive())
}

// A fork that comes while its parent is being closed, comes too late.
func TestStandInForkWhileClosing(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	rt.Background(func() { // for which Close waits before it refuses calls
		for !rt.graphs.isShut() {
			goruntime.Gosched()
		}
		_, err := rt.ForkStream()
		assert.ErrorIs(t, err, runtime.ErrClosed)
	})
	require.NoError(t, rt.Close())
	assert.Empty(t, f.alive())
}

func TestStandInCloseReportsPinnedMemory(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	makeEverything(t, rt)
	err := rt.Close()
	assert.ErrorIs(t, err, runtime.ErrLeak)
	assert.ErrorContains(t, err, "1 pinned allocations of 100 bytes")
	assert.Empty(t, f.alive())
}

func TestStandInClosedThingsAreRefused(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	e := makeEverything(t, rt)
	before := f.alive()
	require.NoError(t, e.stream.Close())
	require.NoError(t, e.event.Close())
	require.NoError(t, e.graph.Close())
	require.NoError(t, rt.FreePinned(e.pinned))
	assert.Equal(t, before["streams"]-1, f.alive()["streams"])
	assert.Equal(t, before["events"]-2, f.alive()["events"], "with the one of WaitFor")

	_, doneErr := e.stream.Done()
	for name, err := range map[string]error{
		"launch":      e.graph.Launch(rt.Stream()),
		"record":      e.stream.Record(e.event),
		"wait":        rt.Stream().Wait(e.event),
		"done":        doneErr,
		"synchronize": e.stream.Synchronize(context.Background()),
		"copy":        rt.CopyInAsync(e.stream, 64, []byte{1}),
		"no stream":   rt.CopyOutAsync(nil, []byte{1}, 64),
	} {
		assert.ErrorIs(t, err, runtime.ErrArgument, name)
	}
	assert.ErrorIs(t, rt.FreePinned(make([]byte, 10)), runtime.ErrForeignPointer)

	require.NoError(t, rt.Stream().Close(), "does nothing")
	require.NoError(t, rt.Synchronize(context.Background()))
	require.NoError(t, rt.Close())
}

func TestStandInOpenThatFailsLeavesNothing(t *testing.T) {
	f := openStandIn(t)
	for _, call := range []string{"cuMemGetAllocationGranularity", "cuStreamCreateWithPriority", "cuModuleLoadData", "cuModuleGetFunction"} {
		name := append([]byte(call), 0)
		f.Fail.Call(hostmem.Addr(name), 400, 1000)
		_, err := Open(0)
		f.Fail.Call(hostmem.Addr(name), 0, 0)
		goruntime.KeepAlive(name)

		var e *Error
		require.ErrorAs(t, err, &e, call)
		assert.Equal(t, Error{Status: 400, Name: "CUDA_ERROR_INVALID_HANDLE", Text: "invalid resource handle", Call: call}, *e)
		assert.Empty(t, f.alive(), call)
	}
}

// Kernels that could not be loaded are at the next call, those that are missing alone, and
// whoever has them is told meanwhile.
func TestStandInKernelsThatCannotBeLoaded(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	load := append([]byte("cuModuleGetFunction"), 0)
	modules := func() int { return f.alive()["modules"] }
	before := modules()
	var asked sync.WaitGroup
	for n := 1; n < 100; n++ {
		f.Fail.Call(hostmem.Addr(load), 400, uintptr(-n))
		kernels := rt.Kernels()
		if left := f.Fail.Int(hostmem.Addr(load), 0, 0); left < 0 {
			require.NoError(t, kernels.Merge(0, dtype.F32, 0, nil, 1, 0, 0, kernel.Restoration{}))
			break
		}
		asked.Go(func() { _ = kernels.Merge(0, dtype.F32, 0, nil, 1, 0, 0, kernel.Restoration{}) })
		require.LessOrEqual(t, modules()-before, 6)
	}
	goruntime.KeepAlive(load)
	asked.Wait()
	require.Equal(t, 6, modules()-before)
	require.NoError(t, rt.Close())
	assert.Empty(t, f.alive())
}

// The tiles of two lists that are as long as lists can be have room for what they tell each
// other: as many words as there are tiles.
func TestStandInUnionOfTwoOfTheLongestLists(t *testing.T) {
	openStandIn(t)
	rt := openRuntime(t, 0)
	k := rt.Kernels()
	p, err := rt.Allocate(64)
	require.NoError(t, err)
	l := kernel.Entries{Idx: p, Val: p, N: math.MaxInt32, Len: p}
	_ = k.Union(l, math.MaxInt32, []kernel.Entries{l, l}, 1, 0, 0) // the stand-in has no such kernel
	assert.GreaterOrEqual(t, rt.sparse.memory[status].bytes, 8*(2*math.MaxInt32/(tileElements/2)+1))
	require.NoError(t, rt.Deallocate(p))
	require.NoError(t, rt.Close())
}

// A selection that fails in its middle leaves the array that it has added a gradient to as
// it was, if it was to keep that, and the memory that kernels share as it was when new: the
// next selection would count on top of what the first launch has counted.
func TestStandInSelectionFails(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	const n, k = 1000, 10
	kernels, launch := rt.Kernels(), append([]byte("cuLaunchKernel"), 0)
	allocate := func(words int, value float64) uintptr {
		p, err := rt.Allocate(4 * words)
		require.NoError(t, err)
		require.NoError(t, rt.Fill(p, words, dtype.F32, value))
		return p
	}
	x, grad, list := allocate(n, 1), allocate(n, 2), allocate(2*n+1, 0)
	const kept = 3 // what the first of the launches would have written
	keep, state := allocate(n, kept), allocate(2, 0)
	src := kernel.Source{X: x, N: n, Grad: grad, DType: dtype.F32, Keep: keep, Take: true}
	dst := kernel.Entries{Idx: list, Val: list + 4*n, N: n, Len: list + 8*n}
	for name, call := range map[string]func() error{
		"top-k": func() error { return kernels.TopK(src, k, dst, state) },
		"near":  func() error { return kernels.SelectNear(src, k, state, kernel.Acceptance{}, dst, 0) },
		"list":  func() error { return kernels.Select(src, state, dst) },
	} {
		require.NoError(t, call(), name)
		for at, want := range map[int]float32{1: 1, 2: kept} {
			require.NoError(t, rt.Fill(x, n, dtype.F32, 1))
			counts := rt.sparse.memory[control].ptr
			require.NoError(t, rt.Fill(counts, controlBytes/4, dtype.F32, 1))
			f.Fail.Call(hostmem.Addr(launch), 701, uintptr(-at))
			require.ErrorContains(t, call(), "CUDA_ERROR", name)
			got := make([]float32, n)
			require.NoError(t, rt.CopyOut(hostmem.Bytes(got), x))
			assert.Equal(t, slices.Repeat([]float32{want}, n), got, "%s, launch %d", name, at)
			require.NoError(t, rt.CopyOut(hostmem.Bytes(got), counts))
			assert.Equal(t, slices.Repeat([]float32{float32(2 - at)}, n), got, "%s, launch %d", name, at)
		}
	}
	goruntime.KeepAlive(launch)
	for _, p := range []uintptr{x, grad, list, keep, state} {
		require.NoError(t, rt.Deallocate(p))
	}
	require.NoError(t, rt.Close())
	assert.Empty(t, f.alive())
}

func TestStandInOutOfMemory(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 1)
	const most = 1900 << 20 // of 2 GiB
	p, err := rt.Allocate(1200 << 20)
	require.NoError(t, err)
	require.NoError(t, rt.Deallocate(p))
	p, err = rt.Allocate(most)
	require.NoError(t, err, "the cache was flushed and the allocation tried again")

	for _, bytes := range []int{most, 512 << 20} {
		_, err = rt.Allocate(bytes)
		require.ErrorIs(t, err, runtime.ErrOutOfMemory)
		var e *Error
		require.ErrorAs(t, err, &e)
		assert.Equal(t, Error{Status: 2, Name: "CUDA_ERROR_OUT_OF_MEMORY", Text: "out of memory", Call: "cuMemCreate", Device: 1}, *e)
		assert.ErrorContains(t, err, "cuda:1: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory")
	}
	require.NoError(t, rt.Deallocate(p))
	require.NoError(t, rt.Close())
	assert.Empty(t, f.alive())
}

func TestStandInAStickyErrorBreaksTheRuntime(t *testing.T) {
	for _, c := range []struct {
		name      string
		freesFail uintptr
	}{{"memory can be freed", 0}, {"nothing can", 1}} {
		t.Run(c.name, func(t *testing.T) {
			f := openStandIn(t)
			before := f.alive()
			rt := openRuntime(t, 0)
			e := makeEverything(t, rt)
			require.NoError(t, rt.FreePinned(e.pinned))
			var kept []uintptr
			for _, bytes := range []int{100, 4 << 20} {
				p, err := rt.Allocate(bytes)
				require.NoError(t, err)
				kept = append(kept, p)
			}
			p := kept[0]
			f.Break.Call(700, c.freesFail)
			first := rt.Kernels().Store(p, dtype.F32, p, 10, 2, 0)
			var cause *Error
			require.ErrorAs(t, first, &cause)
			assert.True(t, cause.Sticky)
			assert.Equal(t, "store_f32", cause.Call)

			_, allocateErr := rt.Allocate(1 << 30)
			_, pinnedErr := rt.AllocatePinned(10)
			_, streamErr := rt.NewStream(0)
			_, eventErr := rt.NewEvent()
			_, _, infoErr := rt.MemoryInfo()
			_, doneErr := e.stream.Done()
			_, captureErr := rt.Stream().Capture(func() error { return nil })
			_, trimErr := rt.Trim()
			for name, err := range map[string]error{
				"first":         first,
				"allocate":      allocateErr,
				"pinned":        pinnedErr,
				"stream":        streamErr,
				"event":         eventErr,
				"memory info":   infoErr,
				"done":          doneErr,
				"capture":       captureErr,
				"trim":          trimErr,
				"deallocate":    rt.Deallocate(p),
				"copy in":       rt.CopyIn(p, []byte{1}),
				"copy":          rt.Copy(p, p+16, 4),
				"fill":          rt.Fill(p, 1, dtype.F32, 1),
				"launch":        e.graph.Launch(rt.Stream()),
				"synchronize":   rt.Synchronize(t.Context()),
				"record":        e.stream.Record(e.event),
				"current":       rt.Current(func() error { return errors.New("was called") }),
				"close a graph": e.graph.Close(),
			} {
				require.ErrorIs(t, err, runtime.ErrBroken, name)
				require.NotErrorIs(t, err, runtime.ErrOutOfMemory, name)
				require.ErrorAs(t, err, &cause, name)
				assert.Equal(t, "CUDA_ERROR_ILLEGAL_ADDRESS", cause.Name)
				assert.ErrorContains(t, err, "store_f32", name)
			}

			err := rt.Close()
			assert.ErrorIs(t, err, runtime.ErrBroken)
			assert.ErrorIs(t, err, runtime.ErrLeak)
			assert.Equal(t, 1, strings.Count(err.Error(), "ILLEGAL_ADDRESS"), "the cause once, not once per mapping: %v", err)
			if c.freesFail == 0 {
				assert.Equal(t, before, f.alive())
			}
			assert.NoError(t, rt.Close())
		})
	}
}

func TestStandInCloseWaitsForCalls(t *testing.T) {
	f := openStandIn(t)
	before := f.alive()["contexts"]
	rt := openRuntime(t, 0)
	f.Hold.Call(1)
	var wg sync.WaitGroup
	var waitErr, closeErr error
	wg.Go(func() { waitErr = rt.Current(func() error { return nil }) })
	wg.Wait()
	require.NoError(t, waitErr)
	inside := make(chan struct{})
	wg.Go(func() {
		waitErr = rt.Current(func() error {
			close(inside)
			rt.drv.sym.StreamSynchronize.Int(rt.ComputeStream())
			return nil
		})
	})
	<-inside
	wg.Go(func() { closeErr = rt.Close() })
	for !rt.gate.isShut() {
		goruntime.Gosched()
	}
	assert.Equal(t, before+1, f.alive()["contexts"], "the context stays while it is in use")
	assert.ErrorIs(t, rt.Synchronize(t.Context()), runtime.ErrClosed)
	f.Hold.Call(0)
	wg.Wait()
	assert.NoError(t, waitErr)
	assert.NoError(t, closeErr)
	assert.Equal(t, before, f.alive()["contexts"])
}

func TestStandInBackgroundIsAwaited(t *testing.T) {
	openStandIn(t)
	rt := openRuntime(t, 0)
	var err error
	rt.Background(func() { err = rt.Current(func() error { return nil }) })
	require.NoError(t, rt.Close())
	assert.NoError(t, err)
	late := make(chan error)
	rt.Background(func() { late <- rt.Current(func() error { return nil }) })
	assert.ErrorIs(t, <-late, runtime.ErrClosed)
}

func TestStandInManyThreads(t *testing.T) {
	openStandIn(t)
	runtimes := []*Runtime{openRuntime(t, 0), openRuntime(t, 1), openRuntime(t, 1)}
	const workers = 12
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			rt := runtimes[w%len(runtimes)]
			if w%2 == 0 { // a goroutine that changes threads, or one that does not
				goruntime.LockOSThread()
				defer goruntime.UnlockOSThread()
			}
			for range 200 {
				p, err := rt.Allocate(4096)
				errs[w] = errors.Join(errs[w], err, rt.Fill(p, 1024, dtype.F32, float64(w)), rt.Kernels().Store(p, dtype.F32, p, 1024, 2, 0))
				var got [4]byte
				errs[w] = errors.Join(errs[w], rt.CopyOut(got[:], p), rt.Deallocate(p))
				if v := hostmem.Slice[float32](hostmem.Addr(got[:]), 1)[0]; v != float32(2*w) {
					errs[w] = errors.Join(errs[w], errors.New("wrong data"))
				}
				goruntime.Gosched()
			}
		})
	}
	wg.Wait()
	assert.NoError(t, errors.Join(errs...))
	for _, rt := range runtimes {
		assert.NoError(t, rt.Close())
	}
}

// inContext runs f on a thread on which a context of somebody else is current,
// and sees that it still is afterwards.
func (f *standIn) inContext(t *testing.T, rt *Runtime, do func()) {
	t.Helper()
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	foreign := f.Context.Call(1)
	set := rt.drv.sym.CtxSetCurrent
	defer set.Int(0)
	set.Int(foreign)
	do()
	current, err := rt.drv.get(-1, rt.drv.sym.CtxGetCurrent)
	require.NoError(t, err)
	assert.EqualValues(t, foreign, current)
}

func TestStandInForeignContexts(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	own, err := rt.NewStream(0)
	require.NoError(t, err)
	var foreign uint64
	f.inContext(t, rt, func() {
		foreign, err = rt.drv.get(1, rt.drv.sym.StreamCreate, streamNonBlocking, 0)
		require.NoError(t, err)
	})
	f.inContext(t, rt, func() { makeEverything(t, rt) })
	f.inContext(t, rt, func() {
		assert.Panics(t, func() { _ = rt.Current(func() error { panic("inside") }) })
	})

	assert.ErrorIs(t, rt.CheckStream(uintptr(foreign)), runtime.ErrDevice)
	assert.ErrorIs(t, rt.CheckStream(streamPerThread), runtime.ErrArgument)
	assert.NoError(t, rt.CheckStream(own.Handle()))
	_, err = Open(0, WithComputeStream(uintptr(foreign)))
	require.ErrorIs(t, err, runtime.ErrDevice)
	assert.ErrorContains(t, err, "primary context")

	for _, handle := range []uintptr{0, own.Handle()} {
		adopting := openRuntime(t, 0, WithComputeStream(handle))
		assert.NotZero(t, adopting.ComputeStream(), "a CPU's runtime answers 0")
		p, err := adopting.Allocate(8)
		require.NoError(t, err)
		require.NoError(t, adopting.Fill(p, 1, dtype.F64, 1))
		require.NoError(t, adopting.Deallocate(p))
		require.NoError(t, adopting.Close())
	}
	require.NoError(t, rt.Stream().WaitFor(own), "closing the other runtime left the stream")
	assert.ErrorIs(t, rt.Close(), runtime.ErrLeak)
}

func TestStandInForeignPointers(t *testing.T) {
	openStandIn(t)
	rt, other := openRuntime(t, 0), openRuntime(t, 1)
	mine, err := rt.Allocate(4 << 20)
	require.NoError(t, err)
	theirs, err := other.Allocate(100)
	require.NoError(t, err)
	pinned, err := rt.AllocatePinned(100)
	require.NoError(t, err)
	host := make([]byte, 100)

	tensor, err := rt.WrapTensor(mine+4, dtype.F32, []int{5, 5}, nil, nil)
	require.NoError(t, err)
	require.NoError(t, tensor.Fill(1))
	_, err = rt.WrapTensor(0, dtype.F32, []int{0}, nil, nil)
	require.NoError(t, err, "nothing lies nowhere")
	for what, ptr := range map[string]uintptr{
		"memory of cuda:1":               theirs,
		"page-locked memory of the host": hostmem.Addr(pinned),
		"no memory that the driver":      hostmem.Addr(host),
	} {
		_, err := rt.WrapTensor(ptr, dtype.U8, []int{10}, nil, nil)
		require.ErrorIs(t, err, runtime.ErrDevice, what)
		assert.ErrorContains(t, err, what)
	}
	assert.ErrorIs(t, rt.CheckPointer(0), runtime.ErrArgument)
	s, err := other.CopyInStream()
	require.NoError(t, err)
	assert.ErrorIs(t, rt.CopyInAsync(s, mine, host), runtime.ErrDevice)

	require.NoError(t, rt.FreePinned(pinned))
	require.NoError(t, rt.Deallocate(mine))
	require.NoError(t, other.Deallocate(theirs))
	require.NoError(t, rt.Close())
	require.NoError(t, other.Close())
}

func TestStandInStreamsWaitForEachOther(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	p, err := rt.Allocate(64)
	require.NoError(t, err)
	in, err := rt.CopyInStream()
	require.NoError(t, err)
	out, err := rt.CopyOutStream()
	require.NoError(t, err)
	again, err := rt.CopyInStream()
	require.NoError(t, err)
	assert.Same(t, in, again)
	compute := rt.Stream()

	waited := func(s, other *Stream) uintptr { return f.Waited.Call(s.Handle(), other.Handle()) }
	for round := range uintptr(3) {
		require.NoError(t, rt.Fill(p, 64, dtype.U8, 1))
		require.NoError(t, in.WaitFor(compute))
		assert.Equal(t, f.Submitted.Call(compute.Handle()), waited(in, compute))
		require.NoError(t, rt.CopyInAsync(in, p, make([]byte, 8)))
		require.NoError(t, compute.WaitFor(in))
		assert.Equal(t, round+1, waited(compute, in))
		assert.Zero(t, waited(compute, out))
	}
	require.NoError(t, rt.Deallocate(p))
	require.NoError(t, rt.Close())
}

// ordered is work that a stream orders.
type ordered struct{ by *Stream }

func (o ordered) Stream() *Stream { return o.by }

// Graphs whose kernels share memory with others are ordered with these, whatever stream they
// are launched in. Others are not.
func TestStandInGraphsInOrder(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	p, err := rt.Allocate(64)
	require.NoError(t, err)
	kernels := rt.Kernels() // which allocates
	other, err := rt.NewStream(0)
	require.NoError(t, err)
	apart, err := rt.NewStream(0)
	require.NoError(t, err)
	compute := rt.Stream()
	require.NoError(t, rt.CopyInAsync(apart, p, make([]byte, 8)))
	waited := func(s, other *Stream) uintptr { return f.Waited.Call(s.Handle(), other.Handle()) }
	submitted := func(s *Stream) uintptr { return f.Submitted.Call(s.Handle()) }

	for _, c := range []struct {
		name   string
		submit func() error
		orders bool
	}{
		{"plain", func() error { return rt.Fill(p, 8, dtype.U64, 1) }, false},
		{"not captured", func() error { rt.Serialize(ordered{apart}); return nil }, false},
		{"kernels", func() error { return kernels.Store(p, dtype.F32, p, 16, 2, 0) }, true},
		{"others", func() error {
			rt.Serialize(ordered{compute})
			rt.Serialize(ordered{compute})
			return rt.Fill(p, 8, dtype.U64, 1)
		}, true},
	} {
		g, err := compute.Capture(c.submit)
		require.NoError(t, err, c.name)
		for range 2 {
			require.NoError(t, rt.Fill(p, 8, dtype.U64, 1))
			require.NoError(t, g.Launch(other))
			assert.Equal(t, c.orders, waited(other, compute) == submitted(compute), c.name)
			assert.Equal(t, c.orders, waited(compute, other) == submitted(other), c.name)
			assert.Zero(t, waited(other, apart))
		}
		before := waited(compute, other)
		require.NoError(t, g.Launch(compute))
		assert.Equal(t, before, waited(compute, other), "%s: the stream of the work orders it", c.name)
		require.NoError(t, g.Close())
	}
	events := f.alive()["events"]
	wrapped := rt.WrapStream(other.Handle())
	require.NoError(t, compute.WaitFor(wrapped))
	require.NoError(t, wrapped.Close())
	assert.Equal(t, events, f.alive()["events"], "what a wrapped stream is waited for by is gone with it")
	require.NoError(t, compute.WaitFor(other), "the stream is not")
	require.NoError(t, rt.Deallocate(p))
	require.NoError(t, rt.Close())
}

func TestStandInCaptureEnds(t *testing.T) {
	f := openStandIn(t)
	before := f.alive()
	rt := openRuntime(t, 0)
	p, err := rt.Allocate(64)
	require.NoError(t, err)
	s := rt.Stream()

	refused := errors.New("refused")
	_, err = s.Capture(func() error { return refused })
	assert.ErrorIs(t, err, refused)
	assert.Panics(t, func() { _, _ = s.Capture(func() error { panic("inside") }) })
	_, err = s.Capture(func() error { return rt.CopyIn(p, []byte{1}) })
	var e *Error
	require.ErrorAs(t, err, &e, "a capture cannot be waited for")
	assert.EqualValues(t, 900, e.Status)
	require.NoError(t, rt.Fill(p, 64, dtype.U8, 1), "the stream works again")
	require.NoError(t, rt.Deallocate(p))
	require.NoError(t, rt.Close())
	assert.Equal(t, before, f.alive())
}

func TestStandInCloseGivesUp(t *testing.T) {
	f := openStandIn(t)
	before := f.alive()
	rt := openRuntime(t, 0)
	rt.closeTime = time.Millisecond
	p, err := rt.Allocate(8)
	require.NoError(t, err)
	f.Hold.Call(1)
	src := make([]byte, 8)
	source := weak.Make(&src[0])
	require.NoError(t, rt.CopyInAsync(rt.Stream(), p, src))
	err = rt.Close()
	require.ErrorContains(t, err, "did not end within 1ms")
	assert.NotEqual(t, before, f.alive(), "what the work may use stays")
	assert.ErrorIs(t, rt.Synchronize(t.Context()), runtime.ErrClosed)
	collect(8) // the runtime is of no more use here
	assert.NotNil(t, source.Value(), "also in the Go heap")
}

// TestStandInLentContext: a runtime in a context that is not the primary one works
// there alone, and leaves the context behind.
func TestStandInLentContext(t *testing.T) {
	f := openStandIn(t)
	primary := openRuntime(t, 0)
	before := f.alive()
	foreign, other := f.Context.Call(0), f.Context.Call(1)
	_, err := Open(0, WithContext(other))
	require.ErrorIs(t, err, runtime.ErrDevice)
	assert.ErrorContains(t, err, "device 1")
	assert.Equal(t, before, f.alive())

	rt := openRuntime(t, 0, WithContext(foreign))
	assert.Equal(t, foreign, rt.Context())
	assert.NotEqual(t, primary.Context(), rt.Context())
	assert.ErrorIs(t, rt.CheckStream(primary.ComputeStream()), runtime.ErrDevice)
	assert.ErrorIs(t, primary.CheckStream(rt.ComputeStream()), runtime.ErrDevice)
	p, err := rt.Allocate(8)
	require.NoError(t, err)
	require.NoError(t, rt.Fill(p, 1, dtype.F64, 1))
	require.NoError(t, rt.Deallocate(p))
	require.NoError(t, rt.Close())
	assert.Equal(t, before, f.alive(), "the primary context was not released for it")

	again := openRuntime(t, 0, WithContext(foreign))
	require.NoError(t, again.Close(), "the context is still there")
	require.NoError(t, primary.Close())
}

// Ranks of one process release their mappings of the same memory at about the same time.
func TestStandInUnmapsOneByOne(t *testing.T) {
	f := openStandIn(t)
	var mappings []*SharedMemory
	for device := range 2 {
		rt, err := Open(device)
		require.NoError(t, err)
		defer func() { assert.NoError(t, rt.Close()) }()
		if device == 0 {
			own, err := rt.AllocateShared(1)
			require.NoError(t, err)
			mappings = append(mappings, own)
			continue
		}
		fd, err := mappings[0].Export()
		require.NoError(t, err)
		other, err := rt.ImportShared(fd, mappings[0].Bytes())
		require.NoError(t, err)
		require.NoError(t, os.NewFile(uintptr(fd), "memory").Close())
		mappings = append(mappings, other)
	}
	f.Meet.Call(1)
	defer f.Meet.Call(0)
	var both sync.WaitGroup
	for _, m := range mappings {
		both.Go(func() { assert.NoError(t, m.Close()) })
	}
	both.Wait()
}

// Streams write words, in the order of their work, until the runtime is closed.
func TestStandInWords(t *testing.T) {
	f := openStandIn(t)
	before := f.alive()
	rt := openRuntime(t, 0)
	s, err := rt.NewStream(0)
	require.NoError(t, err)
	words := make([]*Word, 3)
	for i := range words {
		words[i], err = rt.NewWord()
		require.NoError(t, err)
		require.Zero(t, words[i].Load())
		require.NoError(t, s.Write(words[i], uint64(i)<<40+7))
	}
	for i, w := range words {
		assert.EqualValues(t, uint64(i)<<40+7, w.Load())
	}
	words[1].Close()
	again, err := rt.NewWord()
	require.NoError(t, err)
	assert.Zero(t, again.Load(), "not what another one had")
	assert.EqualValues(t, 7, words[0].Load())
	for made := len(words); ; made++ {
		if _, err = rt.NewWord(); err != nil {
			require.ErrorIs(t, err, runtime.ErrUnsupported)
			require.Equal(t, wordsPage/8, made)
			break
		}
	}
	require.NoError(t, s.Close())
	require.Error(t, s.Write(words[0], 1), "a stream that was closed")
	_, err = s.Capturing()
	require.Error(t, err)
	require.NoError(t, rt.Close(), "words are no leak")
	assert.Zero(t, words[0].Load())
	_, err = rt.NewWord()
	assert.ErrorIs(t, err, runtime.ErrClosed)
	assert.Equal(t, before, f.alive())
}
