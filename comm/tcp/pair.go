package tcp

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/tutti-go/tutti/internal/fault"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// pairState is where a pair is in its life.
//
//	             node.start            node.leave
//	connecting ────────────► connected ──────────► leaving
//	                             │                    │
//	                     goodbyes│            goodbyes│
//	                             ▼     node.leave     ▼
//	                            left ─────────────► parted
//
//	any ──fail: a connection is lost, the peer is silent, or this node ends──► closed
//
// goodbyes are the goodbyes of the peer, on all lanes.
type pairState uint8

const (
	connecting pairState = iota // the connector makes the lanes, and makes them again
	connected                   // messages go both ways
	leaving                     // this rank has closed its communicators: the lanes say goodbye
	left                        // the peer has: nothing more comes but signs of life and acknowledgements
	parted                      // both have
	closed                      // the connections are closed
)

// departing reports whether this rank has left.
func (s pairState) departing() bool { return s == leaving || s == parted }

// pair is what this rank shares with another one, the peer, or with itself: the connections, and the messages
// on their way.
//
// The first lane carries what is short: announcements of messages, and everything urgent. Parts of messages go over
// all lanes, as each encrypts on its own processor; on a long link, which has many, over all but the first. A message
// is announced with the length of its eager part: bytes sent at once, into memory that the receiver has reserved. The
// other bytes come when the receive is there and has granted them. So other messages arrive while a long one waits,
// and the credit bounds the memory for early ones and the number of announcements.
//
// outbox.go has the messages that go, inbox.go those that come, credit.go bounds both. A wire (wire.go) is what one
// communicator has of all pairs. The engine, whose lock is mentioned below, is the schedule.Engine that makes the
// collectives on a wire. A track (track.go) is memory that two ranks of one machine share, in place of lanes;
// a flow is what lanes and tracks have in common. A flow's lock sealing is held while the memory of a send is read,
// and filling while the memory of a receive is written (locks.go).
type pair struct {
	node         *node         // of this rank
	rank         int           // of the peer, in the world
	lanes        []*lane       // nil until connected; owned by the connector (connect.go) until all are
	dead         chan struct{} // closed when the pair is
	acknowledged chan struct{} // gets a value when the peer has seen the goodbyes
	lastReceived atomic.Int64  // tick of the node (silence.go) at which something came; unheard, which is -1, before

	reported sync.Once   // tells the launcher that the peer is lost
	failing  atomic.Bool // a goroutine of failAsync closes the pair

	track atomic.Pointer[track] // in shared memory; nil if the ranks share none, or not yet

	// Of the connector, which makes the lanes (connect.go); guarded by its mu.
	attempt uint64        // that made the lanes; 0 for none
	trouble error         // of the last attempt
	retry   chan struct{} // gets a value when the lanes were lost

	mu       sync.Mutex // see locks.go
	state    pairState  // guarded by mu, like all that follows
	gone     error      // why the peer cannot be reached any more; set in left, parted and closed
	goodbyes int        // lanes on which the peer has said goodbye
	turn     int        // the lane that was woken last for a part
	active   bool       // a frame was sent since the last tick
	credit   credit     // how much may be sent early, and what is to be returned
	outbox   outbox     // messages that go
	inbox    inbox      // messages that come
}

// errLeft says that the peer's process has closed all its communicators.
var errLeft = errors.New("it left the job")

func newPair(n *node, rank int) *pair {
	p := &pair{
		node:         n,
		rank:         rank,
		dead:         make(chan struct{}),
		acknowledged: make(chan struct{}, 1),
		retry:        make(chan struct{}, 1),
	}
	p.lastReceived.Store(unheard)
	p.outbox.ungranted = map[uint64]*outgoing{}
	p.cut(chunkBytes)
	p.inbox.incomplete = map[uint64]*incoming{}
	p.inbox.changed.L = &p.mu
	return p
}

// start begins the traffic, when all lanes are there. Called by node.start.
func (p *pair) start() {
	p.mu.Lock()
	if p.state == connecting {
		p.state = connected
	}
	p.cut(chunkOf(len(p.lanes)))
	p.mu.Unlock()
	for _, l := range p.lanes {
		go l.writer()
		go l.reader()
	}
}

// cut sets how long parts of messages are. Both ranks of a pair agree on that. mu is held, or nobody else has the
// pair.
func (p *pair) cut(chunk int) {
	p.outbox.chunk = chunk
	p.inbox.chunk = chunk
}

// chunkOf is how long the parts are that go over a number of lanes: shorter where several carry one message at the
// speed of a processor each. A long link has more than parallelLanes.
func chunkOf(lanes int) int {
	if lanes > 1 && lanes <= parallelLanes {
		return parallelChunkBytes
	}
	return chunkBytes
}

