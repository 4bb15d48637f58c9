package tcp

import (
	"bytes"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/internal/fault"
)

// wire is a communicator's part of the connections: the [schedule.Wire] of its engine.
type wire struct {
	node     *node            // whose pairs it uses
	engine   *schedule.Engine // which calls it
	id       uint64           // communicator ID, the same on all ranks
	rank     int              // in the communicator
	pairs    []*pair          // by rank
	place    []int32          // rank of the communicator, by rank of the world; -1 for those outside
	matchers []matcher        // by rank, each guarded by its pair's mu
	awaits   chan struct{}    // gets a value when a wait may have something to do
	drives   chan struct{}    // the same for drive, while nobody waits
	closed   chan struct{}    // closed when the communicator is
	shares   atomic.Bool      // ranks of this machine are among the others, and share memory
	watched  atomic.Bool      // is one of neighborhood.watched; set with its mu held

	waiting        atomic.Int32 // goroutines in Await
	moved          atomic.Bool  // a track has moved a part of a message since the last call of Moved
	collects       atomic.Bool  // Poll moves tracks, and takes what is done next
	unsentControls atomic.Int32 // control messages that no lane has sealed
	timers         sync.Pool    // of *time.Timer, for waits

	// Of the holder of the engine's lock.
	unflushed      []*pair // for which something was posted that nobody has begun to send
	unflushedBytes int

	mu        sync.Mutex      // guards done and mailboxes
	done      []schedule.Done // since the last Poll; guarded by mu
	mailboxes []mailbox       // by rank; guarded by mu
}

// mailbox has the control messages of a rank that the engine has not heard: nil for none.
type mailbox struct {
	report []byte // the latest status report
	last   []byte // the rank's last message
}

func (n *node) newWire(id uint64, rank int, ranks []int) *wire {
	w := &wire{
		node:      n,
		id:        id,
		rank:      rank,
		pairs:     make([]*pair, len(ranks)),
		place:     make([]int32, n.size),
		matchers:  make([]matcher, len(ranks)),
		awaits:    make(chan struct{}, 1),
		drives:    make(chan struct{}, 1),
		closed:    make(chan struct{}),
		mailboxes: make([]mailbox, len(ranks)),
	}
	w.timers.New = func() any { return time.NewTimer(time.Hour) }
	for i := range w.place {
		w.place[i] = -1
	}
	for r, world := range ranks {
		w.pairs[r] = n.pairs[world]
		w.place[world] = int32(r)
	}
	return w
}

// drive lets operations go on that nobody waits for.
func (w *wire) drive() {
	for {
		select {
		case <-w.drives:
			w.engine.Drive()
		case <-w.closed:
			return
		}
	}
}

// wireTag is the tag of a message: users and the engine have half of the tags each.
func wireTag(m *schedule.Message) uint64 {
	tag := m.Tag << 1
	if m.User {
		tag |= 1
	}
	return tag
}

// Post implements [schedule.Wire].
func (w *wire) Post(id int, m *schedule.Message) {
	p := w.pairs[m.Peer]
	tag := wireTag(m)
	if !m.Receive {
		p.send(w, id, tag, m.Address, m.Bytes)
		w.flushLater(p, m.Bytes)
		return
	}
	if p.post(w, m.Peer, posted{id, tag, m.Address, m.Bytes}) {
		w.flushLater(p, 0)
	}
}

// flushLater notes that a pair has something to send. Called by Post, with the engine's lock held.
func (w *wire) flushLater(p *pair, bytes int) {
	if len(p.lanes) > 0 {
		w.unflushed = append(w.unflushed, p)
		w.unflushedBytes += bytes
	}
}

// Flush implements [schedule.Wire]. Short messages are sent here.
func (w *wire) Flush() error {
	for i, p := range w.unflushed {
		if i > 0 && w.unflushed[i-1] == p {
			continue
		}
		if t := p.track.Load(); t != nil {
			t.write()
		} else if w.unflushedBytes <= inlineBytes {
			p.lanes[0].write(true)
		} else {
			p.lanes[0].wakeWriter()
		}
	}
	clear(w.unflushed)
	w.unflushed = w.unflushed[:0]
	w.unflushedBytes = 0
	return nil
}

