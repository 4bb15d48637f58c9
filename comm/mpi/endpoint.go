package mpi

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/tally"
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
	world    bool
	parent   *endpoint // that it was split from
	check    backend.Check
	rank     int
	size     int
	pub      uintptr       // the communicator that users and other programs see
	inner    uintptr       // its duplicate for this package's own messages; pub with interop
	inFlight atomic.Int32  // operations submitted and not done
	called   atomic.Uint64 // collectives submitted,
	done     atomic.Uint64 // and of these, the first ones, done
	waiters  atomic.Int32  // goroutines inside wait
	leaving  atomic.Bool   // has said farewell, and waits for that of the others

	mu       sync.Mutex
	closed   bool
	broken   error
	waiting  []*op // submitted, in order
	running  []*op // collectives that have started, in order,
	open     []*op // and messages, in no order
	reads    spans // what these read,
	writes   spans // and what they write
	free     []*op
	seq      uint64      // operations of collectives submitted so far,
	begun    uint64      // and started, the last of which belongs to the collective
	latest   uint64      // with this number
	messages tally.Tally // of users
	groups   uint64
	table    requests
	board    board
	unshared error       // why there is none
	scratch  scratchPool // working memory of collectives,
	heads    scratchPool // and of messages

	history history
	passed  uint64 // calls up to the last barrier or Split that is done
	peers   []peer
	notes   notebook
}

// native reports whether collectives are the library's own.
func (e *endpoint) native() bool { return e.state.collectives != scheduled }

// interop reports whether ranks may be other programs, which read no messages of this
// package.
func (e *endpoint) interop() bool { return e.state.collectives == interop }

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
		o.number, o.seq, o.msgTag, o.chain = e.history.calls-1, e.seq, e.tag(e.seq), e.history.chain
		o.named = e.history.named
		e.seq++
	} else {
		o.number = e.messages.Begin()
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
	e.publish()
	return nil
}

// publish tells anyone who asks how far collectives have come.
func (e *endpoint) publish() {
	done, called := e.history.named, e.history.named
	if o := e.oldest(); o != nil {
		done = o.named - min(o.named, 1) // setUp's have none
	} else if e.begun < e.seq {
		done = e.latest - min(e.latest, 1)
	}
	if e.called.Load() != called {
		e.called.Store(called)
	}
	if e.done.Load() < done { // of a collective that waits it is not known how many parts have begun
		e.done.Store(done)
	}
}

// Progress implements [comm.Progresser] for the communicator.
func (e *endpoint) Progress() comm.Progress {
	done, ended := e.done.Load(), e.messages.Ended()
	return comm.Progress{
		Collectives: comm.Count{Submitted: e.called.Load(), Done: done},
		Messages:    comm.Count{Submitted: e.messages.Begun(), Done: ended},
	}
}

// started returns how many operations have started and are not done.
func (e *endpoint) started() int { return len(e.running) + len(e.open) }

// idle reports whether nothing is left to do.
func (e *endpoint) idle() bool { return e.started() == 0 && len(e.waiting) == 0 }

// ready reports whether o may start.
func (e *endpoint) ready(o *op) bool {
	if o.shared && e.board.owner != nil {
		return false
	}
	if o.collective() && len(e.running) > 0 {
		working := 0
		for _, a := range e.running {
			if a.work > 0 {
				working++
			}
		}
		if o.seq-e.running[0].seq >= tagWindow || o.work > 0 && working >= maxActive {
			return false
		}
	}
	if !e.writes.overlap(o.writes) && !e.reads.overlap(o.writes) && !e.writes.overlap(o.reads) {
		return true
	}
	if o.group == 0 || o.chained {
		return false
	}
	for _, started := range [][]*op{e.running, e.open} {
		if slices.ContainsFunc(started, o.conflicts) {
			return false
		}
	}
	return true
}

// begin starts o. The caller holds mu.
func (e *endpoint) begin(o *op) error {
	if o.work > 0 {
		var err error
		if o.memory, err = e.scratch.take(o.work); err != nil {
			return err
		}
	}
	if o.collective() {
		e.begun, e.latest = o.seq+1, o.named
	}
	done, err := e.advance(o)
	if err != nil {
		return err
	}
	if done {
		e.retire(o)
		return nil
	}
	e.reads.add(&o.readNode, o.reads)
	e.writes.add(&o.writeNode, o.writes)
	list := &e.open
	if o.collective() {
		list = &e.running
	}
	o.at = len(*list)
	*list = append(*list, o)
	return nil
}

// finish takes an operation that has started and is done off the lists.
func (e *endpoint) finish(o *op) {
	e.reads.remove(&o.readNode)
	e.writes.remove(&o.writeNode)
	if o.collective() {
		e.running = slices.Delete(e.running, o.at, o.at+1)
		for i, later := range e.running[o.at:] {
			later.at = o.at + i
		}
	} else {
		last := len(e.open) - 1
		e.open[o.at], e.open[last].at = e.open[last], o.at
		e.open[last] = nil
		e.open = e.open[:last]
	}
	e.retire(o)
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
	if !o.collective() {
		e.messages.End(o.number)
	}
	e.scratch.give(o.memory)
	if !o.op.MovesData() {
		e.passed = o.number + 1
	}
	o.plan = plan{}
	e.free = append(e.free, o)
	e.inFlight.Add(-1)
}

// poll asks MPI, at most so often, which messages are done and lets operations go
// on. It reports whether anything was. Messages of a stalled operation count one by one:
// the first may show why the others do not come. The caller holds mu.
func (e *endpoint) poll(stalled bool, tries int) (moved bool, err error) {
	if e.broken != nil {
		return false, backend.Unusable(false, e.broken)
	}
	if e.started() == 0 {
		return false, nil
	}
	asks := tries
	if e.board.owner != nil {
		asks = 1
	}
	n, err := e.table.test(e.lib, !stalled && e.started() == 1, asks)
	if err != nil {
		return false, e.fail(e.table.failed.String(), err)
	}
	if o := e.board.await(tries); o != nil {
		e.table.idle = append(e.table.idle, o)
	} else if n == 0 {
		return false, nil
	}
	for _, o := range e.table.idle {
		done, err := e.advance(o)
		if err != nil {
			return true, e.fail(o.op.String(), err)
		}
		if done {
			e.finish(o)
		}
	}
	return true, e.start()
}

// fail marks the communicator broken, tells the other ranks unless one of them
// has told this one on it, and returns err as an OpError. What is pending stays with MPI
// and is never waited for again. The caller holds mu.
func (e *endpoint) fail(name string, err error) error {
	err = e.check.Fail(name, err)
	if e.broken == nil {
		e.broken = err
		if by := (*told)(nil); !errors.As(err, &by) || by.on != e {
			e.tellFailure(err)
		}
	}
	return err
}
