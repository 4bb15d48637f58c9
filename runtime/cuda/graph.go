package cuda

import (
	"context"
	"errors"
	"fmt"
	"math"
	goruntime "runtime"
	"slices"
	"time"
)

// captureThreadLocal is CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: calls of other
// threads do not disturb a capture, so every rank of a process can capture at
// the same time.
const captureThreadLocal = 1

// Graph is captured work that can be launched repeatedly.
type Graph struct {
	object
	serial []Serial // work that each launch of the graph orders; never changed
}

// Serial is work that shares memory on the GPU and so must not overlap there.
type Serial interface {
	// Stream returns the stream that orders the work. The stream may change to one that has waited for it.
	Stream() *Stream
}

// Serialize announces work that the caller submits next, in [Runtime.BetweenLaunches]. If the work is captured, even
// by another runtime of the context, each launch of the graph is ordered with all other work of w; see [Graph.Launch].
func (r *Runtime) Serialize(w Serial) {
	r.order.announce(w)
}

// BetweenLaunches runs submit, which submits work of a [Serial], while no launch of a graph is in progress: launching
// a graph on another stream takes several driver calls.
func (r *Runtime) BetweenLaunches(submit func() error) error {
	r.order.launches.RLock()
	defer r.order.launches.RUnlock()
	return submit()
}

// Capture records the work that submit puts into the stream, instead of running it: kernels, copies, and collectives
// on streams that wait for it by events. The allocator is frozen in the meantime, because the graph keeps the
// addresses of its memory. Memory that a captured operation uses must stay allocated while the graph exists. submit
// must make all its calls on its own goroutine.
//
// Close a graph that has collectives before their communicator, whose Close may otherwise wait for it: NCCL keeps
// everything that graphs refer to. Do not launch the graph after the communicator was closed or aborted.
func (s *Stream) Capture(submit func() error) (*Graph, error) {
	r := s.rt
	stream, err := s.use("stream")
	if err != nil {
		return nil, err
	}
	if !r.graphs.enter() {
		return nil, r.errClosed()
	}
	defer r.graphs.leave() // Close waits for the capture to end
	// A thread-local capture belongs to the thread that began it.
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	r.Freeze()
	defer r.Unfreeze()
	g := &Graph{}
	r.order.begin(r, g)
	defer r.order.end(g)
	// A launch in progress has already asked whether the stream captures.
	if err := r.BetweenLaunches(func() error {
		return r.do(r.drv.sym.StreamBeginCapture, stream, captureThreadLocal)
	}); err != nil {
		return nil, err
	}
	var graph uintptr
	defer func() {
		if graph != 0 { // the executable graph is a copy
			_ = r.free(r.drv.sym.GraphDestroy, graph)
		}
	}()
	if err := r.captured(stream, submit, &graph); err != nil {
		return nil, err
	}
	exec, err := r.create(r.drv.sym.GraphInstantiate, destructor{fn: r.drv.sym.GraphExecDestroy}, graph, 0)
	if err != nil {
		return nil, err
	}
	g.rt = r
	g.handle = exec
	return g, nil
}

// HasCaptured reports whether any open runtime of the context may have graphs, whose work is not submitted call by
// call.
func (r *Runtime) HasCaptured() bool {
	return r.order.capturers.Load() > 0
}

// captured runs submit, ends the capture and stores the graph. It ends the capture even if submit panics, the device
// broke, or Close timed out, because a stream in a capture is useless otherwise.
func (r *Runtime) captured(stream uintptr, submit func() error, graph *uintptr) (err error) {
	defer func() {
		out := r.drv.out()
		endErr := r.free(r.drv.sym.StreamEndCapture, stream, out.addr(0))
		*graph, err = uintptr(out[0]), errors.Join(err, endErr)
		r.drv.release(out)
	}()
	return submit()
}

// Launch runs the graph in a stream. Operations of a communicator of comm/p2p must not overlap each other, nor must
// calls of a runtime's [Runtime.Kernels]. A graph with such work waits for earlier submissions of it, and later
// submissions wait for the graph, whatever its stream, its goroutine, and the runtime that captured it. NCCL does the
// same for its communicators. A program that captures by other means than [Stream.Capture] launches on the stream of
// that work, or orders the two.
//
// A graph with such work cannot be launched on another stream while the work's own stream is being captured:
// [runtime.ErrArgument].
func (g *Graph) Launch(s *Stream) error {
	exec, err := g.use("graph")
	if err != nil {
		return err
	}
	stream, err := g.rt.on(s)
	if err != nil {
		return err
	}
	if !g.rt.graphs.enter() { // Close destroys graphs before it waits for calls
		return g.rt.errClosed()
	}
	defer g.rt.graphs.leave()
	launch := func() error {
		return g.rt.do(g.rt.drv.sym.GraphLaunch, exec, stream)
	}
	if len(g.serial) == 0 {
		return launch()
	}
	for _, w := range g.serial { // a capture of this stream gets the work of the graph too
		g.rt.Serialize(w)
	}
	var few [4]*Stream
	homes := few[:0]
	for _, w := range g.serial {
		home := w.Stream()
		known := slices.ContainsFunc(homes, func(o *Stream) bool {
			return o.handle == home.handle
		})
		if home.handle != stream && !known {
			homes = append(homes, home)
		}
	}
	if len(homes) == 0 {
		return g.rt.BetweenLaunches(launch)
	}
	g.rt.order.launches.Lock()
	defer g.rt.order.launches.Unlock()
	return g.launchBeside(s, homes, launch)
}

// launchBeside launches a graph in a stream other than those that order its work. Nothing else is submitted to these
// in the meantime.
func (g *Graph) launchBeside(s *Stream, homes []*Stream, launch func() error) error {
	capturing, err := s.Capturing()
	if err != nil {
		return err
	}
	for _, home := range homes {
		captured, err := home.Capturing()
		if err != nil {
			return err
		}
		// Waiting for an event of a capture would add the waiting stream to it.
		if captured != capturing {
			return g.rt.argument("a graph is launched on a stream other than its work's, and one of them is being captured")
		}
	}
	for _, home := range homes {
		if err := s.WaitFor(home); err != nil {
			return err
		}
	}
	if err := launch(); err != nil {
		return err
	}
	err = nil
	for _, home := range homes {
		err = errors.Join(err, home.WaitFor(s))
	}
	if err == nil {
		return nil
	}
	// The graph runs, but later work could not be made to wait for it, so this call waits.
	ctx, cancel := context.WithTimeoutCause(context.Background(), g.rt.flushTime,
		fmt.Errorf("cuda:%d: a graph runs that later work does not wait for: %w", g.rt.index, err))
	defer cancel()
	return s.Synchronize(ctx)
}

// Close destroys the graph. Closing twice, or after the runtime, which destroys its graphs, does nothing.
func (g *Graph) Close() error {
	return g.close()
}

// milliseconds converts a number of milliseconds, given as the bits of a float32.
func milliseconds(bits uint32) time.Duration {
	return time.Duration(float64(math.Float32frombits(bits)) * float64(time.Millisecond))
}
