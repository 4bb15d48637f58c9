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
type Graph struct {
	rt   *Runtime
	exec uintptr
}

// Capture records the work that submit puts into the stream (kernels, copies
// and collectives on streams that wait for it by events) instead of running
// it. The allocator is frozen meanwhile: the graph keeps the addresses it saw.
// Memory that a captured operation uses must stay allocated while the graph
// lives.
func (s *Stream) Capture(submit func() error) (*Graph, error) {
	r := s.rt
	// A thread-local capture belongs to the thread that began it.
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	r.Freeze()
	defer r.Unfreeze()
	if err := r.do("cuStreamBeginCapture", r.drv.sym.StreamBeginCapture, s.handle, captureThreadLocal); err != nil {
		return nil, err
	}
	submitErr := submit()
	out := r.drv.out()
	defer r.drv.release(out)
	endErr := r.do("cuStreamEndCapture", r.drv.sym.StreamEndCapture, s.handle, out.addr(0))
	graph := uintptr(out[0])
	if graph != 0 {
		// The executable graph is a copy.
		defer r.do("cuGraphDestroy", r.drv.sym.GraphDestroy, graph) //nolint:errcheck // nothing to do about it
	}
	if err := errors.Join(submitErr, endErr); err != nil {
		return nil, err
	}
	exec, err := r.get("cuGraphInstantiate", r.drv.sym.GraphInstantiate, graph, 0)
	if err != nil {
		return nil, err
	}
	return &Graph{rt: r, exec: exec}, nil
}

// Launch runs the graph in a stream.
func (g *Graph) Launch(s *Stream) error {
	return g.rt.do("cuGraphLaunch", g.rt.drv.sym.GraphLaunch, g.exec, s.handle)
}

// Close destroys the graph.
func (g *Graph) Close() error {
	if g.exec == 0 {
		return nil
	}
	err := g.rt.do("cuGraphExecDestroy", g.rt.drv.sym.GraphExecDestroy, g.exec)
	g.exec = 0
	return err
}

// milliseconds converts a float32 number of milliseconds, given by its bits.
func milliseconds(bits uint32) time.Duration {
	return time.Duration(float64(math.Float32frombits(bits)) * float64(time.Millisecond))
}
