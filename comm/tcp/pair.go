package tcp

import (
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/queue"
)

// pair is what this rank shares with another one, or with itself: the connections, the messages
// on their way, and the credit for those that come before their receives.
//
// The first lane carries what is short: announcements of messages, and everything urgent. If
// there are others, these carry the rest of the messages. A message is announced with the
// length of its eager part, which comes at once and which the receiver has memory for. The rest
// comes when the receive is there and has granted it. So other messages arrive
// while a long one waits, and the window bounds the memory for early ones and the number of announcements.
type pair struct {
	node  *node
	rank  int     // of the other one in the world
	lanes []*lane // by number, nil for those that have not come; of the connector until all have
	dead  chan struct{}
	seen  chan struct{} // the other one has seen the goodbyes
	heard atomic.Int64  // tick of the node at which something has come

	attempt uint64        // of the connector, that made the lanes
	trouble error         // of the last one
	again   chan struct{} // the lanes were lost

	mu        sync.Mutex
	announced sync.Cond // a message was announced, or the pair is gone
	gone      error     // why it cannot be reached
	window    int       // bytes of early messages
	leaving   bool      // this rank has left: the lanes say goodbye
	byes      int       // lanes on which the other one has said goodbye
	spoke     bool      // since the last tick

	urgent   queue.Of[sending] // goes before all messages
	announce queue.Of[*outgoing]
	flow     queue.Of[*outgoing]  // announced, and the next part may be sent
	held     map[uint64]*outgoing // announced, and not granted
	sent     uint64               // number of the message announced last
	credit   int                  // bytes that may be sent eagerly

	incoming map[uint64]*incoming // announced, and not complete
	received uint64               // number of the message that was announced last
	lent     int                  // credit that the other rank has used
	owed     int                  // of this, to give back

}

// messageBytes is the credit that an announcement takes beside its eager part, so that
// messages without data are bounded as well.
const messageBytes = 256

// sending is a frame that is sent.
type sending struct {
	header  header
	payload []byte
	out     *outgoing // of a part of a message
	wire    *wire     // of a control message
}

// outgoing is a send.
type outgoing struct {
	wire                  *wire
	id                    int // of the engine
	tag, number           uint64
	address               uintptr
	total, eager, allowed int
	next                  int  // where the next part begins
	sealing               int  // parts that are being sealed
	dropped               bool // nobody waits for it any more
}

// incoming is a message that was announced.
type incoming struct {
	wire          *wire
	from          int // rank of the communicator
	tag, number   uint64
	total, eager  int
	first         int      // bytes that come with the announcement
	parts         []uint64 // a bit for each part behind these that has come or is coming
	got, gotEager int
	waits         bool      // for its receive, or for the rest of its eager part
	early         []byte    // the eager part, if it comes before the receive
	room          *[]byte   // the memory of that
	local         *outgoing // of a message to oneself, the send, whose memory is early
	matched       bool
	to            posted // once matched
	dropped       atomic.Bool
}

// posted is a receive.
type posted struct {
	id      int // of the engine
	tag     uint64
	address uintptr
	room    int
}

// box has the messages and receives of a rank of a communicator that have not met.
type box struct {
	posted []posted
	early  []*incoming
}

func newPair(n *node, rank int) *pair {
	p := &pair{node: n, rank: rank, dead: make(chan struct{}), seen: make(chan struct{}, 1), again: make(chan struct{}, 1), held: map[uint64]*outgoing{}, incoming: map[uint64]*incoming{}}
	p.announced.L = &p.mu
	return p
}

// next finds what a lane sends next.
func (p *pair) next(l *lane, f *sending) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case l.index == 0 && !p.urgent.Empty():
		*f = p.urgent.Pop()
	case l.index == 0 && p.nextAnnouncement(f), (l.index > 0 || len(p.lanes) == 1) && p.nextPart(f):
	case l.index == 0 && p.owes():
		f.header.kind = frameBeat
	case p.leaving && !l.byed:
		f.header.kind, l.byed = frameBye, true
	default:
		return false
	}
	f.header.credit, p.spoke = uint64(p.owed), true
	p.lent, p.owed = p.lent-p.owed, 0
	f.header.length = len(f.payload)
	return true
}

func (p *pair) nextAnnouncement(f *sending) bool {
	for !p.announce.Empty() && p.announce.First().dropped {
		p.announce.Pop()
	}
	if p.announce.Empty() || p.credit < messageBytes {
		return false
	}
	o := p.announce.Pop()
	p.sent++
	// A sixteenth is left for the announcements of others, of which one may be received first.
	o.number, o.eager = p.sent, min(o.total, max(0, p.credit-messageBytes-p.window/16))
	p.credit -= messageBytes + o.eager
	o.allowed = o.eager
	f.header = header{kind: frameMessage, id: o.wire.id, tag: o.tag, total: uint64(o.total), eager: uint64(o.eager)}
	first := min(o.eager, chunkBytes)
	if len(p.lanes) > 1 && first > recordBytes-headerBytes {
		first = 0
	}
	p.part(f, o, first)
	if o.eager < o.total {
		p.held[o.number] = o
	}
	if o.next < o.allowed {
		p.flow.Push(o)
		p.rouse()
	}
	return true
}