// leave has the lanes say goodbye behind everything else. Called by node.leave.
func (p *pair) leave() {
	p.mu.Lock()
	switch p.state {
	case connected:
		p.state = leaving
	case left:
		p.state = parted
	}
	p.mu.Unlock()
	for _, l := range p.lanes {
		l.wakeWriter()
	}
	if t := p.track.Load(); t != nil {
		t.write()
	}
}

// useTrack has messages go over a track from now on. Called when no message is in flight, by node.meetNeighbors, which
// has ranks of one machine share memory.
func (p *pair) useTrack(t *track) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut(trackChunkBytes)
	p.track.Store(t)
}

// flows is the number of lanes, and of tracks.
func (p *pair) flows() int {
	if p.track.Load() != nil {
		return len(p.lanes) + 1
	}
	return len(p.lanes)
}

// write sends what there is to send of messages, without waiting. Called with the engine's lock or no lock held.
func (p *pair) write() {
	if t := p.track.Load(); t != nil {
		t.write()
	} else {
		p.lanes[0].write(true)
	}
}

// peerLeaves notes that the peer has said goodbye on all lanes. Called by accept; mu is held.
func (p *pair) peerLeaves() {
	switch p.state {
	case connected:
		p.state = left
	case leaving:
		p.state = parted
	}
	p.outbox.urgent.Push(outFrame{header: header{kind: frameGoodbyeAck}})
	p.lanes[0].wakeWriter()
	p.lose(errLeft)
}

// failAsync is fail for who holds a lock or serves other pairs as well: the launcher may be slow to hear of it. The
// caller may come again until the pair is closed.
func (p *pair) failAsync(err error) {
	if p.node.report == nil {
		p.fail(err)
		return
	}
	if !p.failing.Swap(true) {
		go p.fail(err)
	}
}

// fail closes the connections because of an error. Called by lanes, by pair.beat and by node.end, without mu.
func (p *pair) fail(err error) {
	p.reportLoss(err) // before this rank's waits end, and the process perhaps
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lose(connectionLost(err))
	if p.state == closed {
		return
	}
	p.state = closed
	close(p.dead)
	p.closeLanes()
}

// reportLoss tells the launcher that the peer is lost, once. The second caller waits for the first.
func (p *pair) reportLoss(err error) {
	if p.node.report == nil || errors.Is(err, errLeft) {
		return
	}
	p.mu.Lock()
	gone := p.gone != nil
	p.mu.Unlock()
	if gone {
		return
	}
	p.reported.Do(func() {
		p.node.report([]fault.Report{{By: p.node.rank, About: p.rank, Reason: err.Error()}})
	})
}

// connectionLost is the error of a connection that has ended, with what that may mean: the system does not say.
func connectionLost(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		return fmt.Errorf("connection lost: %w (its process has ended, perhaps without closing its communicators)", err)
	}
	return fmt.Errorf("connection lost: %w", err)
}

// lose notes that the peer cannot be reached any more. Called by peerLeaves and fail; mu is held.
func (p *pair) lose(err error) {
	if p.gone != nil {
		return
	}
	p.gone = err
	p.inbox.changed.Broadcast()
	// All communicators look at what is gone.
	go p.node.signal() // not with mu held
}

// closeLanes closes the connections. Called by fail with mu held, and by the connector with its mu held.
func (p *pair) closeLanes() {
	for _, l := range p.lanes {
		if l != nil {
			_ = l.link.Close()
		}
	}
}

// next finds the frame that a lane sends next. Called by lane.seal, with sealing held.
func (p *pair) next(l *lane, f *outFrame) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.choose(l, f) {
		return false
	}
	p.fill(f)
	p.active = true
	return true
}

// nextOfTrack is next for a track, whose frames are no signs of life.
func (p *pair) nextOfTrack(t *track, f *outFrame) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.chooseMessages(f) && !p.chooseGoodbye(&t.flow, f) {
		return false
	}
	p.fill(f)
	return true
}

// fill fills in what all frames have. mu is held.
func (p *pair) fill(f *outFrame) {
	f.header.credit = p.credit.collect()
	f.header.length = len(f.payload)
}

