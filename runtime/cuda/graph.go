package cuda

import (
	"errors"
	"math"
	goruntime "runtime"
	"time"
)

// captureThreadLocal is CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: calls of other
// threads do not disturb a capture, so every rank of a process can capture at
// the same time.
const captureThreadLocal = 1

// Graph is captured work that can be launched again and again.
type Graph struct{ object }

// Capture records the work that submit puts into the stream (kernels, copies
// and collectives on streams that wait for it by events) instead of running
// it. The allocator is frozen meanwhile: the graph keeps the addresses it saw.
// Memory that a captured operation uses must stay allocated while the graph
// lives. submit makes all its calls on the goroutine that it is called on.
//
// A graph that holds collectives of a communicator is closed before that, whose
// own Close may otherwise wait for it: NCCL keeps what graphs refer to. After
// the communicator was closed, or broke, the graph must not be launched again.
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
	r.root().graphed.Store(true)
	captures := &r.root().captures
	captures.RLock()
	defer captures.RUnlock()
	if err := r.do(r.drv.sym.StreamBeginCapture, stream, captureThreadLocal); err != nil {
		return nil, err
	}
	var graph uintptr
	defer func() {
		if graph != 0 { // the executable graph is a copy
			_ = r.giveBack(r.drv.sym.GraphDestroy, graph)
		}
	}()
	if err := r.captured(stream, submit, &graph); err != nil {
		return nil, err
	}
	exec, err := r.create(r.drv.sym.GraphInstantiate, destructor{fn: r.drv.sym.GraphExecDestroy}, graph, 0)
	if err != nil {
		return nil, err
	}
	return &Graph{object{rt: r, handle: exec}}, nil
}

// HasCaptured reports whether there may be graphs, also of branches: work that was not
// submitted one by one.
func (r *Runtime) HasCaptured() bool { return r.root().graphed.Load() }

// captured runs submit, ends the capture and stores the graph, also if submit
// panics, the device broke, or Close did not wait any longer: a stream that goes on
// capturing is of no other use.
func (r *Runtime) captured(stream uintptr, submit func() error, graph *uintptr) (err error) {
	defer func() {
		out := r.drv.out()
		endErr := r.giveBack(r.drv.sym.StreamEndCapture, stream, out.addr(0))
		*graph, err = uintptr(out[0]), errors.Join(err, endErr)
		r.drv.release(out)
	}()
	return submit()
}

// Launch runs the graph in a stream.
func (g *Graph) Launch(s *Stream) error {
	exec, err := g.use("graph")
	if err != nil {
		return err
	}
	stream, err := g.rt.on(s)
	if err != nil {
		return err
	}
	if !g.rt.graphs.enter() { // Close destroys graphs first
		return g.rt.errClosed()
	}
	defer g.rt.graphs.leave()
	return g.rt.do(g.rt.drv.sym.GraphLaunch, exec, stream)
}

// Close destroys the graph. Closing twice, or after the runtime, which
// destroyed the graph then, is fine.
func (g *Graph) Close() error { return g.close() }

// milliseconds converts a float32 number of milliseconds, given by its bits.
func milliseconds(bits uint32) time.Duration {
	return time.Duration(float64(math.Float32frombits(bits)) * float64(time.Millisecond))
}
