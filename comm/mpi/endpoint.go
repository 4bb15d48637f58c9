package mpi

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
)

// endpoint is one rank of a communicator: what it submitted, and what has become
// of that. Operations start in the order in which they were submitted, each as
// soon as those before it have started and none of these uses memory that it
// needs (op.conflicts); from then on they run side by side. All messages are non-blocking: submitting
// starts what can start, and whoever waits (or the progress goroutine) asks
// MPI what has finished and lets operations go on.
//
// Fields below mu belong to who holds it; the methods say so.
type endpoint struct {
	state    *state
	lib      *library
	native   bool // collectives are the library's own, and there is no inner
	world    bool
	parent   *endpoint // that it was split from
	check    comm.Check
	rank     int
	size     int
	pub      uintptr      // the communicator that users and other programs see
	inner    uintptr      // its duplicate for the messages of collectives
	inFlight atomic.Int32 // operations submitted and not done
	waiters  atomic.Int32 // goroutines inside wait
	leaving  atomic.Bool  // has said farewell, and waits for that of the others

	mu      sync.Mutex
	closed  bool
	broken  error
	waiting []*op // submitted, in order
	active  []*op // started, in order
	free    []*op
	seq     uint64 // operations of collectives submitted so far
	groups  uint64
	table   requests
	scratch scratchPool // working memory of collectives,
	heads   scratchPool // and of messages

	history history
	peers   []peer
	notes   notebook
}

// maxActive bounds the collectives that run at a time, and with them their
// working memory.
const maxActive = 4

// newOp returns an operation to fill in and submit. The caller holds mu.
func (e *endpoint) newOp() *op {
	if n := len(e.free); n > 0 {
		o := e.free[n-1]
		e.free = e.free[:n-1]
		return o
	}
	return newOp(e.size)
}

// enqueue puts an operation behind those submitted before. The caller holds mu
// and calls start afterwards.
func (e *endpoint) enqueue(o *op) {
	if o.collective() {
		o.number, o.seq, o.msgTag = e.history.calls-1, e.seq, e.tag(e.seq)
		e.seq++
	}
	e.waiting = append(e.waiting, o)
	e.inFlight.Add(1)
}

// start starts every operation that has not to wait. The caller holds mu.
func (e *endpoint) start() error {
	started := 0
	for _, o := range e.waiting {
		if !e.ready(o) {
			break
		}
		started++
		if err := e.begin(o); err != nil {
			return e.fail(o.op.String(), err)
		}
	}
	if started > 0 {
		rest := copy(e.waiting, e.waiting[started:])
		clear(e.waiting[rest:])
		e.waiting = e.waiting[:rest]
	}
	return nil
}

// ready reports whether o may start.
func (e *endpoint) ready(o *op) bool {
	collectives := 0
	for _, a := range e.active {
		if o.conflicts(a) {
			return false
		}
		if a.collective() && a.work > 0 {
			collectives++
		}
		if a.collective() && o.collective() && o.seq-a.seq >= tagWindow {
			return false
		}
	}
	return !o.collective() || o.work == 0 || collectives < maxActive
}

// begin starts o. The caller holds mu.
func (e *endpoint) begin(o *op) error {
	if o.work > 0 {
		var err error
		if o.memory, err = e.scratch.take(o.work); err != nil {
			return err
		}
	}
	done, err := e.advance(o)
	if err != nil {
		return err
	}
	if done {
		e.retire(o)
	} else {
		e.active = append(e.active, o)
	}
	return nil
}

// advance lets an operation without pending messages go on, as far as it can.
func (e *endpoint) advance(o *op) (done bool, err error) {
	for o.pending == 0 && !done && err == nil {
		done, err = o.step(e, o)
		o.phase++
	}
	if err == nil {
		err = e.table.flush(e.lib)
	}
	return done, err
}

// retire gives up an operation that is done.
func (e *endpoint) retire(o *op) {
	e.scratch.give(o.memory)
	o.plan = plan{}
	e.free = append(e.free, o)
	e.inFlight.Add(-1)
}

// poll asks MPI, at most so often, which messages are done and lets operations go
// on. It reports whether anything was. Messages of a stalled operation count one by one:
// the first may show why the others do not come. The caller holds mu.
func (e *endpoint) poll(stalled bool, tries int) (moved bool, err error) {
	if e.broken != nil {
		return false, comm.Unusable(false, e.broken)
	}
	if len(e.active) == 0 {
		return false, nil
	}
	n, err := e.table.test(e.lib, !stalled && len(e.active) == 1, tries)
	if err != nil {
		return false, e.fail(e.table.failed.String(), err)
	}
	if n == 0 {
		return false, nil
	}
	if err := e.advanceAll(); err != nil {
		return true, err
	}
	return true, e.start()
}

// advanceAll lets every active operation go on.
func (e *endpoint) advanceAll() error {
	kept := e.active[:0]
	for i, o := range e.active {
		done, err := e.advance(o)
		if err != nil {
			e.active = append(kept, e.active[i:]...)
			return e.fail(o.op.String(), err)
		}
		if done {
			e.retire(o)
		} else {
			kept = append(kept, o)
		}
	}
	clear(e.active[len(kept):])
	e.active = kept
	return nil
}

// fail marks the communicator broken, tells the other ranks unless one of them
// has told this one, and returns err as an OpError. What is pending stays with MPI
// and is never waited for again. The caller holds mu.
func (e *endpoint) fail(name string, err error) error {
	err = e.check.Fail(name, err)
	if e.broken == nil {
		e.broken = err
		if by := (*told)(nil); !errors.As(err, &by) {
			e.tellFailure(err)
		}
	}
	return err
}

// sync waits until everything that was submitted is done or ctx is, under the
// name of the call that waits.
func (e *endpoint) sync(ctx context.Context, name string) error {
	return e.wait(ctx, name, false)
}

// wait is sync; closing says that it is close that waits.
func (e *endpoint) wait(ctx context.Context, name string, closing bool) error {
	e.waiters.Add(1)
	defer e.waiters.Add(-1)
	var p pause
	for {
		if idle, err := e.drain(&p, name, closing); err != nil || idle {
			return err
		}
		// The context is looked at after the first tries, so that a
		// collective whose peers are there costs nothing extra.
		if ctx.Err() != nil {
			return e.giveUp(ctx, name)
		}
		p.next()
	}
}

// drain polls a few times and reports whether nothing is left to do.
func (e *endpoint) drain(p *pause, name string, closing bool) (idle bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p.first() && !closing {
		if err := e.usable(); err != nil {
			return false, err
		}
	}
	for tries := p.polls(); tries > 0; tries-- {
		if len(e.active) == 0 && len(e.waiting) == 0 {
			return true, nil
		}
		moved, err := e.poll(p.stalled(), tries)
		if err != nil {
			return false, err
		}
		if !moved {
			break
		}
	}
	if len(e.active) == 0 && len(e.waiting) == 0 {
		return true, nil
	}
	if !p.stalled() {
		return false, nil
	}
	if p.long() {
		e.reportStall()
	}
	if err := e.attend(); err != nil {
		return false, e.fail(name, err)
	}
	return false, nil
}

// giveUp ends a wait whose context is done.
func (e *endpoint) giveUp(ctx context.Context, name string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.attend()
	if err == nil {
		err = fmt.Errorf("%w, waiting for %s", comm.ContextError(ctx), e.waitsFor())
	}
	return e.fail(name, err)
}
