package sparse

import (
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/runtime"
)

// A list travels as one message, whose length follows from the number of entries that there is
// room for. Where all ranks know how long lists are, that is how long they are. Where lengths differ and
// the host may wait, they are sent first ([allgather.exchangeLengths]). Where the host is not to wait,
// because the device has streams of its own, a list goes padded to its capacity, in a slot: a message
// with the list's length in front.
//
// This file alone knows how a message looks: indices, and behind them values.

// messageWords is the length of the message of n entries, slotWords that of their slot.
func (e *engine) messageWords(n int) int { return 2 * n }
func (e *engine) slotWords(n int) int    { return headerWords + e.messageWords(n) }

// pack makes the message of a list at p, unless the list is there.
func (e *engine) pack(p uintptr, l runtime.Entries) {
	e.copy(p, l.Idx, l.N)
	e.copy(base.At(p, l.N), l.Val, l.N)
}

// unpack makes a list of the message at p, unless the list is there.
func (e *engine) unpack(l runtime.Entries, p uintptr) {
	e.copy(l.Idx, p, l.N)
	e.copy(l.Val, base.At(p, l.N), l.N)
}

// messageOf returns where the message of a list is made, or arrives: where the list is, if that is in
// one piece, and in b otherwise.
func (e *engine) messageOf(b *base.Buffer, l runtime.Entries) uintptr {
	if l.Val == base.At(l.Idx, l.N) {
		return l.Idx
	}
	e.allocate(b, e.messageWords(l.N)*base.WordSize)
	return b.Ptr
}

// packSlot and unpackSlot are pack and unpack of a list in a slot.
func (e *engine) packSlot(l runtime.Entries)   { e.pack(base.At(l.Len, headerWords), l) }
func (e *engine) unpackSlot(l runtime.Entries) { e.unpack(l, base.At(l.Len, headerWords)) }

// listAt returns where the list of n entries is that travels as the message at p.
func (e *engine) listAt(p uintptr, n int) runtime.Entries {
	return runtime.Entries{Idx: p, Val: base.At(p, n), N: n}
}

// placeSlots makes lists those of slots of n entries, one behind the other from p on.
func (e *engine) placeSlots(lists []runtime.Entries, p uintptr, n int) {
	for i := range lists {
		if e.err == nil {
			first := base.At(p, i*e.slotWords(n))
			lists[i] = e.listAt(base.At(first, headerWords), n)
			lists[i].Len = first
		}
	}
}
