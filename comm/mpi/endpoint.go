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

// endpoint is one rank of a communicator: its operations in flight. They start in the order
// in which they were submitted, each as soon as those before it have started and no memory
// conflicts (op.conflicts). From then on they run side by side. All messages are
// non-blocking: a submission starts what can start. A rank that waits, or the progress
// goroutine, asks MPI which messages are done and lets operations go on.
//
// Fields below mu belong to the holder of mu. Methods say if they expect the caller to hold
// it.
type endpoint struct {
	state    *state
	lib      *library
	check    backend.Check
	life     backend.Life
	rank     int
	size     int
	pub      uintptr       // the communicator that users and other programs see
	inner    uintptr       // its duplicate for this package's own messages; pub with interop
	inFlight atomic.Int32  // operations
	called   atomic.Uint64 // collectives submitted
	done     atomic.Uint64 // and completed, without a gap
	waiters  atomic.Int32  // goroutines inside wait
	leaving  atomic.Bool   // has sent its goodbyes, and waits for those of the others

	mu        sync.Mutex
	notified  bool  // this rank has sent its last control message
	canceled  bool  // receives that have not begun
	queued    []*op // submitted, in order
	running   []*op // collectives that have started, in order
	transfers []*op // messages of users that have started, in no order
	reads     spans // memory that these read
	writes    spans // and that they write
	free      []*op
	seq       uint64      // operations of collectives submitted so far
	begun     uint64      // and started
	latest    uint64      // sequence number of the collective that started last
	messages  tally.Tally // of users
	groups    uint64
	table     requests
	segment   segment
	unshared  error       // why there is no segment
	scratch   scratchPool // working memory of collectives
	heads     scratchPool // and of messages

	log     callLog
	passed  uint64 // calls up to the last barrier or Split that is done
	peers   []peer
	control controls
}

// native reports whether collectives are the library's own.
func (e *endpoint) native() bool { return e.state.collectives != scheduled }

// interop reports whether ranks may be other programs, which read no messages of this
// package.
func (e *endpoint) interop() bool { return e.state.collectives == interop }

// maxActive bounds the number of collectives that run at a time, and so their working
// memory.
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
		o.number, o.seq, o.msgTag, o.fingerprint = e.log.calls-1, e.seq, e.tag(e.seq), e.log.fingerprint
		o.sequence = e.log.sequence
		e.seq++
	} else {
		o.number = e.messages.Begin()
	}
	e.queued = append(e.queued, o)
	e.inFlight.Add(1)
}

// start starts the operations that need not wait. The caller holds mu.
func (e *endpoint) start() error {
	started := 0
	for _, o := range e.queued {
		if !e.ready(o) {
			break
		}
		started++
		if err := e.begin(o); err != nil {
			return e.fail(o.op, err)
		}
	}
	if started > 0 {
		rest := copy(e.queued, e.queued[started:])
		clear(e.queued[rest:])
		e.queued = e.queued[:rest]
	}
	e.publish()
	return nil
}

// publish makes the progress of collectives visible to Progress.
func (e *endpoint) publish() {
	done, called := e.log.sequence, e.log.sequence
	if o := e.oldest(); o != nil {
		done = o.sequence - min(o.sequence, 1) // those of setUp have none
	} else if e.begun < e.seq {
		done = e.latest - min(e.latest, 1)
	}
	if e.called.Load() != called {
		e.called.Store(called)
	}
	if e.done.Load() < done { // a queued collective may have parts that have begun
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

// started returns the number of operations that have started and are in flight.
func (e *endpoint) started() int { return len(e.running) + len(e.transfers) }

// idle reports whether nothing is in flight.
func (e *endpoint) idle() bool { return e.started() == 0 && len(e.queued) == 0 }

// ready reports whether o may start.
func (e *endpoint) ready(o *op) bool {
	if o.shared && e.segment.owner != nil {
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
	for _, started := range [][]*op{e.running, e.transfers} {
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
		e.begun, e.latest = o.seq+1, o.sequence
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
	list := &e.transfers
	if o.collective() {
		list = &e.running
	}
	o.at = len(*list)
	*list = append(*list, o)
	return nil
}

// finish removes an operation that is done from the lists.
func (e *endpoint) finish(o *op) {
	e.reads.remove(&o.readNode)
	e.writes.remove(&o.writeNode)
	if o.collective() {
		e.running = slices.Delete(e.running, o.at, o.at+1)
		for i, later := range e.running[o.at:] {
			later.at = o.at + i
		}
	} else {
		last := len(e.transfers) - 1
		e.transfers[o.at], e.transfers[last].at = e.transfers[last], o.at
		e.transfers[last] = nil
		e.transfers = e.transfers[:last]
	}
	e.retire(o)
}

// advance takes the steps of an operation until it has messages in flight.
func (e *endpoint) advance(o *op) (done bool, err error) {
	for o.inFlight == 0 && !done && err == nil {
		done, err = o.step(e, o)
		o.phase++
	}
	if err == nil {
		err = e.table.flush(e.lib)
	}
	return done, err
}

// retire recycles an operation that is done.
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

// poll asks MPI which messages are done, at most the given number of times, and lets
// operations go on. It reports whether any message was done. In a stalled wait it looks at
// messages one by one: one may show why the others do not come. The caller holds mu.
func (e *endpoint) poll(stalled bool, tries int) (moved bool, err error) {
	if err := e.life.Broken(); err != nil {
		return false, err
	}
	if e.started() == 0 {
		return false, nil
	}
	asks := tries
	if e.segment.owner != nil {
		asks = 1
	}
	n, err := e.table.test(e.lib, !stalled && e.started() == 1, asks)
	if err != nil {
		return false, e.fail(e.table.failed, err)
	}
	if o := e.segment.await(tries); o != nil {
		e.table.idle = append(e.table.idle, o)
	} else if n == 0 {
		return false, nil
	}
	for _, o := range e.table.idle {
		done, err := e.advance(o)
		if err != nil {
			return true, e.fail(o.op, err)
		}
		if done {
			e.finish(o)
		}
	}
	return true, e.start()
}

// fail marks the communicator aborted and notifies the other ranks that the wait or call op
// of this rank failed, unless the error came from one of them. Operations in flight stay with
// MPI. It returns err. The caller holds mu.
func (e *endpoint) fail(op comm.Op, err error) error {
	if e.life.Fail(err) {
		if by := (*peerFailure)(nil); errors.As(err, &by) && by.on == e {
			e.notified = true // they know
		}
		e.notifyFailure(&comm.OpError{Op: op.String(), Err: err})
	}
	return err
}
