package tcp

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/queue"
)

// inbox is the receive side of a pair: the messages of which something is still to come. Messages and
// receives that have not met are in the matchers of their communicators. The pair's mu guards an inbox,
// its messages, and the matchers of its rank.
type inbox struct {
	chunk      int                  // the most payload of a frame, in bytes
	announced  uint64               // number of the message that the peer announced last, 0 for none
	incomplete map[uint64]*incoming // announced messages that have not come whole, by number
	changed    sync.Cond            // a message was announced, or the peer cannot be reached any more
}

// placement says where the bytes of a message go.
//
//	          its receive is posted        the eager part is copied
//	early ────────────────────────► staged ────────────────────────► direct
//
// A message whose receive is posted when it is announced is direct from the beginning.
type placement uint8

const (
	early  placement = iota // no receive is posted: the eager part goes to memory of this package
	staged                  // a receive is posted; the eager part still goes to that memory, and is copied
	direct                  // all goes to the memory of the receive, if the message is not dropped
)

// incoming is a message that was announced.
type incoming struct {
	wire   *wire  // of the communicator that it is for
	source int    // rank of the communicator
	tag    uint64 // of the wire
	number uint64 // in the order of announcements; 0 of a message to oneself
	total  int    // bytes
	eager  int    // bytes that come without a grant
	first  int    // bytes that come with the announcement
	chunk  int    // bytes of a part, or fewer

	placement placement // where the eager part is
	receive   posted    // unless it is early
	memory    []byte    // of the eager part, while the message is early or staged
	room      *[]byte   // what memory is a part of; nil of a message to oneself
	local     *outgoing // of a message to oneself, its send, whose memory is read

	parts    []uint64 // a bit for each part behind the announcement that has come, or whose payload is being read
	got      int      // bytes that have come
	gotEager int      // of these, bytes of the eager part

	dropped atomic.Bool // what comes of it is discarded; set with mu held, read by lanes with filling held
}

// posted is a receive.
type posted struct {
	id      int     // of the engine
	tag     uint64  // of the wire
	address uintptr // of its memory
	room    int     // bytes; a longer message is an error
}

// matcher has the messages and receives of a rank of a communicator that have not met, by tag.
type matcher struct {
	receives queue.Keyed[posted]    // without a message
	messages queue.Keyed[*incoming] // without a receive
}

// receives and rooms have what messages were made of, for the next ones: rooms are memory for early messages,
// by the logarithm of its size.
var (
	receives = sync.Pool{New: func() any { return new(incoming) }}
	rooms    [32]sync.Pool
)

// roomClass is the index in rooms of memory for n bytes, n > 0.
func roomClass(n int) int { return bits.Len(uint(n - 1)) }

// roomFor returns memory for n bytes, n > 0: a power of two, so that less than half of it is unused.
func roomFor(n int) *[]byte {
	class := roomClass(n)
	if room := rooms[class].Get(); room != nil {
		return room.(*[]byte)
	}
	room := make([]byte, 1<<class)
	return &room
}

// announcement takes the announcement of a message. It returns nil if nobody wants what comes of it: its
// communicator is closed, or it is longer than its receive. Called by pair.accept; mu is held.
func (p *pair) announcement(h *header) (*incoming, error) {
	if h.total > math.MaxInt32 || h.eager > min(h.total, uint64(p.credit.window)) ||
		!p.credit.covers(int(h.eager)) || uint64(h.length) > h.eager {
		return nil, fmt.Errorf("a message of %d bytes, %d of them early, for which it has no credit", h.total, h.eager)
	}
	eager := int(h.eager)
	p.inbox.announced++
	p.credit.charge(eager)
	w := p.node.wire(h.communicator)
	if w == nil || w.place[p.rank] < 0 {
		p.credit.free(eager)
		return nil, nil
	}
	in := receives.Get().(*incoming)
	in.wire = w
	in.source = int(w.place[p.rank])
	in.tag = h.tag
	in.number = p.inbox.announced
	in.total = int(h.total)
	in.eager = eager
	in.first = h.length
	in.chunk = p.inbox.chunk
	in.placement = direct // nothing of it has come
	if p.match(in) {
		p.credit.free(eager)
	} else {
		in.placement = early
		in.allocate()
	}
	if in.dropped.Load() {
		return nil, nil
	}
	if in.total > h.length {
		p.inbox.incomplete[in.number] = in
	}
	return in, nil
}