func (p *pair) nextPart(f *sending) bool {
	for !p.flow.Empty() {
		o := p.flow.First()
		if !o.dropped {
			end := o.allowed
			if o.next < o.eager {
				end = o.eager // the parts of an early message lie in other memory
			}
			f.header = header{kind: frameData, id: o.number, tag: uint64(o.next)}
			p.part(f, o, min(end-o.next, chunkBytes))
		}
		if o.dropped || o.next == o.allowed {
			p.flow.Pop()
		}
		if !o.dropped {
			return true
		}
	}
	return false
}

// part adds the next n bytes of a message to a frame.
func (p *pair) part(f *sending, o *outgoing, n int) {
	f.out, f.payload = o, hostmem.Slice[byte](o.address+uintptr(o.next), n)
	o.next += n
	o.sealing++
}

// rouse has the writers of the lanes look that carry the parts of messages.
func (p *pair) rouse() {
	for _, l := range p.lanes[min(1, len(p.lanes)-1):] {
		l.rouse()
	}
}

// sealed notes that a frame's memory is not needed any more.
func (p *pair) sealed(f *sending) {
	if f.wire != nil {
		f.wire.untold.Add(-1)
	}
	o := f.out
	if o == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if o.sealing--; o.next == o.total && o.sealing == 0 && !o.dropped {
		o.wire.complete(o.id, o.total)
		*o = outgoing{}
		sends.Put(o)
	}
}

// arrived takes a frame whose header has come, with its payload.
func (p *pair) arrived(l *lane, h *header) error {
	if err := l.check(h); err != nil {
		return err
	}
	in, to, err := p.accept(l, h)
	switch {
	case err != nil:
	case h.kind == frameControl:
		err = p.control(l, h)
	default:
		err = l.payload(in, to, h.length)
	}
	if err != nil {
		return err
	}
	p.mu.Lock()
	if l.taking = nil; in != nil {
		p.took(in, h)
	}
	sends := p.owes() || !p.urgent.Empty() || h.credit > 0 && !p.announce.Empty()
	p.mu.Unlock()
	if sends {
		p.lanes[0].write(true)
	}
	return nil
}

// accept takes a frame without its payload, and returns where that goes: nil if there is none, or
// nobody wants it.
func (p *pair) accept(l *lane, h *header) (in *incoming, to []byte, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if h.credit > uint64(p.window-p.credit) {
		return nil, nil, fmt.Errorf("a credit of %d bytes, of which it has %d", h.credit, p.window-p.credit)
	}
	p.credit += int(h.credit)
	switch h.kind {
	case frameMessage:
		in, err = p.receive(h)
		p.announced.Broadcast()
	case frameData:
		for h.id > p.received && p.gone == nil && len(p.lanes) > 1 {
			p.announced.Wait()
		}
		if h.id > p.received {
			return nil, nil, fmt.Errorf("a part of message %d, of which %d were announced", h.id, p.received)
		}
		in = p.incoming[h.id]
	case frameGrant:
		if h.id == 0 || h.id > p.sent {
			return nil, nil, fmt.Errorf("a grant for message %d, of which %d were announced", h.id, p.sent)
		}
		if o := p.held[h.id]; o != nil {
			delete(p.held, h.id)
			if o.next == o.allowed { // otherwise it is in the queue
				p.flow.Push(o)
				p.rouse()
			}
			o.allowed = o.total
		}
	case frameBye:
		l.left = true
		if p.byes++; p.byes == len(p.lanes) {
			p.urgent.Push(sending{header: header{kind: frameSeen}})
			p.lanes[0].rouse()
			p.lose(errLeft)
		}
	case frameSeen:
		if !p.leaving {
			return nil, nil, errors.New("an answer to a goodbye that nobody has said")
		}
		poke(p.seen)
	}
	if in == nil || err != nil {
		return nil, nil, err
	}
	if h.length == 0 {
		p.took(in, h)
		return nil, nil, nil
	}
	to, err = in.memory(h)
	l.taking = in
	return in, to, err
}

