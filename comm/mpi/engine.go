package mpi

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
)

// engine runs the operations of one communicator. Operations start in the
// order in which they were submitted, each as soon as those before it have
// started and none of these uses memory that it needs (op.conflicts); from
// then on they run side by side. All messages are non-blocking: submitting
// starts what can start, and whoever waits (or the progress goroutine) asks
// MPI what has finished and lets operations go on.
//
// Fields below mu belong to who holds it; the methods say so.
type engine struct {
	lib   *library
	rank  int
	size  int
	pub   uintptr // the communicator that users and other programs see
	inner uintptr // its duplicate for the messages of collectives
	// native: collectives are the library's own, and there is no inner.
	native bool

	inFlight atomic.Int32 // operations submitted and not done
	waiters  atomic.Int32 // goroutines inside wait

	mu      sync.Mutex
	broken  error
	waiting []*op // submitted, in order
	active  []*op // started, in order
	free    []*op
	seq     uintptr // collectives submitted so far
	groups  uint64
	table   requests
	scratch scratchPool
	inboxes []inbox // for messages with wide tags, by source
	again   bool    // an operation made another one ready to go on
}

// maxActive bounds the collectives that run at a time, and with them their
// working memory.
const maxActive = 4

// Tags of internal messages: each collective has tagPhases of them, and the
// tags of tagWindow collectives, and two more (see wide.go), fit under the
// smallest MPI_TAG_UB that the standard allows (32767). Messages of two collectives that share a tag, a
// window apart, stay apart because MPI keeps the order of messages between two
// ranks and operations start in order.
const (
	tagPhases = 2
	tagWindow = 16383
)

// newOp returns an operation to fill in and submit. The caller holds mu.
func (e *engine) newOp() *op {
	if n := len(e.free); n > 0 {
		o := e.free[n-1]
		e.free = e.free[:n-1]
		return o
	}
	return newOp(e.size)
}

// enqueue puts an operation behind those submitted before. The caller holds mu
// and calls start afterwards.
func (e *engine) enqueue(o *op, group uint64) {
	if o.private {
		o.tag = e.seq % tagWindow * tagPhases
		e.seq++
	}
	o.group = group
	e.waiting = append(e.waiting, o)
	e.inFlight.Add(1)
}