// choose selects the frame, and next fills in the fields common to all. Urgent frames go first, then announcements,
// then parts: an announcement is short, and its receiver may wait for it before it receives the messages whose parts
// are ready. A goodbye is the last frame of a lane. mu is held.
func (p *pair) choose(l *lane, f *outFrame) bool {
	first := l.index == 0
	if first && !p.outbox.urgent.Empty() {
		*f = p.outbox.urgent.Pop()
		return true
	}
	if p.track.Load() != nil {
		return p.chooseGoodbye(&l.flow, f)
	}
	if first && !p.outbox.grants.Empty() {
		*f = p.outbox.grants.Pop()
		return true
	}
	if first {
		ok, parts := p.outbox.announce(&p.credit, len(p.lanes), f)
		if parts { // the bytes behind those of the announcement may be sent by now
			p.wakePartLanes(f.send.allowed - f.send.next)
		}
		if ok {
			return true
		}
	}
	if l.carriesParts() && p.outbox.nextPart(f) {
		return true
	}
	if first && p.credit.due() { // each frame returns credit to the peer, which needs it before the next message
		f.header.kind = frameBeat
		return true
	}
	return p.chooseGoodbye(&l.flow, f)
}

// chooseMessages selects the messages that a track sends, in the order of choose. mu is held.
func (p *pair) chooseMessages(f *outFrame) bool {
	if !p.outbox.grants.Empty() {
		*f = p.outbox.grants.Pop()
		return true
	}
	if ok, _ := p.outbox.announce(&p.credit, 1, f); ok || p.outbox.nextPart(f) {
		return true
	}
	if p.credit.due() {
		f.header.kind = frameBeat
		return true
	}
	return false
}

// chooseGoodbye selects the last frame of a flow, when it is time for it. mu is held.
func (p *pair) chooseGoodbye(s *flow, f *outFrame) bool {
	if !p.state.departing() || s.saidGoodbye {
		return false
	}
	s.saidGoodbye = true
	f.header.kind = frameGoodbye
	return true
}

// wakePartLanes wakes the writers of lanes that carry parts, as many as there are parts of that many bytes, in turn: on
// a long link each lane has its own window. Called by choose and accept; mu is held.
func (p *pair) wakePartLanes(bytes int) {
	for range p.lanes {
		if bytes <= 0 {
			return
		}
		p.turn = (p.turn + 1) % len(p.lanes)
		l := p.lanes[p.turn]
		if l.carriesParts() {
			l.wakeWriter()
			bytes -= p.outbox.chunk
		}
	}
}