// allocate makes the memory for the eager part of a message. Called by announcement; mu is held.
func (in *incoming) allocate() {
	if in.eager > 0 {
		in.room = roomFor(in.eager)
		in.memory = (*in.room)[:in.eager]
	}
}

// match gives a message to its receive, or keeps it until that is posted. Called by announcement and
// deliver; mu is held.
func (p *pair) match(in *incoming) bool {
	m := &in.wire.matchers[in.source]
	r, ok := m.receives.Pop(in.tag)
	if !ok {
		m.messages.Push(in.tag, in)
		return false
	}
	p.assign(in, r)
	return true
}

// assign gives a message to a receive, and grants the rest of it. Called by match and post; mu is held.
func (p *pair) assign(in *incoming, r posted) {
	if in.total > r.room {
		p.drop(in)
		in.wire.complete(r.id, in.total)
		return
	}
	in.receive = r
	if in.placement == early {
		in.placement = staged
	}
	if in.eager < in.total {
		p.outbox.grants.Push(outFrame{header: header{kind: frameGrant, message: in.number}})
	}
}

// arrived notes that the payload of a frame is in its place. Called by finish and accept; mu is held.
func (p *pair) arrived(in *incoming, h *header) {
	in.got += h.length
	if h.kind == frameAnnouncement || int(h.offset) < in.eager {
		in.gotEager += h.length
	}
	p.advance(in)
}

// advance copies the eager part of a message to its receive when both are there, and completes the receive
// when all is. Called by arrived, deliver and post; mu is held.
func (p *pair) advance(in *incoming) {
	if in.placement == early || in.dropped.Load() {
		return
	}
	if in.placement == staged && in.gotEager == in.eager {
		copy(hostmem.Slice[byte](in.receive.address, in.eager), in.memory)
		p.release(in)
	}
	if in.placement == direct && in.got == in.total {
		in.wire.complete(in.receive.id, in.total)
		delete(p.inbox.incomplete, in.number)
		*in = incoming{parts: in.parts[:0]}
		receives.Put(in)
	}
}

// release gives the memory of the eager part back, and its credit. Called by advance and drop; mu is held.
func (p *pair) release(in *incoming) {
	if o := in.local; o != nil {
		o.wire.complete(o.id, o.total)
	} else {
		p.credit.free(in.eager)
	}
	if in.room != nil && in.gotEager == in.eager { // otherwise a lane may write to it
		rooms[roomClass(in.eager)].Put(in.room)
	}
	in.placement = direct
	in.memory = nil
	in.room = nil
	in.local = nil
}

// drop forgets a message. Its data is discarded. Called by assign and forget; mu is held.
func (p *pair) drop(in *incoming) {
	in.dropped.Store(true)
	if in.placement != direct && in.local == nil {
		p.release(in)
	}
	delete(p.inbox.incomplete, in.number)
}

// target returns the memory for the payload of a frame. No other frame's goes there from then on. Called
// by pair.accept; mu is held.
func (in *incoming) target(h *header) ([]byte, error) {
	offset := 0
	if h.kind == framePart {
		if err := in.reserve(h.offset, h.length); err != nil {
			return nil, err
		}
		offset = int(h.offset)
	}
	if offset < in.eager && in.memory != nil {
		return in.memory[offset : offset+h.length], nil
	}
	if in.placement == early {
		return nil, errors.New("a part of a message that was not granted")
	}
	return hostmem.Slice[byte](in.receive.address+uintptr(offset), h.length), nil
}

// reserve notes that a part of a message is coming. Behind what the announcement carries, the eager bytes and then the
// others come in parts of chunk bytes, and the last of either may be shorter. A part of another length or at another
// place is refused, and so is one that has come before. Called by target; mu is held.
func (in *incoming) reserve(offset uint64, length int) error {
	number, ok := in.partAt(offset, length)
	if !ok {
		return fmt.Errorf("%d bytes at %d of a message of %d", length, offset, in.total)
	}
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

// partAt returns the number of the part that begins at an offset, if it has that length. Called by reserve; mu is held.
func (in *incoming) partAt(offset uint64, length int) (number int, ok bool) {
	if offset >= uint64(in.total) {
		return 0, false
	}
	start := int(offset)
	begin := in.first // of the eager parts behind the announcement's
	end := in.eager
	if start >= in.eager {
		number = (in.eager - in.first + in.chunk - 1) / in.chunk
		begin = in.eager
		end = in.total
	}
	if start < begin || (start-begin)%in.chunk != 0 || length != min(in.chunk, end-start) {
		return 0, false
	}
	return number + (start-begin)/in.chunk, true
}
