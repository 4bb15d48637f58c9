package local

import (
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
)

// endpoint is one rank of a world: what it submitted and in which order that
// may start.
//
// Collectives usually go straight into the ring. Messages, groups, and
// collectives that have to wait for messages or for a free slot pass through
// the backlog, which starts its operations first in, first out, as soon as
// what came before allows.
type endpoint struct {
	_     cacheLine
	world *world
	rank  int
	check comm.Check

	mu sync.Mutex // guards what has no lock or atomic type of its own

	arrivals  atomic.Uint64 // collectives put into the ring
	pending   atomic.Int32  // operations in the backlog or open
	submitted atomic.Uint64 // all operations
	settled   atomic.Uint64 // of these, known to the rank as done
	spin      atomic.Int32  // how long waits spin, in looks; 0: not at all
	told      atomic.Bool   // the rank knows why the world broke
	closed    atomic.Bool   // by this rank
	gone      atomic.Bool   // closed, and nothing pending
	leakAlarm runtime.Cleanup

	backlog  queue
	open     []*op // messages that were posted and are not done
	idle     []*op // for reuse
	released uint64
	batches  uint64
	stalled  atomic.Bool // counted in world.stalled

	next   *endpoint // see driver.kicked
	linked atomic.Bool

	batch   []*op // the group being submitted
	scratch atomic.Pointer[scratch]

	root     *endpoint   // where the Splits that led here began; itself for what New made
	children []*endpoint // of a root: all that was split off below it and has not departed
}

func newEndpoint(w *world, rank int) *endpoint {
	e := &endpoint{world: w, rank: rank}
	e.root = e
	e.check = comm.Check{Backend: backend, Rank: rank, WorldSize: w.size}
	if w.spins {
		e.spin.Store(minSpin)
	}
	return e
}

// op is an operation that does not go straight into the ring.
type op struct {
	entry
	extra
	owner *endpoint
	tag   uint32
	batch uint64
	// What the batch has: all operations of a batch start together.
	collectives, messages bool
	// Of a receive that is being copied in chunks.
	match  *op
	next   int
	chunks int
	left   atomic.Int32
}

// call returns what the operation was made of, but for its lists.
func (o *op) call() comm.Call {
	c := o.entry.call()
	c.Tag = o.tag
	return c
}

// Submit implements [comm.Backend].
func (e *endpoint) Submit(c comm.Call) error { return e.submit(&c, nil) }

// submit takes one operation. split is its part of a Split.
func (e *endpoint) submit(c *comm.Call, split *splitCall) error {
	e.mu.Lock()
	if err := e.Usable(); err != nil {
		e.mu.Unlock()
		return e.turnDown(err)
	}
	e.submitted.Store(e.submitted.Load() + 1)
	run := driver{endpoint: e}
	if !c.Op.Message() && e.pending.Load() == 0 && e.hasSlot() {
		seq := e.arrivals.Load()
		s := e.world.slot(seq)
		s.calls[e.rank] = newEntry(c)
		if c.RecvCounts != nil || split != nil {
			s.extras[e.rank].set(c, split)
		}
		e.arrivals.Store(seq + 1)
		e.mu.Unlock()
		run.arrive(seq)
	} else {
		e.enqueue([]*op{e.newOp(c, split)})
		e.mu.Unlock()
		run.kick(e)
	}
	run.run()
	return nil
}

// SubmitTogether implements [comm.Backend].
func (e *endpoint) SubmitTogether(calls []comm.Call) error {
	e.mu.Lock()
	if err := e.Usable(); err != nil {
		e.mu.Unlock()
		return e.turnDown(err)
	}
	e.submitted.Store(e.submitted.Load() + uint64(len(calls)))
	for i := range calls {
		e.batch = append(e.batch, e.newOp(&calls[i], nil))
	}
	e.enqueue(e.batch)
	clear(e.batch)
	e.batch = e.batch[:0]
	e.mu.Unlock()
	run := driver{endpoint: e}
	run.kick(e)
	run.run()
	return nil
}

// hasSlot reports whether the ring has a slot for the rank's next collective.
func (e *endpoint) hasSlot() bool {
	return e.arrivals.Load()-e.world.front.completed.Load() < ringSize
}