// Poll implements [schedule.Wire].
func (w *wire) Poll(done []schedule.Done, _ schedule.Hint) ([]schedule.Done, error) {
	_ = w.Flush()
	if w.shares.Load() {
		w.moveTracks()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	done = append(done, w.done...)
	w.done = w.done[:0]
	return done, nil
}

// moveTracks moves what goes through shared memory. Called by Poll.
func (w *wire) moveTracks() {
	w.collects.Store(true)
	for _, p := range w.pairs {
		t := p.track.Load()
		if t == nil {
			continue
		}
		t.read(false)
		if t.full.Load() {
			t.write()
		}
	}
	w.collects.Store(false)
}

// Abandon implements [schedule.Wire].
func (w *wire) Abandon() int {
	for source, p := range w.pairs {
		p.forget(w, source)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = w.done[:0]
	return 0
}

// Tell implements [schedule.Wire].
func (w *wire) Tell(rank int, report bool, message []byte) bool {
	p := w.pairs[rank]
	if !p.tell(w, report, message) {
		return false
	}
	p.lanes[0].write(true)
	return true
}

// tell queues a control message, unless the peer cannot be reached any more. Called by wire.Tell, with the
// engine's lock held.
func (p *pair) tell(w *wire, report bool, message []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	taken := p.gone == nil
	if taken {
		w.unsentControls.Add(1)
		h := header{kind: frameControl, communicator: w.id, report: report}
		p.outbox.urgent.Push(outFrame{header: h, payload: bytes.Clone(message), wire: w})
	}
	return taken
}

// Told implements [schedule.Wire].
func (w *wire) Told() (bool, error) { return w.unsentControls.Load() == 0, nil }

// keepControl keeps a control message until the engine hears it. Called by pair.control, without locks.
func (w *wire) keepControl(source int, report bool, message []byte) {
	w.mu.Lock()
	m := &w.mailboxes[source]
	if report {
		m.report = message
	} else {
		m.last = message
	}
	w.mu.Unlock()
	w.signal()
}

// Hear implements [schedule.Wire].
func (w *wire) Hear(rank int) (message []byte, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := &w.mailboxes[rank]
	if m.report != nil {
		message = m.report
		m.report = nil
		return message, nil
	}
	message = m.last
	m.last = nil
	return message, nil
}

// reportLate tells the launcher that a wait has waited for ranks until its deadline.
func (w *wire) reportLate(late []int) {
	var reports []fault.Report
	for _, rank := range late {
		const reason = "other ranks timed out waiting for it"
		about := w.pairs[rank].rank
		reports = append(reports, fault.Report{Kind: fault.Late, By: w.node.rank, About: about, Reason: reason})
	}
	if w.node.report != nil {
		w.node.report(reports)
	}
}

// Gone implements [schedule.Wire].
func (w *wire) Gone(rank int) error {
	p := w.pairs[rank]
	p.mu.Lock()
	gone := p.gone
	p.mu.Unlock()
	if gone == nil {
		return nil
	}
	if t := p.track.Load(); t != nil {
		t.read(true) // what it had written comes first
		awaitUnlock(&t.sealing)
	}
	for _, l := range p.lanes {
		awaitUnlock(&l.sealing) // what was sent is noted
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if m := w.mailboxes[rank]; len(w.done) > 0 || m.report != nil || m.last != nil {
		return nil // not yet
	}
	return gone
}

// Early implements [schedule.Bounded].
func (w *wire) Early(rank int) int {
	p := w.pairs[rank]
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.credit.early()
}

// Unread implements [schedule.Bounded].
func (w *wire) Unread(rank int) int {
	p := w.pairs[rank]
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.outbox.waiting.Empty() && len(p.outbox.ungranted) == 0 {
		return 0
	}
	return p.credit.unread()
}

// complete notes a message that is done. Called by the outbox and the inbox, with pair.mu held.
func (w *wire) complete(id, bytes int) {
	w.mu.Lock()
	w.done = append(w.done, schedule.Done{ID: id, Bytes: bytes})
	w.mu.Unlock()
	if !w.collects.Load() {
		w.signal()
	}
}

// signal says that something has come: to a wait, and to drive while nobody waits.
func (w *wire) signal() {
	notify(w.awaits)
	if w.waiting.Load() == 0 {
		notify(w.drives)
	}
}

// Looks implements [schedule.Looker].
func (w *wire) Looks(stalled bool) bool {
	if !w.shares.Load() || stalled {
		return false
	}
	w.node.neighbors.Load().poll()
	return true
}

// progress notes that a track has moved a part of a message. A wait that sleeps looks by itself then, as more is close.
func (w *wire) progress() {
	if w.moved.Load() {
		return
	}
	w.moved.Store(true)
	if !w.collects.Load() {
		notify(w.awaits)
	}
}

// Moved implements [schedule.Looker].
func (w *wire) Moved() bool { return w.moved.Load() && w.moved.Swap(false) }

// Await implements [schedule.Waiter]. It blocks: a thread that spins would keep the one from the
// processor that hears the network.
func (w *wire) Await(d time.Duration) {
	w.waiting.Add(1)
	defer w.waiting.Add(-1)
	if w.shares.Load() {
		w.node.neighbors.Load().doze()
	}
	timer := w.timers.Get().(*time.Timer)
	timer.Reset(d)
	select {
	case <-w.awaits:
	case <-timer.C:
	}
	timer.Stop()
	w.timers.Put(timer)
}
