package engine

import (
	"context"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// The second half of oktopk's exchange: gathering the sums that reach the threshold.

// selectGlobal selects the sums of this rank's partition that reach the threshold. It returns them and the number of
// such sums on all ranks, for which the host waits; x.allgather has the lengths of all ranks' lists.
func (x *okExchange) selectGlobal(ctx context.Context, sums kernel.Entries) (passed kernel.Entries, total int) {
	passed = x.passing(sums)
	if x.order.Streams == nil {
		total = x.allgather.exchangeLengths(ctx, passed, x.partitionLength)
	} else {
		x.communicate(ctx, comm.AllGatherCall(x.announcementPtr, x.address(x.announcements), announcedWords, dtype.I32))
		x.flagLarge(x.address(x.announcements), announcedWords)
		total = x.readAnnounced(ctx)
	}
	return exactly(passed, x.allgather.lengths[x.rank]), total
}

// passing returns the sums that reach the threshold. Their number is announced.
func (x *okExchange) passing(sums kernel.Entries) kernel.Entries {
	passed := x.message(&x.reduced, sums.N)
	if x.order.Streams != nil {
		passed.Len = base.At(x.announcementPtr, announcedPassed)
	}
	x.aboveOf(sums, x.address(numBracket), passed)
	return passed
}

// gatherAhead gathers each rank's sums that reached the threshold, as many as there is room for ([okExchange.place]).
// The selected entries that are not in this rank's sums are known before, and are restored in the meantime. With
// asynchronous copies, the host reads the announcements in the next step.
func (x *okExchange) gatherAhead(ctx context.Context, local kernel.Entries, late bool) []kernel.Entries {
	lists := x.allgather.lists
	words := x.slotWords(lists[0].N)
	if x.sends {
		words = int(lists[1].Len-lists[0].Len) / base.WordSize
		x.gatherLists(ctx, &x.peerLists[1], lists[x.rank])
	} else {
		x.packSlot(lists[x.rank])
		x.add(comm.AllGatherCall(x.announcementPtr, lists[0].Len, words, dtype.I32))
		x.submit(ctx)
	}
	x.restoreEntries(local, lists[x.rank])
	x.arrive(ctx)
	if !x.sends {
		for _, l := range lists {
			x.unpackSlot(l)
		}
	}
	x.flagLarge(lists[0].Len, words)
	if !late {
		x.copyWords(x.address(x.announcements), announcedWords, lists[0].Len, words, announcedWords)
		return lists
	}
	numbers := kernel.Span{
		Ptr:   x.words.Ptr,
		Bytes: int(x.announcements) * base.WordSize,
	}
	x.posted = append(x.posted[:0], numbers)
	for _, l := range lists {
		announced := kernel.Span{
			Ptr:   l.Len,
			Bytes: announcedWords * base.WordSize,
		}
		x.posted = append(x.posted, announced)
	}
	if x.err != nil { // the numbers for readPosted stay unread
		return lists
	}
	x.hostState.pending = true
	x.beforePosted = x.hostBefore
	if x.cfg.NonFinite == PassNonFinite { // otherwise it is not known yet whether the step passes
		x.post()
	}
	return lists
}

// place allocates messages of all ranks, one for each, in memory for collectives: messages to the other rank, if there
// are two ([okExchange.exchanged]), and messages with sums. If sums are gathered ahead, x.allgather.lists is that
// memory for the sums of each rank, and the words before the rank's message are its announcement.
func (x *okExchange) place(ctx context.Context, ahead int) {
	unit := x.unit()
	limit := newLimits(x.k, x.size, unit.overhead(x.size, false, false))
	quota := limit.quota(x.k, x.size) // number of sums that are gathered ahead, if any
	gathered := x.size * x.slotWords(quota)
	words := gathered
	leaving := limit.leaving(quota, x.size, unit)
	largest := max(limit.message, leaving.message) // to the other of two ranks
	if x.size == 2 {
		words += 2 * x.slotWords(largest)
	}
	lists := x.allgather.lists
	x.sends = x.size == 2 &&
		x.shareLists(ctx, &x.peerLists[0], largest) &&
		x.shareLists(ctx, &x.peerLists[1], max(quota, 1))
	if x.sends {
		for r, l := range x.peerLists[1].Lists() {
			l.N = quota
			lists[r] = l
		}
		if ahead > 0 {
			x.announcementPtr = lists[x.rank].Len
		}
		return
	}
	fresh := lists[x.rank].Len == 0 || words*base.WordSize > x.sharedBytes
	x.engine.share(ctx, words*base.WordSize)
	if x.err != nil {
		return
	}
	x.slots = base.At(x.shared.Ptr, gathered)
	if ahead == 0 {
		return
	}
	memory := x.listMemory(&x.allgather.joined.Buffer, x.size*quota)
	x.placeSlots(lists, x.shared.Ptr, quota, memory)
	x.announcementPtr = lists[x.rank].Len
	if fresh {
		x.fill(x.announcementPtr, headerWords)
	}
}

// exchanged returns the message of one of two ranks to the other.
func (x *okExchange) exchanged(rank, room int) kernel.Entries {
	if x.sends {
		l := x.peerLists[0].Lists()[rank]
		l.N = room
		return l
	}
	var l [1]kernel.Entries
	slot := base.At(x.slots, rank*x.slotWords(room))
	memory := x.listMemory(&x.exchangedApart[rank], room)
	x.placeSlots(l[:], slot, room, memory)
	return l[0]
}

// flagLarge sets the flags to the announced values, which are stride words apart.
func (x *okExchange) flagLarge(announced uintptr, stride int) {
	if x.cfg.NonFinite == PassNonFinite {
		return
	}
	x.flagged = true
	large := base.At(announced, announcedLarge)
	x.copyWords(x.flags, 1, large, stride, 1)
}

// copyWords copies n words for each rank, between places that are dstStride and srcStride words apart.
func (x *okExchange) copyWords(dst uintptr, dstStride int, src uintptr, srcStride, n int) {
	x.layout = [...][2]int{{dstStride, 1}, {srcStride, 1}, {x.size, n}}
	x.do(func() error {
		return x.rt.CopyStrided(dst, x.layout[0][:], src, x.layout[1][:], x.layout[2][:], base.WordSize)
	})
}

// readAnnounced makes the host wait for the announcements, and returns the number of sums on all ranks that reached
// the threshold.
func (x *okExchange) readAnnounced(ctx context.Context) (total int) {
	x.read(ctx)
	x.checkSamples()
	total = x.announced()
	x.found(x.announces(announcedLarge))
	return total
}

// announced is readAnnounced after the numbers are read. It corrects x.allgather.lengths.
func (x *okExchange) announced() (total int) {
	limit := func(i int) int {
		if i%announcedWords == announcedPassed {
			return x.partitionLength(i / announcedWords)
		}
		return x.n
	}
	all := x.checkWords(x.announcements, announcedWords*x.size, limit, "its number of entries")
	for r := range x.allgather.lengths {
		x.allgather.lengths[r] = int(all[r*announcedWords+announcedPassed])
	}
	x.hostState.even = !x.announces(announcedLong)
	return base.Displacements(x.allgather.lengths, x.allgather.displs)
}

// checkSamples checks the samples that the ranks sent to balance partitions.
func (x *okExchange) checkSamples() {
	last := func(int) int { return max(x.n-1, 0) }
	x.checkWords(x.samples+sampleCount, sampleCount*x.size, last, "the index of an entry")
}

// share cuts this rank's sums that reached the threshold to those that go into the result: with room, to the first
// ones that fit; otherwise, if all ranks together have more than the result may have, to the largest. It corrects
// x.allgather.lengths.
func (x *okExchange) share(passing kernel.Entries, total int, limit limits, room int) kernel.Entries {
	counts := x.allgather.lengths
	switch {
	case room > 0:
		for r := range counts {
			counts[r] = min(counts[r], room)
		}
		return exactly(passing, counts[x.rank])
	case total > limit.global:
		divide(counts, total, limit.global)
	}
	length := counts[x.rank]
	if length >= passing.N {
		return passing
	}
	largest := exactly(x.message(&x.largest, length), length)
	x.topOf(passing, length, largest)
	return largest
}

// divide reduces counts, whose sum is total, to a limit.
func divide(counts []int, total, limit int) {
	// Every rank with any sum gets one, and its share of the rest of the limit. So the largest of each partition is in
	// the result, and with it any NaN or infinity. Rounding the running sums makes the shares add up to the limit
	// exactly, and no share exceeds its length. (The limit is never below x.size, and total is above it.)
	sure := 0
	for _, n := range counts {
		sure += min(n, 1)
	}
	passed := 0
	granted := 0
	for r, n := range counts {
		first := min(n, 1)
		passed += n - first
		share := passed*(limit-sure)/(total-sure) - granted
		counts[r] = first + share
		granted += share
	}
}

// spread moves sums between ranks so that all have equally many, if one has far more than the others: an allgather is
// as slow as its longest list. It corrects x.allgather.lengths. It is not used for encoded lists, whose sums it would
// round twice.
func (x *okExchange) spread(ctx context.Context, local kernel.Entries, limit limits) kernel.Entries {
	counts := x.allgather.lengths
	total := 0
	for _, n := range counts {
		total += n
	}
	if x.coded() || float64(slices.Max(counts)*x.size) <= x.cfg.tuning.BalanceFactor*float64(total) {
		return local
	}
	// List r covers [start, end) of all sums, in rank order; afterwards
	// [r*total/P, (r+1)*total/P).
	even := func(r int) (from, to int) {
		return r * total / x.size, (r + 1) * total / x.size
	}
	overlap := func(start, end, r int) (from, n int) {
		f, t := even(r)
		from = max(start, f)
		return from, max(0, min(end, t)-from)
	}
	start := 0
	myFrom, myTo := even(x.rank)
	for r, n := range counts {
		_, stays := overlap(start, start+n, r)
		f, t := even(r)
		if 2*(n-stays)+2*(total-(t-f)) > limit.allgather {
			return local
		}
		if r == x.rank {
			for to := range counts {
				from, n := overlap(start, start+n, to)
				x.sendCounts[to] = n
				x.sendDispls[to] = max(0, min(from-start, local.N))
			}
		}
		from, moves := overlap(start, start+n, x.rank)
		x.recvCounts[r] = moves
		x.recvDispls[r] = max(0, min(from, myTo)-myFrom)
		start += n
	}
	for r := range counts {
		f, t := even(r)
		counts[r] = t - f
	}
	n := myTo - myFrom
	x.allocate(&x.spreadTo, 2*n*base.WordSize)
	share := kernel.Entries{
		Idx: x.spreadTo.Ptr,
		Val: base.At(x.spreadTo.Ptr, n),
		N:   n,
	}
	x.add(comm.AllToAllVCall(local.Idx, x.sendCounts, x.sendDispls, share.Idx, x.recvCounts, x.recvDispls, dtype.I32))
	x.add(comm.AllToAllVCall(local.Val, x.sendCounts, x.sendDispls, share.Val, x.recvCounts, x.recvDispls, dtype.F32))
	x.engine.submitAndArrive(ctx)
	return share
}
