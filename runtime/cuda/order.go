package cuda

import (
	"slices"
	"sync"
	"sync/atomic"
)

// order is the shared state of the runtimes of one CUDA context about graphs: a runtime may capture work on a stream
// of another.
type order struct {
	runtimes int // open runtimes; guarded by orders.mu

	capturers atomic.Int32 // open runtimes that have captured
	captures  sync.RWMutex // held for reading during a capture

	// launches is held for writing during the steps of [Graph.Launch], and for reading while work is submitted that
	// must not come between them.
	launches sync.RWMutex

	mu        sync.Mutex // acquired last of the three
	capturing []*Graph   // guarded by mu
}

// orders are the orders of a process, by context.
type orders struct {
	mu        sync.Mutex         // acquired alone
	byContext map[uintptr]*order // guarded by mu
}

// join returns the order of a context. Each join needs a leave.
func (o *orders) join(context uintptr) *order {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.byContext == nil {
		o.byContext = map[uintptr]*order{}
	}
	shared := o.byContext[context]
	if shared == nil {
		shared = &order{}
		o.byContext[context] = shared
	}
	shared.runtimes++
	return shared
}

// leave reverts join for a runtime that has no graphs left. The last runtime of a context removes its order, because
// the next context may have the same handle.
func (o *orders) leave(r *Runtime) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if r.hasGraphs.Load() {
		r.order.capturers.Add(-1)
	}
	r.order.runtimes--
	if r.order.runtimes == 0 {
		delete(o.byContext, r.ctx)
	}
}

// begin records that r captures g, until end.
func (o *order) begin(r *Runtime, g *Graph) {
	if !r.hasGraphs.Swap(true) {
		o.capturers.Add(1)
	}
	o.captures.RLock()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.capturing = append(o.capturing, g)
}

func (o *order) end(g *Graph) {
	o.mu.Lock()
	o.capturing = slices.DeleteFunc(o.capturing, func(x *Graph) bool { return x == g })
	o.mu.Unlock()
	o.captures.RUnlock()
}

// announce records work that is submitted next, if its stream is being captured.
func (o *order) announce(w Serial) {
	if o.capturers.Load() == 0 {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.capturing) == 0 {
		return
	}
	if capturing, err := w.Stream().Capturing(); err == nil && !capturing {
		return
	}
	for _, g := range o.capturing { // may include a concurrent capture, which is then ordered as well
		if !slices.Contains(g.serial, w) {
			g.serial = append(g.serial, w)
		}
	}
}
