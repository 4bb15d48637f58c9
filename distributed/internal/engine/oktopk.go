package engine

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// okExchange is the exchange of Ok-Topk (Li and Hoefler, "Near-Optimal Reducer
// Allreduce for Distributed Deep Learning", PPoPP 2022): reduce by partitions
// that are balanced from time to time, select the globally largest sums
// by a reused threshold, allgather them.
//
// # Volume
//
// The paper bounds what a rank sends in a step by 6k(P-1)/P elements (an index
// and a value count one each, an allgather counts what a rank receives): a
// third for the reduction by partitions, two thirds for balancing and the allgather. It assumes that
// thresholds select k entries and partitions hold equal shares. Here it holds
// whatever the gradients are, because every message is paid from a budget
// before it is sent:
//
//  1. B = floor(6k(P-1)/P) minus the overhead of the step, which does not
//     depend on data: the lengths that are exchanged before the reduction
//     and before the allgather, samples when partitions are balanced, counts when the
//     threshold is estimated ([overhead]). A threshold that turns out to be far
//     off is estimated in the same step, from what is left of B ([limits.spend]), or, in steps
//     in which nobody waits for what passed (R, below), in the next one.
//  2. In the reduction a rank sends at most S = floor(B/6) entries to others, so
//     2S <= B/3 elements. If it selected more for others, the largest S go and
//     the rest stays in its residual. So does what there is no room for in messages that
//     are padded, or would be if the host waited for nothing ([okExchange.pads]).
//     Padding is subtracted from the budget below. In steps in which the result has
//     R entries of each rank at most (3), padded messages take all that this leaves ([limits.leaving]).
//  3. The sums that pass the global threshold make up the result. If partitions had about
//     equally many in the two steps before, the first R of each go into it, by index, where R is
//     1.5k/P, but not more than floor((B-2S)/2(P-1)): a rank receives at most
//     2R(P-1) elements, and 2S + 2R(P-1) <= B. Otherwise, and where R is below 512,
//     they are at most G = min(k, floor((B-2S)/2)): if
//     more pass, each rank's share is cut in proportion
//     (but not to nothing) and it keeps its largest; the lengths that all ranks know say so without
//     a further message. A rank receives at most all G of them: 2G elements.
//     2S + 2G <= B, so the bound holds for each rank and each step. (On devices with
//     streams the lengths of such a step take up to 7(P-1) elements more than the overhead
//     has for them, and the bound is that much higher.)
//  4. Spreading the sums before they are gathered would cost a rank up to
//     4(G - floor(G/P)) elements altogether. All ranks compute the exact cost
//     from the lengths, and it is only done if no rank exceeds B - 2S.
//
// For P = 2, the tightest case, 2S + 2G is about k + 2k: the whole budget. If k
// is too small to pay the overhead, [find] takes another exchange.
//
// What the ranks compare before the first step with a communicator ([Reducer.AllReduce]) is not in
// that sum, nor is the number that [Config].ClipGlobal adds.
//
// What a rank receives in the reduction is not in that sum. Balanced partitions keep
// it near 2k; see balancePartitions.
//
// # Conservation
//
// A rank takes the entries that it sent (or had in its own partition) out of its
// residual, and when the result is known gives those back whose index is not
// in it. A sum in the result contains the contributions of all ranks that sent
// one, so nothing is lost or counted twice.
type okExchange struct {
	*partitionReducer
	allgather *allgather // of the sums

	quantiles              []float64         // of the samples that this rank shows
	local, trimmed         listBuffer        // for limitOutgoing and cutOutgoing
	fitting, joined        listBuffer        // for cutMessages and joinSent
	padded, paddedApart    base.Buffer       // messages of sendRounds, and their lists if these are separate
	exchangedApart         [2]base.Buffer    // lists of exchanged, if these are separate
	sent                   []kernel.Entries  // lists sent, by round
	announcementPtr        uintptr           // address of this rank's announcement
	slots                  uintptr           // for exchanged
	sends                  bool              // ranks write these, and the sums, into each other's memory
	pieces                 []kernel.Piece    // arguments of kernels that copy
	reduced, largest       listBuffer        // sums that reach the threshold, and the largest of these
	spreadTo               base.Buffer       // the sums that spread gives to this rank
	sendCounts, sendDispls []int             // for spread
	recvCounts, recvDispls []int             // the same
	all                    [1]kernel.Entries // the list of the result
	layout                 [3][2]int         // for copyWords
}

