package schedule

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/internal/repeats"
	"github.com/tutti-go/tutti/internal/tally"
)

// Engine is one rank of a communicator with its operations in flight. Operations start in the order of submission,
// each as soon as those before it have started and no memory conflicts (usage.conflicts). Then they run concurrently.
// All messages are non-blocking: a submission starts everything that can start. A rank that waits, or one that drives
// the engine in the background, polls the wire for complete messages and advances operations.
//
// Fields below mu belong to the holder of mu. Unexported methods say if they expect the caller to hold it.
type Engine struct {
	Check backend.Check // of arguments
	Life  backend.Life  // lifecycle of the communicator
	// Links describes the links between the ranks. It is set before the first call, on all ranks alike.
	Links Links

	wire     Wire              // carries messages
	waiter   Waiter            // the wire, if it is one
	looker   Looker            // the wire, if it is one
	offload  Offload           // runs calls instead of the schedules; nil for none
	notify   func()            // called at each submission; may be nil
	late     func(ranks []int) // called with the ranks that a wait lacked at its deadline; may be nil
	pieces   bool              // see Config
	rank     int               // in the communicator
	size     int               // number of ranks
	tagShift int               // shift of a fingerprint that makes it fit into a tag
	inFlight atomic.Int32      // operations
	ended    atomic.Uint64     // leading collectives that are complete
	waiters  atomic.Int32      // goroutines inside Wait
	missed   atomic.Bool       // Drive has left messages to a wait
	leaving  atomic.Bool       // goodbyes are sent, and those of the others awaited

	mu        sync.Mutex  // guards the fields below
	notified  bool        // this rank has sent its last control message
	table     []Message   // by id
	vacant    []int       // ids without a message in flight
	done      []Done      // of the last Poll
	idle      []*Op       // operations whose last message was complete in the last Poll
	queued    operations  // submitted and not started
	running   []*Op       // collectives that have started, in order
	transfers []*Op       // messages of users that have started, in no order
	memory    usage       // of both
	free      []*Op       // operations for reuse
	seq       uint64      // operations of collectives submitted so far
	messages  tally.Tally // of users
	groups    uint64      // number of the last group; 0 before the first
	segment   segment     // memory that the ranks share; zero if they share none
	home      *poll.Home  // of this rank's waits; nil if the kernel alone chooses their processors

	log       callLog     // the collectives that were called
	passed    uint64      // calls up to the last barrier or Split that is complete
	peers     []peer      // knowledge about other ranks, by rank
	reported  uint64      // number of the last collective that was reported, plus one
	crowdings repeats.Log // waits whose messages lack receives
	departed  int         // ranks whose last message has arrived
}

// Links describes the links between the ranks of a communicator.
type Links uint8

const (
	ShortLinks Links = iota // some ranks are on other hosts, and messages take less than milliseconds
	LongLinks               // between some ranks messages take milliseconds
	OneHost                 // all ranks are on one host, as those with a segment are
)

// Config has the parts of an Engine.
type Config struct {
	Check backend.Check // of arguments
	Wire  Wire          // carries messages between the ranks
	// MaxTag is the highest tag of internal messages, at least 1<<14 - 1. The higher it is, the sooner ranks notice
	// that they disagree.
	MaxTag uint64
	// Notify is called at each submission; it may be nil.
	Notify func()
	// Late is called, with no lock held, with the ranks that a wait lacked at its deadline, before the wait returns.
	// It may be nil.
	Late func(ranks []int)
	// Pieces splits messages of 2 to 6 KiB into pieces of 2 KiB, and long messages between hosts, except for
	// reductions, into pieces of almost 64 KiB. It is for transports that send such pieces without a handshake, and
	// longer messages more slowly.
	Pieces bool
	// Offload runs calls instead of the schedules; it may be nil. With it, buffers of users' messages may be in device
	// memory.
	Offload Offload
}

// New returns the engine of a rank.
func New(c Config) *Engine {
	e := &Engine{Check: c.Check, wire: c.Wire, offload: c.Offload, notify: c.Notify, late: c.Late, pieces: c.Pieces,
		rank: c.Check.Rank, size: c.Check.WorldSize, peers: make([]peer, c.Check.WorldSize),
		tagShift: 65 - bits.Len64(c.MaxTag/(tagWindow*tagPhases))}
	e.waiter, _ = c.Wire.(Waiter)
	e.looker, _ = c.Wire.(Looker)
	return e
}

// SetHome sets the processor to which waits of this rank return.
func (e *Engine) SetHome(home *poll.Home) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.home = home
}

// maxActive bounds the number of collectives that run at once, and thus their working memory.
const maxActive = 4

