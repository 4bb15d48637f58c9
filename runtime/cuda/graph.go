package cuda

import (
	"errors"
	"math"
	goruntime "runtime"
	"slices"
	"sync"
	"time"
)

// captureThreadLocal is CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: calls of other
// threads do not disturb a capture, so every rank of a process can capture at
// the same time.
const captureThreadLocal = 1

// Graph is captured work that can be launched again and again.
type Graph struct {
	object
	serial []Serial
}

// Serial is work that must not overlap on the GPU, because it shares memory there.
type Serial interface {
	// Stream returns the stream that orders the work. Another may take its place that has waited for it.
	Stream() *Stream
}

// Serialize announces work that the caller submits next. If the work is captured, each launch
// of the graph is ordered with all other work of w; see [Graph.Launch].
func (r *Runtime) Serialize(w Serial) {
	root := r.root()
	if !root.graphed.Load() {
		return
	}
	root.capturing.Lock()
	defer root.capturing.Unlock()
	if len(root.capturing.graphs) == 0 {
		return
	}
	if capturing, err := w.Stream().Capturing(); err == nil && !capturing {
		return
	}
	for _, g := range root.capturing.graphs { // at worst one that is captured beside it is ordered as well
		if !slices.Contains(g.serial, w) {
			g.serial = append(g.serial, w)
		}
	}
}

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
	root, g := r.root(), &Graph{}
	root.graphed.Store(true)
	root.captures.RLock()
	defer root.captures.RUnlock()
	root.capturing.add(g)
	defer root.capturing.remove(g)
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
	g.rt, g.handle = r, exec
	return g, nil
}

// capturing are the graphs that are being captured.
type capturing struct {
	sync.Mutex
	graphs []*Graph
}

func (c *capturing) add(g *Graph) {
	c.Lock()
	defer c.Unlock()
	c.graphs = append(c.graphs, g)
}

func (c *capturing) remove(g *Graph) {
	c.Lock()
	defer c.Unlock()
	c.graphs = slices.DeleteFunc(c.graphs, func(o *Graph) bool { return o == g })
}

// HasCaptured reports whether there may be graphs, also of forks: work that was not
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

// Launch runs the graph in a stream. Operations of a communicator of comm/p2p, and calls of
// [Runtime.Kernels], must not overlap with others of the same communicator or runtime. A graph
// that has some waits for those submitted before, and those submitted later wait for the graph,
// whatever its stream. NCCL does the same for its communicators. A program that captures by
// other means than [Stream.Capture] launches on the stream of that work, or orders the two.
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
	for _, w := range g.serial {
		if home := w.Stream(); home.handle != stream {
			if err := s.WaitFor(home); err != nil {
				return err
			}
		}
	}
	if err := g.rt.do(g.rt.drv.sym.GraphLaunch, exec, stream); err != nil {
		return err
	}
	for _, w := range g.serial {
		if home := w.Stream(); home.handle != stream {
			if err := home.WaitFor(s); err != nil {
				return err
			}
		}
	}
	return nil
}

// Close destroys the graph. Closing twice, or after the runtime, which
// destroyed the graph then, is fine.
func (g *Graph) Close() error { return g.close() }

// milliseconds converts a float32 number of milliseconds, given by its bits.
func milliseconds(bits uint32) time.Duration {
	return time.Duration(float64(math.Float32frombits(bits)) * float64(time.Millisecond))
}
