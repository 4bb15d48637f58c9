package engine

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// A list travels as one message, whose length follows from the number of entries that there is
// room for. Where all ranks know how long lists are, that is how long they are. Where lengths differ and
// the host may wait, they are sent first ([allgather.exchangeLengths]). Where the host is not to wait,
// because the device has its own streams, a list goes padded to its capacity, in a slot: a message
// with the list's length in front.
//
// This file alone knows how a message looks: indices, and behind them values; or, where values travel otherwise than as
// F32, what [kernel.Kernels].Encode makes of them. Such a message is sized by the most bytes that its entries may take,
// and where it is long and the host can look at it, sent as long as it is ([engine.travel]). Its list lies apart from
// it. Where a rank sends what others add up or keep, it unpacks its own messages as well, so that its list holds what
// they say. The loss of rounding is in its residual.

// unitOf returns the number of elements of a budget for a word, if messages have at least half of an equal share of k
// of n entries.
func unitOf(codec kernel.Codec, k, n, size int) unit {
	if codec == kernel.CodecNone {
		return 1
	}
	share := max(k/(2*size), 1)
	return unit(2 * base.WordSize * float64(share) / float64(codec.Bound(share, n)))
}

func (e *engine) unit() unit {
	return unitOf(e.codec, e.k, e.n, e.size)
}

// messageWords returns the length of the message of n entries with indices in a range of span, slotWords the length of
// a slot for n entries with any indices.
func (e *engine) messageWords(n, span int) int {
	switch {
	case n == 0:
		return 0
	case e.coded():
		return e.codec.Bound(n, span) / base.WordSize
	}
	return 2 * n
}

func (e *engine) slotWords(n int) int {
	return headerWords + e.messageWords(n, e.n)
}

// pack encodes a list with indices in a range of span as the message at p, unless the list is the message.
func (e *engine) pack(p uintptr, l kernel.Entries, span int) {
	if !e.coded() {
		e.copy(p, l.Idx, l.N)
		e.copy(base.At(p, l.N), l.Val, l.N)
		return
	}
	lost := kernel.Array{}
	if !e.cfg.NoErrorFeedback {
		lost = e.array(e.residual)
	}
	if e.err == nil && l.N > 0 {
		e.check(e.kernels.Encode(l, e.codec, span, e.encoded(p, l.N, span), lost))
	}
}

// unpack decodes the message at p to a list, unless the list is the message.
func (e *engine) unpack(l kernel.Entries, p uintptr, span int) {
	if !e.coded() {
		e.copy(l.Idx, p, l.N)
		e.copy(l.Val, base.At(p, l.N), l.N)
		return
	}
	e.decode(l, p, span)
	if e.order.Streams == nil {
		if n := e.word(e.address(numCount)); e.err == nil && l.N > 0 && n != l.N {
			e.err = fmt.Errorf("%w: a message of %d entries, which has %d", comm.ErrMismatch, l.N, n)
		}
	}
}

func (e *engine) decode(l kernel.Entries, p uintptr, span int) {
	if e.err == nil && l.N > 0 {
		l.Len = e.address(numCount) // the length before a slot may be larger
		e.check(e.kernels.Decode(e.encoded(p, l.N, span), e.codec, l))
	}
}

// word reads a word.
func (e *engine) word(p uintptr) int {
	e.do(func() error { return e.rt.CopyOut(e.length[:], p) })
	return int(binary.LittleEndian.Uint32(e.length[:]))
}

// encoded returns the message of n entries at p.
func (e *engine) encoded(p uintptr, n, span int) kernel.Message {
	return kernel.Message{Ptr: p, Bytes: e.messageWords(n, span) * base.WordSize}
}

// packSlot and unpackSlot are pack and unpack for a list in a slot, which has room for more than the list.
func (e *engine) packSlot(l kernel.Entries) {
	e.pack(base.At(l.Len, headerWords), l, e.n)
}
func (e *engine) unpackSlot(l kernel.Entries) {
	if p := base.At(l.Len, headerWords); e.coded() {
		e.decode(l, p, e.n)
	} else {
		e.unpack(l, p, e.n)
	}
}