func oktopk(e *engine) exchange {
	x := &okExchange{
		partitionReducer: newPartitionReducer(e),
		allgather:        newAllgather(e),
	}
	e.hostState = hostState{age: e.cfg.tuning.ThresholdInterval}
	x.sendCounts = make([]int, e.size)
	x.sendDispls = make([]int, e.size)
	x.recvCounts = make([]int, e.size)
	x.recvDispls = make([]int, e.size)
	x.sent = make([]kernel.Entries, e.size)
	e.makeHostCopy()
	shift := (float64(e.rank) + 0.5) / float64(e.size) // offset of this rank's samples
	for j := range sampleCount {
		quantile := (float64(j) + shift) / sampleCount
		x.quantiles = append(x.quantiles, quantile)
	}
	return x
}

// levelSteps is the number of steps with about equally many sums in all partitions after which the next step is
// expected to be the same.
const levelSteps = 2

// okStep describes how a step is made. All ranks decide it alike, before the step.
type okStep struct {
	limit     limits // limits of messages in elements
	quota     int    // sums that every rank may add to the result, if none has more
	room      int    // the same number if partitions had about equally many; 0: lengths decide
	rebalance bool   // partitions are balanced first
	estimate  bool   // the threshold of the sums is estimated
	padded    bool   // messages are padded, or cut as if they were
}

// next decides how the next step is made.
func (x *okExchange) next() okStep {
	x.hostState.age++
	s := okStep{
		rebalance: x.hostState.steps%x.cfg.tuning.RebalanceInterval == 0,
		estimate:  x.hostState.age >= x.cfg.tuning.ThresholdInterval,
	}
	x.hostState.steps++
	unit := x.unit()
	s.limit = newLimits(x.k, x.size, unit.overhead(x.size, s.rebalance, s.estimate))
	s.quota = s.limit.quota(x.k, x.size)
	if x.hostState.level == levelSteps && s.quota >= 2*evenLength {
		s.room = s.quota
	}
	s.padded = x.pads(s.limit.outgoing, s.rebalance)
	switch {
	case s.padded && s.room > 0:
		s.limit = s.limit.leaving(s.room, x.size, unit)
	case s.padded:
		padding := (x.size-1)*s.limit.message - s.limit.outgoing
		s.limit = s.limit.spend(2 * padding)
	}
	return s
}

// run reduces the selected entries by partitions, which are balanced from time to time, and gathers the sums that
// reach the global threshold, which is estimated from time to time (Li and Hoefler, Algorithm 1). Its variants differ
// in the lengths that the host knows.
func (x *okExchange) run(ctx context.Context, selected kernel.Entries) result {
	x.readPosted(ctx)
	s := x.next()
	if s.rebalance {
		x.balancePartitions(ctx, selected)
	}
	x.announcementPtr = x.address(x.announcement)
	switch {
	case x.order.Streams == nil:
		return x.runKnown(ctx, selected, s)
	case s.padded && s.room > 0:
		return x.runAhead(ctx, selected, s)
	case s.padded:
		x.place(ctx, 0)
		x.countLarge(selected)
		local, outgoing, sums := x.reducePadded(ctx, selected, s.limit, 0)
		return x.gather(ctx, local, outgoing, sums, s)
	}
	x.countLarge(selected)
	outgoing := x.cutOutgoing(selected, s.limit)
	local := x.copyOwn(selected)
	sums := x.reduce(ctx, outgoing, &local)
	return x.gather(ctx, local, outgoing, sums, s)
}

// runKnown is the step of a host that waits for all lengths.
func (x *okExchange) runKnown(ctx context.Context, selected kernel.Entries, s okStep) result {
	x.countLarge(selected)
	local, outgoing, sums := x.reduceKnown(ctx, selected, s.limit, s.padded)
	if outgoing.Idx == selected.Idx { // nothing was cut: the list has both local and outgoing entries
		local = selected
		outgoing = kernel.Entries{}
	}
	return x.gather(ctx, local, outgoing, sums, s)
}

// runAhead is the step of a host that does not size anything by lengths: there is room for the sums of each rank, and
// they are gathered before the host knows their number. A threshold that is far off does little harm then, and the
// next step estimates it.
func (x *okExchange) runAhead(ctx context.Context, selected kernel.Entries, s okStep) result {
	late := x.late()
	x.place(ctx, s.room)
	x.countLarge(selected)
	threshold := uintptr(0)
	if !s.estimate { // the sums are not needed otherwise
		threshold = x.address(numBracket)
	}
	local, _, sums := x.reducePadded(ctx, selected, s.limit, threshold)
	if s.estimate { // otherwise the sums are where they are sent from
		x.estimate(ctx, sums)
		x.aboveOf(sums, x.address(numBracket), x.allgather.lists[x.rank])
	}
	lists := x.gatherAhead(ctx, local, late)
	last := x.size - 1
	for t := 1; t < last; t++ {
		x.restoreEntries(x.sent[t], lists[x.to(t)])
	}
	if !late {
		x.learn(x.readAnnounced(ctx), s.quota)
	}
	return result{
		lists: lists,
		scale: x.average,
		left:  leftover{x.sent[last], lists[x.to(last)]},
	}
}