// receive takes the announcement of a message, nil if its communicator is closed.
func (p *pair) receive(h *header) (*incoming, error) {
	if h.total > math.MaxInt32 || h.eager > min(h.total, uint64(p.window)) || messageBytes+int(h.eager) > p.window-p.lent || uint64(h.length) > h.eager {
		return nil, fmt.Errorf("a message of %d bytes, %d of them early, for which it has no credit", h.total, h.eager)
	}
	p.received++
	p.lent += messageBytes + int(h.eager)
	w := p.node.wire(h.id)
	if w == nil || w.place[p.rank] < 0 {
		p.owed += messageBytes + int(h.eager)
		return nil, nil
	}
	in := receives.Get().(*incoming)
	in.wire, in.from, in.tag, in.number, in.total, in.eager = w, int(w.place[p.rank]), h.tag, p.received, int(h.total), int(h.eager)
	in.first = h.length
	if in.waits = !p.meet(in); !in.waits { // and nothing of it has come, so that it is still here
		p.owed += messageBytes + in.eager
	} else if in.eager > 0 {
		in.room = roomFor(in.eager)
		in.early = (*in.room)[:in.eager]
	}
	if in.dropped.Load() {
		return nil, nil
	}
	if in.total > h.length {
		p.incoming[in.number] = in
	}
	return in, nil
}

// meet gives a message to its receive, or keeps it until that is posted.
func (p *pair) meet(in *incoming) bool {
	b := &in.wire.boxes[in.from]
	r, ok := pick(&b.posted, func(r posted) bool { return r.tag == in.tag })
	if ok {
		p.match(in, r)
	} else {
		b.early = append(b.early, in)
	}
	return ok
}

// match gives a message to a receive.
func (p *pair) match(in *incoming, r posted) {
	in.matched, in.to = true, r
	if in.total > r.room {
		p.drop(in)
		in.wire.complete(r.id, in.total)
		return
	}
	if in.eager < in.total {
		p.urgent.Push(sending{header: header{kind: frameGrant, id: in.number}})
	}
}

// settle moves on with a message.
func (p *pair) settle(in *incoming) {
	if !in.matched || in.dropped.Load() {
		return
	}
	if in.waits && in.gotEager == in.eager {
		copy(hostmem.Slice[byte](in.to.address, in.eager), in.early)
		p.giveBack(in)
	}
	if in.got == in.total && !in.waits {
		in.wire.complete(in.to.id, in.total)
		delete(p.incoming, in.number)
		*in = incoming{parts: in.parts[:0]}
		receives.Put(in)
	}
}

// giveBack gives the memory of an early message back, and its credit.
func (p *pair) giveBack(in *incoming) {
	if o := in.local; o != nil {
		o.wire.complete(o.id, o.total)
	} else {
		p.owed += messageBytes + in.eager
	}
	if in.room != nil && in.gotEager == in.eager { // otherwise it may be written to
		rooms[bits.Len(uint(in.eager-1))].Put(in.room)
	}
	in.waits, in.early, in.room, in.local = false, nil, nil, nil
}

// drop forgets a message. What comes of it later is lost.
func (p *pair) drop(in *incoming) {
	in.dropped.Store(true)
	if in.waits && in.local == nil {
		p.giveBack(in)
	}
	delete(p.incoming, in.number)
}

// memory is where the payload of a frame goes. Nothing else goes there from then on.
func (in *incoming) memory(h *header) ([]byte, error) {
	from := 0
	if h.kind == frameData {
		if err := in.reserve(h.tag, h.length); err != nil {
			return nil, err
		}
		from = int(h.tag)
	}
	switch {
	case from < in.eager && in.early != nil:
		return in.early[from : from+h.length], nil
	case !in.matched:
		return nil, errors.New("a part of a message that was not granted")
	}
	return hostmem.Slice[byte](in.to.address+uintptr(from), h.length), nil
}

// reserve notes that a part of a message is coming. Behind what the announcement carries, the eager bytes and then the
// others come in parts of chunkBytes, and the last of either may be shorter. A part of another length or at another
// place is refused, and so is one that has come before.
func (in *incoming) reserve(offset uint64, length int) error {
	if offset >= uint64(in.total) {
		return fmt.Errorf("%d bytes at %d of a message of %d", length, offset, in.total)
	}
	from := int(offset)
	begin, end := in.first, in.eager
	number := 0 // of the first part from begin on
	if from >= in.eager {
		number = (in.eager - in.first + chunkBytes - 1) / chunkBytes
		begin, end = in.eager, in.total
	}
	if from < begin || (from-begin)%chunkBytes != 0 || length != min(chunkBytes, end-from) {
		return fmt.Errorf("%d bytes at %d of a message of %d", length, offset, in.total)
	}
	number += (from - begin) / chunkBytes
	word := number / 64
	bit := uint64(1) << (number % 64)
	for len(in.parts) <= word {
		in.parts = append(in.parts, 0)
	}
	if in.parts[word]&bit != 0 {
		return fmt.Errorf("%d bytes at %d of a message of %d twice", length, offset, in.total)
	}
	in.parts[word] |= bit
	return nil
}

