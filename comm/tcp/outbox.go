package tcp

import (
	"fmt"
	"sync"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/queue"
)

// outbox is the send side of a pair. A send passes through it:
//
//	waiting ──announce──► ready ──parts──► sent              all of it is eager
//	waiting ──announce──► ready ──parts──► ungranted ──grant──► ready ──parts──► sent
//
// An announcement carries the beginning of the message. A send whose eager part it carries whole is not
// ready before the grant. The pair's mu guards an outbox; its methods expect it held.
type outbox struct {
	chunk     int                  // the most payload of a frame, in bytes
	urgent    queue.Of[outFrame]   // frames that go before all messages
	grants    queue.Of[outFrame]   // likewise, beside the messages
	waiting   queue.Of[*outgoing]  // sends that are not announced, in the order of Post
	ready     queue.Of[*outgoing]  // announced sends whose next part may be sent
	ungranted map[uint64]*outgoing // announced sends that wait for a grant, by number
	announced uint64               // number of the message that was announced last, 0 for none
}

// outFrame is a frame to be sent.
type outFrame struct {
	header  header    // but for length and credit, which pair.fill sets
	payload []byte    // nil without one
	send    *outgoing // of an announcement or a part
	wire    *wire     // of a control message
}

// outgoing is a send.
type outgoing struct {
	wire    *wire   // of the communicator that sends
	id      int     // of the engine
	tag     uint64  // of the wire
	number  uint64  // in the order of announcements; 0 before
	address uintptr // of its memory
	total   int     // bytes
	eager   int     // bytes that are sent without a grant
	allowed int     // bytes that may be sent by now: the eager ones, or all
	next    int     // where the next part begins
	sealing int     // parts in the hands of lanes
	dropped bool    // its communicator has aborted or closed: no more is sent
}

// sends has sends that are done, for the next ones.
var sends = sync.Pool{New: func() any { return new(outgoing) }}

// announce makes the announcement of the next waiting send, if there is one and credit for it. parts
// says that more of the message may be sent now. Called by pair.choose.
func (b *outbox) announce(c *credit, lanes int, f *outFrame) (ok, parts bool) {
	for !b.waiting.Empty() && b.waiting.First().dropped {
		b.waiting.Pop()
	}
	if b.waiting.Empty() {
		return false, false
	}
	o := b.waiting.First()
	eager, ok := c.spend(o.total)
	if !ok {
		return false, false
	}
	b.waiting.Pop()
	b.announced++
	o.number = b.announced
	o.eager = eager
	o.allowed = eager
	f.header = header{
		kind:         frameAnnouncement,
		communicator: o.wire.id,
		tag:          o.tag,
		total:        uint64(o.total),
		eager:        uint64(eager),
	}
	first := min(eager, b.chunk)
	if lanes > 1 && (first < eager || lanes > parallelLanes) && first > recordBytes-headerBytes {
		first = 0 // the other lanes carry it
	}
	o.addPart(f, first)
	if eager < o.total {
		b.ungranted[o.number] = o
	}
	parts = o.next < o.allowed
	if parts {
		b.ready.Push(o)
	}
	return true, parts
}

// nextPart makes the next part of the first send that is ready, if there is one. Called by pair.choose.
func (b *outbox) nextPart(f *outFrame) bool {
	for !b.ready.Empty() {
		o := b.ready.First()
		if o.dropped {
			b.ready.Pop()
			continue
		}
		end := o.allowed
		if o.next < o.eager {
			end = o.eager // the receiver may have the parts of an early message in other memory
		}
		f.header = header{kind: framePart, message: o.number, offset: uint64(o.next)}
		o.addPart(f, min(end-o.next, b.chunk))
		if o.next == o.allowed {
			b.ready.Pop()
		}
		return true
	}
	return false
}

// addPart makes the next n bytes of a send the payload of a frame. Called by announce and nextPart; mu is held.
func (o *outgoing) addPart(f *outFrame, n int) {
	f.send = o
	f.payload = hostmem.Slice[byte](o.address+uintptr(o.next), n)
	o.next += n
	o.sealing++
}

// grant lets all of a send go. ready says that its parts wait for a lane now. Called by pair.accept.
func (b *outbox) grant(number uint64) (ready bool, err error) {
	if number == 0 || number > b.announced {
		return false, fmt.Errorf("a grant for message %d, of which %d were announced", number, b.announced)
	}
	o := b.ungranted[number]
	if o == nil {
		return false, nil
	}
	delete(b.ungranted, number)
	ready = o.next == o.allowed // otherwise it is in the queue
	if ready {
		b.ready.Push(o)
	}
	o.allowed = o.total
	return ready, nil
}

// sealed notes that a lane does not need the memory of a part any more. Called by pair.sealed.
func (o *outgoing) sealed() {
	o.sealing--
	if o.next < o.total || o.sealing > 0 || o.dropped {
		return
	}
	o.wire.complete(o.id, o.total)
	*o = outgoing{}
	sends.Put(o)
}

// drop forgets the sends of a communicator. Called by pair.forget.
func (b *outbox) drop(w *wire) {
	for _, list := range []*queue.Of[*outgoing]{&b.waiting, &b.ready} {
		for _, o := range list.All() {
			if o.wire == w {
				o.dropped = true
			}
		}
	}
	for number, o := range b.ungranted {
		if o.wire == w {
			o.dropped = true
			delete(b.ungranted, number)
		}
	}
}