// headWords is the length of a message's head. The second word is the message's length in bytes.
const headWords = 2

// mail is a set of messages in one piece of memory, in words: the room and the place of each, and the part to send.
type mail struct {
	ptr           uintptr // of the memory
	rooms, places []int   // words of each message's room, and its offset
	sizes, from   []int   // words to send next, and their offset
}

func newMail(n int) mail {
	ints := func() []int { return make([]int, n) }
	return mail{
		rooms:  ints(),
		places: ints(),
		sizes:  ints(),
		from:   ints(),
	}
}

// trims reports whether a message is sent in two parts, given the words of its room: its head, and then the rest up to
// its actual length. Senders and receivers decide alike.
func (e *engine) trims(room int) bool {
	return e.coded() && e.order.Streams == nil && room*base.WordSize >= e.cfg.tuning.TrimFrom
}

// travel calls move to send and receive messages: first all short ones and the heads of the others, then the rest.
func (e *engine) travel(move func(), all ...*mail) {
	for _, m := range all {
		copy(m.sizes, m.rooms)
		copy(m.from, m.places)
		for i, room := range m.rooms {
			if e.trims(room) {
				m.sizes[i] = headWords
			}
		}
	}
	move()
	long := false
	for _, m := range all {
		for i, room := range m.rooms {
			m.from[i] += m.sizes[i]
			m.sizes[i] = 0
			if e.trims(room) {
				m.sizes[i] = max(e.wordsOf(base.At(m.ptr, m.places[i]), room)-headWords, 0)
				long = true
			}
		}
	}
	if long {
		move()
	}
}

// wordsOf returns the length of the message at p, whose head has arrived.
func (e *engine) wordsOf(p uintptr, room int) int {
	bytes := e.word(base.At(p, 1))
	if e.err == nil && (bytes < headWords*base.WordSize || bytes > room*base.WordSize) {
		e.err = fmt.Errorf("%w: a message of %d bytes, which has at most %d", comm.ErrMismatch, bytes, room*base.WordSize)
	}
	if e.err != nil {
		return 0
	}
	return (bytes + base.WordSize - 1) / base.WordSize
}

// arriveAll decodes the lists of a result after it has arrived.
func (e *engine) arriveAll(ctx context.Context, r result) {
	e.arrive(ctx)
	for i, p := range r.messages {
		e.unpack(r.lists[i], p, e.n)
	}
}

// messageOf returns the address at which the message of a list is made or arrives: the list itself, if it is the
// message, and b otherwise.
func (e *engine) messageOf(b *base.Buffer, l kernel.Entries) uintptr {
	if !e.coded() && l.Val == base.At(l.Idx, l.N) {
		return l.Idx
	}
	e.allocate(b, e.messageWords(l.N, e.n)*base.WordSize)
	return b.Ptr
}

// listMemory returns memory of lists of n entries, if they are separate from messages.
func (e *engine) listMemory(b *base.Buffer, n int) uintptr {
	if e.coded() {
		e.allocate(b, 2*n*base.WordSize)
	}
	return b.Ptr
}

// listAt returns the list of n entries whose message is at p.
func (e *engine) listAt(p uintptr, n int, memory uintptr) kernel.Entries {
	if e.coded() {
		p = memory
	}
	return kernel.Entries{
		Idx: p,
		Val: base.At(p, n),
		N:   n,
	}
}

// placeSlots sets lists to those of consecutive slots of n entries, beginning at p.
func (e *engine) placeSlots(lists []kernel.Entries, p uintptr, n int, memory uintptr) {
	for i := range lists {
		if e.err == nil {
			first := base.At(p, i*e.slotWords(n))
			lists[i] = e.listAt(base.At(first, headerWords), n, base.At(memory, 2*n*i))
			lists[i].Len = first
		}
	}
}