// took notes that the payload of a frame is in its place.
func (p *pair) took(in *incoming, h *header) {
	in.got += h.length
	if h.kind == frameMessage || int(h.tag) < in.eager {
		in.gotEager += h.length
	}
	p.settle(in)
}

// sends, receives and rooms have what messages were made of, for the next ones: rooms are memory for early messages,
// by the logarithm of its size.
var (
	sends    = sync.Pool{New: func() any { return new(outgoing) }}
	receives = sync.Pool{New: func() any { return new(incoming) }}
	rooms    [32]sync.Pool
)

// roomFor returns memory for n bytes, n > 0: a power of two, so that less than half of it is unused.
func roomFor(n int) *[]byte {
	class := bits.Len(uint(n - 1))
	if room := rooms[class].Get(); room != nil {
		return room.(*[]byte)
	}
	room := make([]byte, 1<<class)
	return &room
}

// pick takes the first element out of a list that is wanted.
func pick[T any](list *[]T, wanted func(T) bool) (v T, ok bool) {
	i := slices.IndexFunc(*list, wanted)
	if i >= 0 {
		v = (*list)[i]
		*list = slices.Delete(*list, i, i+1)
	}
	return v, i >= 0
}

// send queues a message, whose first frame the next write announces. To this rank itself
// it is delivered.
func (p *pair) send(w *wire, id int, tag uint64, address uintptr, bytes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	o := sends.Get().(*outgoing)
	o.wire, o.id, o.tag, o.address, o.total = w, id, tag, address, bytes
	if p.rank != p.node.rank {
		p.announce.Push(o)
		return
	}
	in := receives.Get().(*incoming)
	in.wire, in.from, in.tag, in.total, in.eager, in.got, in.gotEager = w, w.rank, tag, bytes, bytes, bytes, bytes
	in.waits, in.early, in.local = true, hostmem.Slice[byte](address, bytes), o
	p.meet(in)
	p.settle(in)
}

// post posts a receive, and reports whether there is something urgent to send now.
func (p *pair) post(w *wire, from int, r posted) (urgent bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := &w.boxes[from]
	if in, ok := pick(&b.early, func(in *incoming) bool { return in.tag == r.tag }); ok {
		p.match(in, r)
		p.settle(in)
	} else {
		b.posted = append(b.posted, r)
	}
	return len(p.lanes) > 0 && (!p.urgent.Empty() || p.owes())
}

// owes reports whether the other rank needs the credit back now: a fourth of it, or anything if it has none to
// announce a message.
func (p *pair) owes() bool {
	return p.owed > 0 && (p.owed >= p.window/4 || p.window-p.lent < messageBytes)
}

// forget drops everything of a communicator. When it returns, nobody touches the memory of its
// messages.
func (p *pair) forget(w *wire, from int) {
	p.mu.Lock()
	b := &w.boxes[from]
	for _, in := range b.early {
		p.drop(in)
	}
	*b = box{}
	for _, in := range p.incoming {
		if in.wire == w {
			p.drop(in)
		}
	}
	for _, l := range p.lanes {
		if in := l.taking; in != nil && in.wire == w { // perhaps all of its message
			p.drop(in)
		}
	}
	for _, list := range []*queue.Of[*outgoing]{&p.announce, &p.flow} {
		for _, o := range list.All() {
			o.dropped = o.dropped || o.wire == w
		}
	}
	for number, o := range p.held {
		if o.wire == w {
			o.dropped = true
			delete(p.held, number)
		}
	}
	p.mu.Unlock()
	for _, l := range p.lanes {
		pass(&l.sealing)
		pass(&l.touching)
	}
}

// pass waits for who holds a lock.
func pass(m *sync.Mutex) {
	m.Lock()
	defer m.Unlock()
}

// control takes a control message.
func (p *pair) control(l *lane, h *header) error {
	message := make([]byte, h.length)
	if _, err := io.ReadFull(l.secure, message); err != nil {
		return err
	}
	if w := p.node.wire(h.id); w != nil && w.place[p.rank] >= 0 {
		w.hear(int(w.place[p.rank]), h.report, message)
	}
	return nil
}

// errLeft says that the other rank's process has closed all its communicators.
var errLeft = errors.New("it left the job")

// lose notes that the other rank cannot be reached any more. The caller holds mu.
func (p *pair) lose(err error) {
	if p.gone == nil {
		p.gone = err
		p.announced.Broadcast()
		go p.node.signal() // not with mu held
	}
}

// fail ends the connections.
func (p *pair) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lose(fmt.Errorf("connection lost: %w", err))
	select {
	case <-p.dead:
	default:
		close(p.dead)
		p.hangUp()
	}
}

// hangUp closes the lanes.
func (p *pair) hangUp() {
	for _, l := range p.lanes {
		if l != nil {
			_ = l.link.Close()
		}
	}
}