// Usable implements [comm.Backend].
func (e *endpoint) Usable() error {
	if e.closed.Load() {
		return comm.ErrClosed
	}
	if f := e.world.failure.Load(); f != nil {
		return e.broken(f)
	}
	return nil
}

// turnDown returns the error of a call that submits nothing. If that is because
// the communicator broke, nobody touches the rank's buffers any more.
func (e *endpoint) turnDown(err error) error {
	if e.world.failure.Load() != nil {
		e.quiesce()
	}
	return err
}

// newOp takes an operation from those that are idle. The caller holds e.mu.
func (e *endpoint) newOp(c *comm.Call, split *splitCall) *op {
	var o *op
	if last := len(e.idle) - 1; last >= 0 {
		o, e.idle = e.idle[last], e.idle[:last]
	} else {
		o = &op{owner: e}
	}
	o.entry, o.tag = newEntry(c), c.Tag
	o.extra.set(c, split)
	return o
}

// recycle keeps an operation that is done for reuse. The caller holds e.mu.
func (e *endpoint) recycle(o *op) {
	o.split, o.match = nil, nil
	e.idle = append(e.idle, o)
}

// enqueue appends a batch, operations that start together, to the backlog.
// Messages go first: they are not ordered among the collectives of a batch,
// and must not wait for a free slot. The caller holds e.mu.
func (e *endpoint) enqueue(batch []*op) {
	e.batches++
	messages := 0
	for _, o := range batch {
		if o.op.Message() {
			messages++
		}
	}
	for _, pass := range [...]bool{true, false} {
		for _, o := range batch {
			if o.op.Message() == pass {
				o.batch, o.messages, o.collectives = e.batches, messages > 0, messages < len(batch)
				e.backlog.push(o)
			}
		}
	}
	e.pending.Add(int32(len(batch)))
}

// startable reports whether the first operation of the backlog may start.
// Messages of a batch start after earlier collectives are done, and after
// earlier messages that touch the same memory; collectives after earlier
// messages are done. The caller holds e.mu.
func (e *endpoint) startable() bool {
	o := e.backlog.first()
	if o.batch != e.released {
		if o.collectives && len(e.open) > 0 {
			return false
		}
		if o.messages && e.world.front.completed.Load() < e.arrivals.Load() {
			return false
		}
		if len(e.open) > 0 && e.batchConflicts(o.batch) {
			return false
		}
		e.released = o.batch
	}
	return o.op.Message() || e.hasSlot()
}

// batchConflicts reports whether a message of the batch at the front of the
// backlog conflicts with an open one.
func (e *endpoint) batchConflicts(batch uint64) bool {
	for _, o := range e.backlog.all() {
		if o.batch != batch || !o.op.Message() {
			return false
		}
		for _, other := range e.open {
			if o.conflicts(other) {
				return true
			}
		}
	}
	return false
}

// advanceable reports whether the backlog has an operation that may start. If
// it has only others, the endpoint counts as stalled, which makes the next
// collective that ends look again. The caller holds e.mu.
func (e *endpoint) advanceable() bool {
	if e.backlog.empty() {
		e.setStalled(false)
		return false
	}
	if e.startable() {
		return true
	}
	if e.stalled.Load() {
		return false
	}
	e.setStalled(true)
	// A collective may have ended before it could see the mark.
	return e.startable()
}

func (e *endpoint) setStalled(stalled bool) {
	if e.stalled.Load() == stalled {
		return
	}
	e.stalled.Store(stalled)
	if stalled {
		e.world.stalled.Add(1)
	} else {
		e.world.stalled.Add(-1)
	}
}

// done reports whether everything that was submitted is done.
func (e *endpoint) done() bool {
	return e.pending.Load() == 0 && e.world.front.completed.Load() >= e.arrivals.Load()
}

// takeScratch returns working memory that nobody else uses. It is kept for
// the next time, so that a rank whose goroutines wait one at a time allocates
// it once.
func (e *endpoint) takeScratch() *scratch {
	if s := e.scratch.Swap(nil); s != nil {
		return s
	}
	n := e.world.size
	return &scratch{src: make([]uintptr, 0, n), dst: make([]uintptr, 0, n)}
}

func (e *endpoint) returnScratch(s *scratch) { e.scratch.Store(s) }