// gather makes the result of the sums that reach the threshold, for whose lengths the host waits, and restores the
// selected entries that are in no sum.
func (x *okExchange) gather(ctx context.Context, local, outgoing, sums kernel.Entries, s okStep) result {
	if s.estimate {
		x.estimate(ctx, sums)
	}
	passed, total := x.selectGlobal(ctx, sums)
	if s.room == 0 && !s.estimate && x.far(total) { // for example because the gradients' scale has changed
		s.limit = s.limit.spend(x.unit().reestimate(x.size))
		x.estimate(ctx, sums)
		passed, total = x.selectGlobal(ctx, sums)
	}
	x.learn(total, s.quota)
	shares := x.share(passed, total, s.limit, s.room)
	balanced := x.spread(ctx, shares, s.limit)
	global := x.collectPartitions(ctx, x.allgather, balanced)
	x.restoreEntries(local, global)
	x.restoreEntries(outgoing, global)
	x.all[0] = global
	return result{
		lists: x.all[:],
		scale: x.average,
	}
}

// readPosted learns from the last step, if nothing needed its numbers in that step: they were copied to the host
// asynchronously. A step calls it after it has submitted the selection, on which the device works in the meantime.
// Earlier steps are final: a rollback of this one does not affect what was learned. If the device has rolled back the
// last one, nothing is learned from it.
func (x *okExchange) readPosted(ctx context.Context) {
	if !x.hostState.pending || x.err != nil {
		return
	}
	was := x.hostState
	x.receive(ctx)
	switch {
	case x.err != nil:
	case x.host[x.skippedLast] != 0: // rolled back with its partitions, so the announcement does not apply
		x.setInt(x.skippedLast, 0)
		x.hostState = x.beforePosted
	default:
		before := x.host[numBracket]
		x.hostState.pending = false
		x.checkSamples()
		limit := newLimits(x.k, x.size, x.unit().overhead(x.size, false, false))
		x.learn(x.announced(), limit.quota(x.k, x.size))
		threshold := x.host[numBracket]
		if threshold != before && x.restores != nothingSaved && x.err == nil {
			kept := base.At(x.before.Ptr, int(numBracket-numKept))
			x.check(x.rt.Fill(kept, 1, dtype.I32, float64(threshold)))
		}
	}
	if x.err != nil {
		x.hostState = was // to be read again
	}
	x.hostBefore = x.hostState
}

// balancePartitions makes partitions with about equally many of all ranks' selected entries. Each rank sends a regular
// sample of its selected entries, and the sorted samples of all ranks are cut into equal parts, as in parallel sorting
// by regular sampling. The samples are staggered by rank, so that ranks with similar distributions together provide P
// times as many quantiles.
//
// The paper averages the ranks' own boundaries instead, which balances only ranks with similar distributions: if the
// entries of each rank cluster at different places, all averages fall between the clusters.
func (x *okExchange) balancePartitions(ctx context.Context, selected kernel.Entries) {
	count := sampleCount * x.size
	all := x.samples + sampleCount
	sorted := all + number(count)
	x.do(func() error {
		return x.kernels.Sample(selected, x.quantiles, x.n, x.address(x.samples))
	})
	x.communicate(ctx, comm.AllGatherCall(x.address(x.samples), x.address(all), sampleCount, dtype.I32))
	x.copy(x.address(sorted), x.address(all), count)
	x.do(func() error {
		return x.kernels.Balance(x.address(sorted), count, x.n, x.address(numBounds), x.size)
	})
}

// countLarge counts the selected entries that may not stay finite when all ranks' entries are added.
func (x *okExchange) countLarge(selected kernel.Entries) {
	if x.cfg.NonFinite == PassNonFinite || x.err != nil {
		return
	}
	count := base.At(x.announcementPtr, announcedLarge)
	x.check(x.kernels.CountAbove(selected, x.address(numFiniteLimit), 1, count))
}

// announces reports whether a rank announced a nonzero word.
func (x *okExchange) announces(word int) bool {
	announced := x.host[x.announcements:]
	for r := range x.size {
		if announced[r*announcedWords+word] != 0 {
			return true
		}
	}
	return false
}