// start starts the operations that can start. The caller holds mu.
func (e *Engine) start() error {
	for !e.queued.all.Empty() && e.ready(e.queued.all.First()) {
		o := e.queued.pop()
		if err := e.begin(o); err != nil {
			return e.fail(o.op, err)
		}
	}
	e.publish()
	return nil
}

// publish makes the progress of collectives visible to Progress.
func (e *Engine) publish() {
	done := e.log.sequence.Load()
	first := e.oldest()
	if first == nil && !e.queued.collectives.Empty() {
		first = e.queued.collectives.First()
	}
	if first != nil {
		done = first.sequence - min(first.sequence, 1) // operations of SetUp have no sequence number
	}
	if e.ended.Load() != done {
		e.ended.Store(done)
	}
}

// Progress implements [backend.Progresser] for the communicator.
func (e *Engine) Progress() backend.Progress {
	done := e.ended.Load() // read before the number of submissions
	ended := e.messages.Ended()
	return backend.Progress{
		Collectives: backend.Count{Submitted: e.log.sequence.Load(), Done: done},
		Messages:    backend.Count{Submitted: e.messages.Begun(), Done: ended},
	}
}

// Busy reports whether operations are in flight.
func (e *Engine) Busy() bool { return e.inFlight.Load() > 0 }

// Unattended reports whether operations are in flight that nobody waits for.
func (e *Engine) Unattended() bool { return e.Busy() && e.waiters.Load() == 0 }

// started returns the number of operations that have started and are in flight.
func (e *Engine) started() int { return len(e.running) + len(e.transfers) }

