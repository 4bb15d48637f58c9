package engine

import (
	"context"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// The first half of oktopk's exchange: the choice of selected entries to send, sending them, and the sums of this
// rank's partition.

// Flags in unused bits of a length: one of a rank's messages is too long for the next step to pad them; selected
// entries of the rank may not stay finite.
const longBit, largeBit = 1 << 30, math.MinInt32

// reduceKnown reduces when the host waits for the numbers of each part anyway: messages have their actual lengths,
// which the receiver knows in advance. The length of padded messages is in them.
func (x *okExchange) reduceKnown(ctx context.Context, selected kernel.Entries, limit limits,
	padded bool) (local, outgoing, sums kernel.Entries) {
	local, outgoing = x.limitOutgoing(ctx, selected, limit.outgoing)
	words := x.host[x.lengths:][:x.size]
	room := limit.message
	longest := 0
	for r, n := range words {
		if r != x.rank {
			longest = max(longest, int(n))
		}
	}
	if padded && longest > room {
		outgoing = x.cutMessages(outgoing, room)
		x.locate(outgoing)
		x.read(ctx)
	}
	bits := int32(0)
	known := int32(largeBit)
	if x.size > 2 {
		known |= longBit
		if longest > nearly(room) {
			bits |= longBit
		}
	}
	if x.host[x.announcement+announcedLarge] != 0 {
		bits |= largeBit
	}
	for r := range words {
		words[r] |= bits
	}
	x.set(x.lengths, words...)
	x.communicate(ctx, comm.AllToAllCall(x.address(x.lengths), x.address(x.received), 1, dtype.I32))
	x.read(ctx)
	bits = 0
	for r := range x.size {
		word := &x.host[int(x.received)+r]
		bits |= *word & known
		*word &^= known
	}
	x.hostState.even = bits&longBit == 0
	x.found(bits&largeBit != 0)
	x.flagged = true
	if x.finding == mayBeNonFinite && x.err == nil {
		x.check(x.rt.Fill(x.flags, 1, dtype.I32, 1))
	}
	return local, outgoing, x.reduceRead(ctx, outgoing, &local)
}

// limitOutgoing locates the partitions in the selected entries and cuts those for other ranks to the largest, up to
// the limit. It returns the selected entries in this rank's own partition, and the list to send from: if nothing was
// cut, that is all selected entries. Entries that are cut are restored: they are not sent, and the others have no part
// in them. The host has read the bounds of the partitions.
func (x *okExchange) limitOutgoing(ctx context.Context, selected kernel.Entries,
	limit int) (local, outgoing kernel.Entries) {
	x.locate(selected)
	x.read(ctx)
	x.checkSamples()
	local = x.partitionOf(selected, x.rank)
	positions := x.host[x.positions:]
	remote := int(positions[x.size]) - local.N
	if remote <= limit {
		return local, selected
	}
	outgoing = exactly(x.message(&x.trimmed, limit), limit)
	x.topOutside(selected, numBounds+number(x.rank), outgoing)
	x.locate(outgoing)
	x.read(ctx)
	return local, outgoing
}

// cutMessages returns the entries for other ranks in a list whose partitions are read, but only as many for each as
// there is room for. Other entries are restored.
func (x *okExchange) cutMessages(outgoing kernel.Entries, room int) kernel.Entries {
	positions := x.host[x.positions:]
	cut := exactly(x.message(&x.fitting, outgoing.N), 0)
	for r := range x.size {
		if r == x.rank {
			continue
		}
		from := int(positions[r])
		to := int(positions[r+1])
		end := min(to, from+room)
		n := end - from
		x.copy(base.At(cut.Idx, cut.N), base.At(outgoing.Idx, from), n)
		x.copy(base.At(cut.Val, cut.N), base.At(outgoing.Val, from), n)
		cut.N += n
		beyond := part(outgoing, end, to)
		x.restoreEntries(beyond, kernel.Entries{})
	}
	return cut
}

// cutOutgoing returns the selected entries for other ranks, like [okExchange.limitOutgoing], without a wait of the
// host: the list has its length on the device.
func (x *okExchange) cutOutgoing(selected kernel.Entries, limit limits) (outgoing kernel.Entries) {
	bounds := numBounds + number(x.rank)
	if x.size == 2 { // all are for the other rank
		outgoing = x.exchanged(x.rank, limit.message)
		x.topOutside(selected, bounds, outgoing)
		return outgoing
	}
	outgoing = x.message(&x.trimmed, limit.outgoing)
	x.topOutside(selected, bounds, outgoing)
	x.locate(outgoing)
	x.countLong(limit.message)
	return outgoing
}

// copyOwn returns the selected entries in this rank's own partition.
func (x *okExchange) copyOwn(selected kernel.Entries) kernel.Entries {
	local := x.message(&x.local, selected.N)
	start := x.address(numBounds + number(x.rank))
	x.pieces = append(x.pieces[:0], kernel.Piece{
		From:    selected,
		Start:   start,
		End:     start + base.WordSize,
		ByIndex: true,
		To:      local,
	})
	x.copyPieces(x.pieces)
	return local
}

// evenLength is the minimum length of equal messages at which chance does not make one of them much longer.
const evenLength = 256

// pads reports whether the messages of the reduction are padded, so that the host need not wait for their lengths.
// Messages to a single rank always are, since they have room for everything that may be sent; others are if they have
// had similar lengths since partitions were balanced. All ranks decide alike.
func (x *okExchange) pads(limit int, rebalance bool) bool {
	return x.size == 2 || x.hostState.even && !rebalance && limit >= evenLength*(x.size-1)
}

// nearly returns the maximum length of messages for which the next step pads them.
func nearly(room int) int { return room * 13 / 14 }

// reducePadded reduces with padded messages that begin with their lengths. Entries without room are restored to the
// residual in the meantime: they are not sent, and the others have no part in them. outgoing is everything that is
// sent, in one list. If threshold is not 0, the sums are those that reach it, in this rank's message to all others,
// after the number that reached it.
func (x *okExchange) reducePadded(ctx context.Context, selected kernel.Entries, limit limits,
	threshold uintptr) (local, outgoing, sums kernel.Entries) {
	outgoing = x.cutOutgoing(selected, limit)
	room := limit.message
	if x.size > 2 {
		local, outgoing = x.sendRounds(ctx, selected, outgoing, room)
	} else {
		x.sent[1] = outgoing
		x.sources[1] = x.exchanged(x.to(1), room)
		if x.sends {
			x.gatherLists(ctx, &x.peerLists[0], outgoing)
		} else {
			x.packSlot(outgoing)
			x.add(comm.AllGatherCall(outgoing.Len, x.slots, x.slotWords(room), dtype.I32))
			x.submit(ctx)
		}
		local = x.copyOwn(selected)
		x.arrive(ctx)
	}
	for t := 1; t < x.size && !x.sends; t++ {
		x.unpackSlot(x.sources[t])
		if x.size == 2 {
			x.unpackSlot(x.sent[t])
		}
	}
	x.sources[0] = local
	if threshold != 0 {
		sums = x.allgather.lists[x.rank]
	} else {
		longest := local.N + (x.size-1)*room
		sums = x.message(&x.sums, min(longest, x.n))
	}
	x.union(sums, x.sources, 1, threshold)
	return local, outgoing, sums
}

// sendRounds cuts the located entries into a message to each other rank, and sends it while [okExchange.copyOwn] runs.
// It returns everything that is sent in one list.
func (x *okExchange) sendRounds(ctx context.Context, selected, outgoing kernel.Entries,
	room int) (local, sent kernel.Entries) {
	words := x.slotWords(room)
	peers := x.size - 1
	x.allocate(&x.incoming, peers*words*base.WordSize)
	x.allocate(&x.padded, peers*words*base.WordSize)
	received := x.listMemory(&x.unpacked, peers*room)
	x.placeSlots(x.sources[1:], x.incoming.Ptr, room, received)
	sending := x.listMemory(&x.paddedApart, peers*room)
	x.placeSlots(x.sent[1:], x.padded.Ptr, room, sending)
	x.pieces = x.pieces[:0]
	for t := 1; t < x.size; t++ {
		to := x.positions + number(x.to(t))
		x.pieces = append(x.pieces, kernel.Piece{
			From:  outgoing,
			Start: x.address(to),
			End:   x.address(to + 1),
			To:    x.sent[t],
		})
	}
	x.copyPieces(x.pieces)
	for _, l := range x.sent[1:] {
		x.packSlot(l)
		x.unpackSlot(l)
	}
	for first := 1; first < x.size; first += throttle {
		end := min(first+throttle, x.size)
		for t := first; t < end; t++ {
			x.add(comm.SendCall(x.sent[t].Len, words, dtype.I32, x.to(t), partitionTag))
			x.add(comm.RecvCall(x.sources[t].Len, words, dtype.I32, x.from(t), partitionTag))
		}
		x.submit(ctx)
		if first == 1 {
			local = x.copyOwn(selected)
			sent = x.joinSent(outgoing.N)
			x.restoreEntries(outgoing, sent)
		}
		x.arrive(ctx)
	}
	return local, sent
}

// joinSent returns the messages to the other ranks, which may have cut their lists, as one list of up to n entries:
// [kernel.MaxPieces] at a time.
func (x *okExchange) joinSent(n int) (all kernel.Entries) {
	target := &x.fitting
	spare := &x.joined
	x.pieces = x.pieces[:0]
	for r := range x.size {
		if r != x.rank {
			round := (r - x.rank + x.size) % x.size
			x.pieces = append(x.pieces, kernel.Piece{From: x.sent[round]})
		}
		last := r == x.size-1
		if !last && len(x.pieces) < kernel.MaxPieces {
			continue
		}
		all = x.message(target, n)
		for i := range x.pieces {
			x.pieces[i].To = all
		}
		x.copyPieces(x.pieces)
		// The entries so far are the first piece of the next list, in the other memory.
		x.pieces = append(x.pieces[:0], kernel.Piece{From: all})
		target, spare = spare, target
	}
	return all
}

// countLong counts this rank's messages that are too long for the next step to pad them. The count is announced.
func (x *okExchange) countLong(room int) {
	bound := int32(nearly(room) + 1)
	if x.host[x.longest] != bound {
		x.setInt(x.longest, bound)
	}
	if x.err != nil {
		return
	}
	// As numbers, lengths have the order of their bits.
	lengths := kernel.Entries{
		Val: x.address(x.lengths),
		N:   x.size,
	}
	count := base.At(x.announcementPtr, announcedLong)
	x.check(x.kernels.CountAbove(lengths, x.address(x.longest), 1, count))
}