// sealed notes that a lane does not need the memory of a frame any more. Called by lane.seal, with sealing held.
func (p *pair) sealed(f *outFrame) {
	if f.wire != nil { // a control message; wire.Told tells whether any are left
		f.wire.unsentControls.Add(-1)
	}
	if f.send == nil { // neither an announcement nor a part
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	f.send.sealed() // after its last part, the send is complete
}

// receiveFrame takes a frame whose header has come, with its payload. Called by lane.readFrames, without locks.
func (p *pair) receiveFrame(l *lane, h *header) error {
	if err := l.check(h); err != nil {
		return err
	}
	in, target, err := p.accept(&l.flow, h)
	if err != nil {
		return err
	}
	if h.kind == frameControl {
		err = p.control(l, h)
	} else {
		err = l.payload(in, target, h.length)
	}
	if err != nil {
		return err
	}
	if p.finish(&l.flow, in, h) {
		p.write()
	}
	return nil
}

// accept takes a frame without its payload, and returns where that goes: nil if there is none, or
// nobody wants it. Called by receiveFrame.
func (p *pair) accept(s *flow, h *header) (in *incoming, target []byte, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.credit.restore(h.credit); err != nil {
		return nil, nil, err
	}
	switch h.kind {
	case frameAnnouncement:
		in, err = p.announcement(h)
		p.inbox.changed.Broadcast()
	case framePart:
		in, err = p.awaitAnnouncement(s, h.message)
	case frameGrant:
		var ready bool
		ready, err = p.outbox.grant(h.message)
		if ready {
			p.wakePartLanes(p.outbox.chunk * len(p.lanes))
		}
	case frameGoodbye:
		s.heardGoodbye = true
		p.goodbyes++
		if p.goodbyes == p.flows() {
			p.peerLeaves()
		}
	case frameGoodbyeAck:
		if !p.state.departing() {
			return nil, nil, errors.New("an answer to a goodbye that nobody has said")
		}
		notify(p.acknowledged)
	}
	if in == nil || err != nil {
		return nil, nil, err
	}
	if h.length == 0 {
		p.arrived(in, h) // completes the receive, if this was all of its message
		return nil, nil, nil
	}
	target, err = in.target(h)
	s.reading = in
	return in, target, err
}

// awaitAnnouncement returns the message with that number, nil if nobody wants it. Its announcement comes over
// the first lane, so on another one its parts may be earlier. Called by accept; mu is held, but not while it waits.
func (p *pair) awaitAnnouncement(s *flow, message uint64) (*incoming, error) {
	for message > p.inbox.announced && p.gone == nil && len(p.lanes) > 1 {
		if s == &p.lanes[0].flow || p.track.Load() != nil { // which keep the order
			break
		}
		p.inbox.changed.Wait()
	}
	if message > p.inbox.announced {
		return nil, fmt.Errorf("a part of message %d, of which %d were announced", message, p.inbox.announced)
	}
	return p.inbox.incomplete[message], nil
}

// finish ends the frame that accept began, and reports whether there is something to send because of it.
// Called by receiveFrame.
func (p *pair) finish(s *flow, in *incoming, h *header) (sends bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.reading = nil
	if in != nil {
		p.arrived(in, h)
	}
	announces := h.credit > 0 && !p.outbox.waiting.Empty() // a send that waits for credit may have it now
	// A grant makes parts of a send ready. Lanes have been woken for them; a track has no writers to wake.
	parts := p.track.Load() != nil && !p.outbox.ready.Empty()
	return announces || parts || p.urgent()
}

// urgent reports whether there is something to send that does not wait for messages. mu is held.
func (p *pair) urgent() bool {
	return !p.outbox.grants.Empty() || p.credit.due() || p.track.Load() == nil && !p.outbox.urgent.Empty()
}

// control takes a control message. Called by receiveFrame.
func (p *pair) control(l *lane, h *header) error {
	message := make([]byte, h.length)
	if _, err := io.ReadFull(l.secure, message); err != nil {
		return err
	}
	if w := p.node.wire(h.communicator); w != nil && w.place[p.rank] >= 0 { // the peer is in this communicator
		// The engine hears it: a status report (h.report), or another message.
		w.keepControl(int(w.place[p.rank]), h.report, message)
	}
	return nil
}

// send queues a message, which the next write announces. To this rank itself it is delivered. Called by
// wire.Post, with the engine's lock held.
func (p *pair) send(w *wire, id int, tag uint64, address uintptr, bytes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	o := sends.Get().(*outgoing) // sends and receives are pools
	o.wire = w
	o.id = id
	o.tag = tag
	o.address = address
	o.total = bytes
	if p.rank == p.node.rank {
		p.deliver(o)
		return
	}
	p.outbox.waiting.Push(o)
}

// deliver takes a message to this rank itself. Its memory is the early memory. Called by send; mu is held.
func (p *pair) deliver(o *outgoing) {
	in := receives.Get().(*incoming)
	in.wire = o.wire
	in.source = o.wire.rank
	in.tag = o.tag
	in.total = o.total
	in.eager = o.total
	in.got = o.total
	in.gotEager = o.total
	in.memory = hostmem.Slice[byte](o.address, o.total)
	in.local = o
	p.match(in)   // finds the receive, or keeps the message until that is posted
	p.advance(in) // copies the message if the receive is there, and completes both
}

// post posts a receive, and reports whether there is something urgent to send now. Called by wire.Post, with the
// engine's lock held.
func (p *pair) post(w *wire, source int, r posted) (urgent bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := &w.matchers[source] // the messages and receives that wait for each other, by tag
	if in, ok := m.messages.Pop(r.tag); ok {
		p.assign(in, r) // from now on the message goes into the memory of the receive
		p.advance(in)
	} else {
		m.receives.Push(r.tag, r)
	}
	return len(p.lanes) > 0 && p.urgent()
}

// forget drops everything of a communicator: data that still comes for it is discarded. When it returns, nobody
// touches the memory of its messages. Called by wire.Abandon, with the engine's lock held or after the engine's end.
func (p *pair) forget(w *wire, source int) {
	p.mu.Lock()
	m := &w.matchers[source]
	for in := range m.messages.All {
		p.drop(in)
	}
	*m = matcher{}
	for _, in := range p.inbox.incomplete {
		if in.wire == w {
			p.drop(in)
		}
	}
	for _, l := range p.lanes {
		p.dropReading(&l.flow, w)
	}
	t := p.track.Load()
	if t != nil {
		p.dropReading(&t.flow, w)
	}
	p.outbox.drop(w)
	p.mu.Unlock()
	for _, l := range p.lanes {
		awaitUnlock(&l.sealing)
		awaitUnlock(&l.filling)
	}
	if t != nil {
		awaitUnlock(&t.sealing)
		awaitUnlock(&t.filling)
	}
}

// dropReading drops the message whose payload a flow reads, if it is of a communicator: it may be a whole message, no
// longer in incomplete. Called by forget; mu is held.
func (p *pair) dropReading(s *flow, w *wire) {
	if in := s.reading; in != nil && in.wire == w {
		p.drop(in)
	}
}

// awaitUnlock returns when whoever holds a lock has given it back.
func awaitUnlock(m *sync.Mutex) {
	m.Lock()
	defer m.Unlock()
}