// start starts every operation that has not to wait. The caller holds mu.
func (e *engine) start() error {
	started := 0
	for _, o := range e.waiting {
		if !e.ready(o) {
			break
		}
		started++
		if err := e.begin(o); err != nil {
			return e.fail(o.name, err)
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
func (e *engine) ready(o *op) bool {
	collectives := 0
	for _, a := range e.active {
		if o.conflicts(a) {
			return false
		}
		if a.private && a.work > 0 {
			collectives++
		}
	}
	return !o.private || o.work == 0 || collectives < maxActive
}

// begin starts o. The caller holds mu.
func (e *engine) begin(o *op) error {
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
func (e *engine) advance(o *op) (done bool, err error) {
	for o.pending == 0 && !done && err == nil {
		done, err = o.step(e, o)
		o.phase++
	}
	return done, err
}

// retire gives up an operation that is done.
func (e *engine) retire(o *op) {
	e.scratch.give(o.memory)
	o.reset()
	e.free = append(e.free, o)
	e.inFlight.Add(-1)
}

// poll asks MPI once which messages are done and lets operations go on. It
// reports whether anything was. The caller holds mu.
func (e *engine) poll() (moved bool, err error) {
	if e.broken != nil {
		return false, e.stopped()
	}
	if len(e.active) == 0 {
		return false, nil
	}
	n, err := e.table.test(e.lib, len(e.active) == 1)
	if err != nil {
		return false, e.fail(e.table.failed, err)
	}
	if n == 0 {
		return false, nil
	}
	for e.again = true; e.again; {
		e.again = false
		if err := e.advanceAll(); err != nil {
			return true, err
		}
	}
	return true, e.start()
}

// advanceAll lets every active operation go on. Operations that start
// meanwhile stand behind those that were active before.
func (e *engine) advanceAll() error {
	before := e.active
	kept := before[:0]
	for i, o := range before {
		done, err := e.advance(o)
		if err != nil {
			e.active = append(kept, e.active[i:]...)
			return e.fail(o.name, err)
		}
		if done {
			e.retire(o)
		} else {
			kept = append(kept, o)
		}
	}
	started := e.active[len(before):]
	e.active = append(kept, started...)
	clear(before[min(len(e.active), len(before)):])
	return nil
}

// fail marks the communicator broken and returns err as an OpError. What is
// pending stays with MPI and is never waited for again. The caller holds mu.
func (e *engine) fail(name string, err error) error {
	var op *comm.OpError
	if !errors.As(err, &op) {
		err = &comm.OpError{Backend: backend, Op: name, Rank: e.rank, Err: err}
	}
	if e.broken == nil {
		e.broken = err
	}
	return err
}

// stopped is the error of every call after the one that broke the
// communicator.
func (e *engine) stopped() error {
	return fmt.Errorf("%w: %w", comm.ErrBroken, e.broken)
}

// wait polls until everything that was submitted is done or ctx is.
func (e *engine) wait(ctx context.Context, name string) error {
	e.waiters.Add(1)
	defer e.waiters.Add(-1)
	var p pause
	for {
		if idle, err := e.drain(p.polls()); err != nil || idle {
			return err
		}
		// The context is looked at after the first tries, so that a
		// collective whose peers are there costs nothing extra.
		if ctx.Err() != nil {
			e.mu.Lock()
			defer e.mu.Unlock()
			return e.fail(name, comm.ContextError(ctx))
		}
		p.next()
	}
}

// drain polls up to n times and reports whether nothing is left to do.
func (e *engine) drain(n int) (idle bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for range n {
		if _, err := e.poll(); err != nil {
			return false, err
		}
		if len(e.active) == 0 && len(e.waiting) == 0 {
			return true, nil
		}
	}
	return false, nil
}

// message posts a user's message: one MPI message of the elements' own type,
// so that the other end may be any MPI program. Counts beyond an int go through
// the large-count function, or in pieces where the library has none.
func (e *engine) message(o *op, name string, f, large dl.Func, buffer uintptr, receive bool) error {
	for left, first := o.total, true; left > 0 || first; first = false {
		n := left
		post := f
		if n > math.MaxInt32 {
			if post = large; !post.Found() {
				post, n = f, maxMessage
			}
		}
		expected := int64(sent)
		if receive {
			expected = int64(n * o.dt.Size())
		}
		slot := e.table.add(o, expected)
		code := e.lib.call(post, buffer, uintptr(n), o.mpiType, uintptr(o.peer), o.tag, e.pub, slot)
		if err := e.table.posted(e.lib, name, code); err != nil {
			return err
		}
		buffer, left = buffer+uintptr(n*o.dt.Size()), left-n
	}
	return nil
}

// maxMessage is the most bytes (of a user's message: elements) that go into one
// message where counts are ints.
const maxMessage = 1 << 30

// Messages that are little longer than what a library sends without a
// handshake (4 KiB with Open MPI's shared memory) take less time in two or
// three pieces that are shorter.
const (
	eagerPiece = 2 << 10
	eagerLimit = 6 << 10
)

// pieceOf is the size of the messages that carry that many bytes.
func pieceOf(bytes int) int {
	if bytes <= eagerLimit {
		return eagerPiece
	}
	return maxMessage
}

// sendBytes posts an internal message, in pieces if it is long.
func (e *engine) sendBytes(o *op, tag uintptr, buffer uintptr, bytes, dest int) error {
	piece := pieceOf(bytes)
	for bytes > 0 {
		n := min(bytes, piece)
		slot := e.table.add(o, sent)
		code := e.lib.call(e.lib.Isend, buffer, uintptr(n), e.lib.handles.bytes, uintptr(dest), tag, e.inner, slot)
		if err := e.table.posted(e.lib, "MPI_Isend", code); err != nil {
			return err
		}
		buffer, bytes = buffer+uintptr(n), bytes-n
	}
	return nil
}

// recvBytes posts the receive for sendBytes.
func (e *engine) recvBytes(o *op, tag uintptr, buffer uintptr, bytes, src int) error {
	piece := pieceOf(bytes)
	for bytes > 0 {
		n := min(bytes, piece)
		slot := e.table.add(o, int64(n))
		code := e.lib.call(e.lib.Irecv, buffer, uintptr(n), e.lib.handles.bytes, uintptr(src), tag, e.inner, slot)
		if err := e.table.posted(e.lib, "MPI_Irecv", code); err != nil {
			return err
		}
		buffer, bytes = buffer+uintptr(n), bytes-n
	}
	return nil
}