// ready reports whether o may start.
func (e *Engine) ready(o *Op) bool {
	if o.round.active && e.segment.owner != nil {
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
	return !e.memory.conflicts(o)
}

// begin starts o. The caller holds mu.
func (e *Engine) begin(o *Op) error {
	if err := o.prepare(); err != nil {
		return fmt.Errorf("working memory: %w", err)
	}
	done, err := e.advance(o)
	if err != nil {
		return err
	}
	if done {
		e.retire(o)
		return nil
	}
	e.memory.add(o)
	list := &e.transfers
	if o.collective() {
		list = &e.running
	}
	o.index = len(*list)
	*list = append(*list, o)
	return nil
}

// finish removes a complete operation from the lists.
func (e *Engine) finish(o *Op) {
	e.memory.remove(o)
	if o.collective() {
		e.running = slices.Delete(e.running, o.index, o.index+1)
		for i := o.index; i < len(e.running); i++ {
			e.running[i].index = i
		}
	} else {
		last := len(e.transfers) - 1
		e.transfers[o.index] = e.transfers[last]
		e.transfers[o.index].index = o.index
		e.transfers[last] = nil
		e.transfers = e.transfers[:last]
	}
	e.retire(o)
}

// advance takes the steps of an operation until it has messages in flight.
func (e *Engine) advance(o *Op) (done bool, err error) {
	for o.inFlight == 0 && !done {
		done = o.Step(e, o)
		o.phase++
	}
	return done, e.wire.Flush()
}

// retire recycles a complete operation.
func (e *Engine) retire(o *Op) {
	if !o.collective() {
		e.messages.End(o.number)
	}
	if o.work > smallBytes {
		_ = host.Deallocate(o.memory)
	}
	if !o.op.MovesData() {
		e.passed = o.number + 1
	}
	o.plan = plan{}
	e.free = append(e.free, o)
	e.inFlight.Add(-1)
}

// Expect adds a message of o to those in flight, and returns the id that Poll reports when it
// has completed. A backend that starts the message itself calls it from a [Step].
func (e *Engine) Expect(o *Op, m Message) (id int) {
	if last := len(e.vacant) - 1; last >= 0 {
		id = e.vacant[last]
		e.vacant = e.vacant[:last]
	} else {
		id = len(e.table)
		e.table = append(e.table, Message{})
	}
	m.owner = o
	e.table[id] = m
	o.inFlight++
	return id
}

// post starts a message of o.
func (e *Engine) post(o *Op, m Message) {
	id := e.Expect(o, m)
	e.wire.Post(id, &e.table[id])
}

// complete records that a message is complete.
func (e *Engine) complete(d *Done) error {
	m := &e.table[d.ID]
	o := m.owner
	err := d.Err
	want := m.Bytes
	headed := m.Headed && m.Receive
	if headed {
		want = e.headedBytes(o)
	}
	switch {
	case !m.Receive:
	case d.Bytes > m.Bytes:
		err = fmt.Errorf("%w: %v: rank %d sent more than %d bytes", comm.ErrMismatch, o, m.Peer, m.Bytes)
	case err == nil && d.Bytes != want:
		err = fmt.Errorf("%w: %v: rank %d sent %d bytes, expected %d", comm.ErrMismatch, o, m.Peer, d.Bytes, want)
	}
	if headed || err != nil {
		came := headed && d.Err == nil && d.Bytes >= headBytes && d.Bytes <= m.Bytes
		err = cmp.Or(e.checkHead(o, came), err)
	}
	if err != nil {
		return e.fail(o.op, err)
	}
	*m = Message{}
	e.vacant = append(e.vacant, d.ID)
	if o.inFlight--; o.inFlight == 0 {
		e.idle = append(e.idle, o)
	}
	return nil
}

// poll polls the wire for complete messages, at most the given number of times, and advances operations. It reports
// whether any message was complete. In a stalled wait it polls messages one by one: one may show why the others are
// missing. The caller holds mu.
func (e *Engine) poll(stalled bool, tries int) (moved bool, err error) {
	if err := e.Life.Broken(); err != nil {
		return false, err
	}
	if e.started() == 0 {
		return false, nil
	}
	asks := tries
	if e.segment.owner != nil {
		asks = 1
	}
	e.idle = e.idle[:0]
	if e.done, err = e.wire.Poll(e.done[:0], Hint{Together: !stalled && e.started() == 1, Tries: asks}); err != nil {
		return false, e.fail(comm.OpSync, err)
	}
	for i := range e.done {
		if err := e.complete(&e.done[i]); err != nil {
			return false, err
		}
	}
	if o := e.segment.await(tries); o != nil {
		e.idle = append(e.idle, o)
	} else if len(e.done) == 0 {
		return false, nil
	}
	for _, o := range e.idle {
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

// Fail aborts the communicator, and tells the other ranks that the wait or call op failed on this rank. It returns
// err. The caller must hold no lock.
func (e *Engine) Fail(op comm.Op, err error) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.fail(op, err)
}

// fail is Fail with mu held. Operations in flight stay with the wire.
func (e *Engine) fail(op comm.Op, err error) error {
	if e.Life.Fail(err) {
		e.notifyFailure(&comm.OpError{Op: op.String(), Err: err})
	}
	return err
}

// Abort implements [backend.Backend]. Messages that the wire cannot cancel stay in flight.
func (e *Engine) Abort(ctx context.Context, cause error) {
	e.mu.Lock()
	e.notifyFailure(cause)
	e.mu.Unlock()
	e.abandon(ctx)
}

// abandon waits until the wire no longer accesses memory of messages, or until ctx ends, and returns the number of
// messages whose memory it still accesses.
func (e *Engine) abandon(ctx context.Context) (touched int) {
	for w := (watch{}); ; e.pause(&w) {
		e.mu.Lock()
		touched = e.wire.Abandon()
		e.mu.Unlock()
		if touched == 0 || ctx.Err() != nil {
			return touched
		}
	}
}

// Leave begins [backend.Backend.Release]. If the communicator has aborted, it waits until the wire no longer accesses
// memory, or until ctx ends, and returns false. Otherwise it sends goodbyes to the other ranks.
func (e *Engine) Leave(ctx context.Context) (sound bool) {
	if cause := e.Life.Cause(); cause != nil {
		if touched := e.abandon(ctx); touched > 0 {
			slog.Warn(e.Check.Backend+": messages of a closed communicator are still in flight, and write to its memory",
				"rank", e.rank, "messages", touched, "cause", cause)
		}
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.notifyAll(controlMessage{kind: goodbye})
	e.leaving.Store(true)
	return true
}

// Leaving reports whether Leave has said goodbye, and Departs has not reported that all
// others have.
func (e *Engine) Leaving() bool { return e.leaving.Load() }

// Departs reports, once after Leave, that the engine is gone. Its memory may be freed if the goodbyes of all other
// ranks have arrived, so that nobody sends to it any more. If a rank has aborted, the engine is gone as well, but is
// not freed.
func (e *Engine) Departs() (gone, free bool) {
	if !e.leaving.Load() {
		return false, false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.leaving.Load() { // another goroutine frees it
		return false, false
	}
	told, err := e.wire.Told()
	broken := err != nil || e.hear() != nil
	for src := range e.peers {
		broken = broken || e.aborted(src) != nil
	}
	if !broken && (e.departed < e.size-1 || !told) {
		return false, false
	}
	e.leaving.Store(false)
	return true, !broken
}

// Missing returns the ranks whose goodbyes a leaving engine waits for.
func (e *Engine) Missing() (ranks []int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for r := range e.peers {
		if e.leaving.Load() && r != e.rank && e.peers[r].last == nil {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// Release frees the memory of a departed engine.
func (e *Engine) Release() {
	e.mu.Lock() // a wait that is ending may access the segment
	defer e.mu.Unlock()
	e.segment = segment{}
	for _, o := range e.free {
		_ = host.Deallocate(o.small)
	}
	e.free = nil
}
