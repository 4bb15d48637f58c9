package sparse

import (
	"context"
	"math"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// okExchange is the exchange of Ok-Topk (Li and Hoefler, "Near-Optimal Reducer
// Allreduce for Distributed Deep Learning", PPoPP 2022): reduce by partitions
// that are balanced from time to time, pick the globally largest sums
// by a reused threshold, allgather them.
//
// # Volume
//
// The paper bounds what a rank sends in a step by 6k(P-1)/P elements (an index
// and a value count one each, an allgather counts what a rank receives): a
// third for the reduction by partitions, two thirds for balancing and the allgather. It assumes that
// thresholds pick k entries and partitions hold equal shares. Here it holds
// whatever the gradients are, because every message is paid from a budget
// before it is sent:
//
//  1. B = floor(6k(P-1)/P) minus the overhead of the step, which does not
//     depend on data: the lengths that are exchanged before the reduction
//     and before the allgather, samples when partitions are balanced, counts when the
//     threshold is estimated ([overhead]). A threshold that turns out to be far
//     off is estimated in the same step, from what is left of B ([limits.less]), or, in steps
//     in which nobody waits for what passed (R, below), in the next one.
//  2. In the reduction a rank sends at most S = floor(B/6) entries to others, so
//     2S <= B/3 elements. If it picked more for others, the largest S go and
//     the rest stays in its residual. So does what there is no room for in messages that
//     are padded, or would be if the host waited for nothing ([okExchange.pads]). What
//     padding takes comes off what is left below. In steps in which the result has
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
// What a rank receives in the reduction is not in that sum. Balanced partitions keep
// it near 2k; see balanceRegions.
//
// # Conservation
//
// A rank takes the entries that it sent (or had in its own partition) out of its
// residual, and when the result is known gives those back whose index is not
// in it. A sum in the result contains the contributions of all ranks that sent
// one, so nothing is lost or counted twice.
type okExchange struct {
	*partitionReducer
	allgather *allgather

	quantiles              []float64         // of the samples that this rank shows
	own, trimmed           message           // of limitOutgoing and cutOutgoing
	fitting, joined        message           // of cutMessages and joinSent
	padded                 base.Buffer       // messages of sendRounds
	sent                   []runtime.Entries // these, by round
	mine                   uintptr           // what this rank announces
	slots                  uintptr           // of exchanged
	pieces                 []runtime.Piece
	reduced, largest       message
	spreadTo               base.Buffer
	sendCounts, sendDispls []int // of spread
	recvCounts, recvDispls []int
	all                    [1]runtime.Entries
	layout                 [3][2]int // of copyWords
}

const (
	// sampleCount is how many of its picks a rank shows to balance partitions.
	sampleCount = 4
	// bisectFan thresholds are tried in each of bisectRounds rounds, so that
	// 31 bits of magnitude shrink to an interval of 2^11 float32 numbers: the
	// estimated threshold is exact to a relative 2^-12.
	bisectFan    = 15
	bisectRounds = 5
)

// budget is what oktopk may send per rank and step: 6k(P-1)/P elements.
func budget(k, size int) int { return 6 * k * (size - 1) / size }

// overhead is how many elements a rank sends in a step beside entries.
func overhead(size int, rebalance, estimate bool) int {
	others := size - 1
	sum := 2 * others // lengths: alltoall, allgather
	if rebalance {
		sum += sampleCount * others
	}
	if estimate {
		sum += bisectRounds * ((2*bisectFan*others + size - 1) / size)
	}
	return sum
}

// again is the overhead of an estimate in a step that was to go without: lengths
// are exchanged once more, too.
func again(size int) int {
	return overhead(size, false, true) - overhead(size, false, false) + size - 1
}

func maxOverhead(size int) int { return overhead(size, true, false) + again(size) }

// roomy reports whether the budget suits k: what is sent beside entries takes less
// than half of it, and, among four ranks and more, every result has room for k entries,
// as those of gtopk have, which serves k otherwise.
func roomy(k, size int) bool {
	most := newLimits(k, size, overhead(size, true, false)).less(again(size))
	return 2*maxOverhead(size) < budget(k, size) && (size <= 3 || most.global == k)
}

// limits are the shares of a step's budget.
type limits struct {
	outgoing  int // entries that a rank sends to others in the reduction
	message   int // of them to one rank, if messages are padded
	global    int // entries of the result
	allgather int // elements for spreading and allgathering them
}

func newLimits(k, size, overhead int) limits {
	b := budget(k, size) - overhead
	s := b / 6
	// For one other rank there is room for all that may be sent, for several 1.4 times as
	// much as if all messages were equally long.
	return limits{outgoing: s, message: min(s, 7*s/(5*max(size-1, 1))), global: min(k, (b-2*s)/2), allgather: b - 2*s}
}

// less returns what is left if so many elements are sent for something else. (At
// most half of a budget is overhead, and a third was sent: a sixth is left.)
func (l limits) less(elements int) limits {
	l.allgather -= elements
	l.global = min(l.global, l.allgather/2)
	return l
}

// leaving gives padded messages all that each rank's share of the result leaves, so that
// little has to be cut of what was picked.
func (l limits) leaving(each, size int) limits {
	others := size - 1
	const lengths = 2 * headerWords // of messages, in front of them
	l.message = (l.allgather + 2*l.outgoing - (2*each+lengths)*others) / (2 * others) &^ 1
	l.outgoing, l.allgather = l.message*others, 2*each*others
	l.global = min(l.global, l.allgather/2)
	return l
}

// each returns how many sums every rank may add to the result, if none has more: 1.5
// times an equal share of k. A threshold that is kept lets 1.25k pass, and balanced
// partitions are not quite equal.
func (l limits) each(k, size int) int {
	return min(3*k/(2*size), l.allgather/(2*(size-1))) &^ 1 // even, so that messages are aligned
}

func oktopk(e *engine) exchange {
	x := &okExchange{partitionReducer: newPartitionReducer(e), allgather: newAllgather(e)}
	e.past = past{age: e.cfg.tuning.ThresholdInterval}
	x.sendCounts, x.sendDispls = make([]int, e.size), make([]int, e.size)
	x.recvCounts, x.recvDispls = make([]int, e.size), make([]int, e.size)
	x.sent = make([]runtime.Entries, e.size)
	e.makeNotice()
	for j := range sampleCount {
		x.quantiles = append(x.quantiles, (float64(j)+(float64(e.rank)+0.5)/float64(e.size))/sampleCount)
	}
	return x
}

// levelSteps is after how many steps in which partitions had about equally many sums they
// are taken to have so in the next one.
const levelSteps = 2

func (x *okExchange) run(ctx context.Context, picks runtime.Entries) result {
	x.settle(ctx)
	x.past.age++
	rebalance := x.past.steps%x.cfg.tuning.RebalanceInterval == 0
	estimate := x.past.age >= x.cfg.tuning.ThresholdInterval
	limit := newLimits(x.k, x.size, overhead(x.size, rebalance, estimate))
	x.past.steps++
	if rebalance {
		x.balancePartitions(ctx, picks)
	}
	padded := x.pads(limit.outgoing, rebalance)
	each := limit.each(x.k, x.size)
	room := 0 // of a rank in the result; 0: as lengths turn out
	if x.past.level == levelSteps && each >= 2*evenLength {
		room = each
	}
	// Where a threshold that is far off may do little harm, it is the next step that
	// estimates it. Then the host needs no number of this step to make it.
	steady := room > 0 && !estimate
	late := room > 0 && padded && x.late()
	ahead := 0 // room, where sums are gathered before the host knows how many there are
	if padded && x.order.Streams != nil {
		ahead = room
	}
	switch {
	case padded && room > 0:
		limit = limit.leaving(room, x.size)
	case padded:
		limit = limit.less(2 * ((x.size-1)*limit.message - limit.outgoing))
	}
	x.mine = x.at(x.announcement)
	if padded && x.order.Streams != nil {
		x.place(ctx, ahead)
	}
	x.countLarge(picks)
	var own, outgoing, sums runtime.Entries
	switch {
	case x.order.Streams == nil:
		own, outgoing, sums = x.reduceKnown(ctx, picks, limit, padded)
	case padded:
		above := uintptr(0)
		if ahead > 0 && steady { // nothing else is needed of the sums
			above = x.at(numBracket)
		}
		own, outgoing, sums = x.reducePadded(ctx, picks, limit, above)
	default:
		outgoing = x.cutOutgoing(picks, limit)
		own = x.copyOwn(picks)
		sums = x.reduce(ctx, outgoing, &own)
	}
	if estimate {
		x.estimate(ctx, sums)
	}
	if ahead > 0 {
		if !steady { // otherwise they are where they are sent from
			x.aboveOf(sums, x.at(numBracket), x.allgather.lists[x.rank])
		}
		lists, last := x.gatherAhead(ctx, own, late), x.size-1
		for t := 1; t < last; t++ {
			x.giveBack(x.sent[t], lists[x.to(t)])
		}
		if !late {
			x.learn(x.readAnnounced(ctx), each)
		}
		return result{lists: lists, scale: x.average, left: leftover{x.sent[last], lists[x.to(last)]}}
	}
	passed, total := x.pickGlobal(ctx, sums)
	if !steady && !estimate && x.far(total) { // say, because the gradients' scale has changed
		limit = limit.less(again(x.size))
		x.estimate(ctx, sums)
		passed, total = x.pickGlobal(ctx, sums)
	}
	x.learn(total, each)
	mine := x.share(passed, total, limit, room)
	mine = x.spread(ctx, mine, limit)
	global := x.allgather.collect(ctx, mine)

	if outgoing.Idx == picks.Idx {
		x.giveBack(picks, global)
	} else { // something was cut
		x.giveBack(own, global)
		x.giveBack(outgoing, global)
	}
	x.all[0] = global
	return result{lists: x.all[:], scale: x.average}
}

// learn has the next step be led by how many sums passed in this one: total, and
// x.allgather.lengths at each rank, who may add so many to the result. All ranks know
// the same, so they agree.
func (x *okExchange) learn(total, each int) {
	if slices.Max(x.allgather.lengths) <= each*14/15 {
		x.past.level = min(x.past.level+1, levelSteps)
	} else {
		x.past.level = 0
	}
	x.adapt(total)
}

// settle learns from the last step, if nothing in that needed its numbers: they were
// copied to the host behind its back. In a step that comes when the device has been given
// the selection, which it works on meanwhile. The steps before are settled for good: what
// undoes this one leaves that alone. If the device has undone the last one, nothing is
// learned from it.
func (x *okExchange) settle(ctx context.Context) {
	if !x.past.pending || x.err != nil {
		return
	}
	was := x.past
	x.receive(ctx)
	switch {
	case x.err != nil:
	case x.host[x.dropped] != 0: // with its partitions, so what was announced is not of those that there are
		x.setInt(x.dropped, 0)
		x.past = x.undone
	default:
		threshold := x.host[numBracket]
		x.past.pending = false
		x.checkSamples()
		x.learn(x.announced(), newLimits(x.k, x.size, overhead(x.size, false, false)).each(x.k, x.size))
		if now := x.host[numBracket]; now != threshold && x.restores != nothingSaved && x.err == nil {
			x.check(x.rt.Fill(base.At(x.before.Ptr, int(numBracket-numKept)), 1, dtype.I32, float64(now)))
		}
	}
	if x.err != nil {
		x.past = was // to be read again
	}
	x.ago = x.past
}

// balancePartitions makes partitions that hold about equally many of all ranks'
// picks. Each rank shows a regular sample of its picks, and the sorted samples
// of all ranks are cut into equal parts, as in parallel sorting by regular
// sampling. The samples are staggered by rank, so that ranks with like
// distributions together show P times as many quantiles.
//
// The paper averages the ranks' own boundaries instead, which balances ranks
// with like distributions only: if the entries of each rank cluster at a place
// of their own, all averages fall between the clusters.
func (x *okExchange) balancePartitions(ctx context.Context, picks runtime.Entries) {
	count := sampleCount * x.size
	all := x.samples + sampleCount
	sorted := all + number(count)
	if x.err == nil {
		x.check(x.kernels.Sample(picks, x.quantiles, x.n, x.at(x.samples)))
	}
	x.communicate(ctx, comm.AllGatherCall(x.at(x.samples), x.at(all), sampleCount, dtype.I32))
	x.copy(x.at(sorted), x.at(all), count)
	if x.err == nil {
		x.check(x.kernels.Balance(x.at(sorted), count, x.n, x.at(numBounds), x.size))
	}
}

// countLarge counts the picks that may overflow when those of all ranks are added.
func (x *okExchange) countLarge(picks runtime.Entries) {
	if x.cfg.NonFinite != PassNonFinite && x.err == nil {
		x.check(x.kernels.CountAbove(picks, x.at(numLimit), 1, base.At(x.mine, announcedLarge)))
	}
}

// announces reports whether a rank announced a word that is not zero.
func (x *okExchange) announces(word int) bool {
	for r := range x.size {
		if x.host[int(x.announcements)+r*announcedWords+word] != 0 {
			return true
		}
	}
	return false
}

// estimate finds the threshold that the k largest sums of all ranks pass. All
// ranks search the same intervals of magnitudes (as bits, so in their order)
// by counting how many sums pass; a lower end that at least k pass is kept.
func (x *okExchange) estimate(ctx context.Context, sums runtime.Entries) {
	counts := uintptr(0)
	bracket, fan := x.at(numBracket), x.at(numFan)
	for range bisectRounds {
		if x.err == nil {
			x.check(x.kernels.Narrow(bracket, counts, x.k, fan, bisectFan))
		}
		counts = x.at(numFanCounts)
		if x.err == nil {
			x.check(x.kernels.CountAbove(sums, fan, bisectFan, counts))
		}
		x.communicate(ctx, comm.AllReduceCall(counts, counts, bisectFan, dtype.I32, comm.Sum))
	}
	if x.err == nil {
		x.check(x.kernels.Narrow(bracket, counts, x.k, fan, bisectFan))
	}
	x.past.age = 0
}

// pickGlobal picks the sums of this rank's partition that pass the threshold. It
// returns them and how many sums of all ranks did, for which the host waits; x.allgather
// has the lengths of all ranks' lists.
func (x *okExchange) pickGlobal(ctx context.Context, sums runtime.Entries) (passed runtime.Entries, total int) {
	passed = x.passing(sums)
	if x.order.Streams == nil {
		total = x.allgather.exchangeLengths(ctx, passed, x.partitionLength)
	} else {
		x.communicate(ctx, comm.AllGatherCall(x.mine, x.at(x.announcements), announcedWords, dtype.I32))
		x.flagLarge(x.at(x.announcements), announcedWords)
		total = x.readAnnounced(ctx)
	}
	return exactly(passed, x.allgather.lengths[x.rank]), total
}

// passing returns the sums that pass the threshold. How many they are is announced.
func (x *okExchange) passing(sums runtime.Entries) runtime.Entries {
	passed := x.message(&x.reduced, sums.N)
	if x.order.Streams != nil {
		passed.Len = base.At(x.mine, announcedPassed)
	}
	x.aboveOf(sums, x.at(numBracket), passed)
	return passed
}

// gatherAhead gathers those of each rank's sums that passed the threshold, as many as there is
// room for ([okExchange.place]). What comes of this rank's own picks is known
// before: those that are not in its sums go back meanwhile. Late, the host gets to know in the
// next step what the ranks announced.
func (x *okExchange) gatherAhead(ctx context.Context, own runtime.Entries, late bool) []runtime.Entries {
	lists := x.allgather.lists
	words := messageWords(lists[0].N)
	x.add(comm.AllGatherCall(x.mine, lists[0].Len, words, dtype.I32))
	x.submit(ctx)
	x.giveBack(own, lists[x.rank])
	x.arrive(ctx)
	x.flagLarge(lists[0].Len, words)
	if !late {
		x.copyWords(x.at(x.announcements), announcedWords, lists[0].Len, words, announcedWords)
		return lists
	}
	x.posted = append(x.posted[:0], runtime.Span{Ptr: x.words.Ptr, Bytes: int(x.announcements) * base.WordSize})
	for _, l := range lists {
		x.posted = append(x.posted, runtime.Span{Ptr: l.Len, Bytes: announcedWords * base.WordSize})
	}
	if x.err == nil { // otherwise what settle has not read yet stays as it is
		x.past.pending, x.undone = true, x.ago
		if x.cfg.NonFinite == PassNonFinite { // otherwise it is not known yet whether the step stays
			x.post()
		}
	}
	return lists
}

// place finds room for messages of all ranks, one of each, in memory for collectives: for
// those to the other rank, if there are two ([okExchange.exchanged]), and for those with sums.
// Where these are gathered ahead, x.allgather.lists is that room for so many sums of each,
// and the words in front of its own message are what this rank announces.
func (x *okExchange) place(ctx context.Context, ahead int) {
	limit := newLimits(x.k, x.size, overhead(x.size, false, false))
	each := limit.each(x.k, x.size) // so many are gathered ahead if any
	gathered := x.size * messageWords(each)
	words := gathered
	if x.size == 2 {
		words += 2 * messageWords(max(limit.message, limit.leaving(each, x.size).message))
	}
	lists := x.allgather.lists
	fresh := lists[x.rank].Len == 0 || words*base.WordSize > x.sharedBytes
	if x.engine.share(ctx, words*base.WordSize); x.err != nil {
		return
	}
	x.slots = base.At(x.shared.Ptr, gathered)
	if ahead == 0 {
		return
	}
	x.mine = base.At(x.shared.Ptr, x.rank*messageWords(each))
	if fresh {
		x.fill(x.mine, headerWords)
	}
	for r := range lists {
		if x.err == nil {
			lists[r] = entriesAt(base.At(x.shared.Ptr, r*messageWords(each)), each)
		}
	}
}

// exchanged is the message of one of two ranks to the other one.
func (x *okExchange) exchanged(rank, room int) runtime.Entries {
	return entriesAt(base.At(x.slots, rank*messageWords(room)), room)
}

// What a rank lets all others know of, in front of its message where that goes with it.
const (
	announcedPassed = iota // how many sums passed the threshold; as the message's length, all that there is room for
	announcedLarge         // how many of the picks may overflow
	announcedLong          // how many messages were nearly too long
	announcedWords
)

// flagLarge has the flags be what the ranks announced, so many words apart.
func (x *okExchange) flagLarge(announced uintptr, apart int) {
	if x.cfg.NonFinite != PassNonFinite {
		x.flagged = true
		x.copyWords(x.flags, 1, base.At(announced, announcedLarge), apart, 1)
	}
}

// copyWords copies n words for each rank, between places that are so many words apart.
func (x *okExchange) copyWords(dst uintptr, dstApart int, src uintptr, srcApart, n int) {
	x.layout = [...][2]int{{dstApart, 1}, {srcApart, 1}, {x.size, n}}
	if x.err == nil {
		x.check(x.rt.CopyStrided(dst, x.layout[0][:], src, x.layout[1][:], x.layout[2][:], base.WordSize))
	}
}

// readAnnounced has the host wait for what the ranks announced, and returns how many sums
// of all ranks passed.
func (x *okExchange) readAnnounced(ctx context.Context) (total int) {
	x.read(ctx)
	x.checkSamples()
	total = x.announced()
	x.found(x.announces(announcedLarge))
	return total
}

// announced is readAnnounced when the numbers are read. It corrects x.allgather.lengths.
func (x *okExchange) announced() (total int) {
	all := x.checkWords(x.announcements, announcedWords*x.size, func(i int) int {
		if i%announcedWords == announcedPassed {
			return x.partitionLength(i / announcedWords)
		}
		return x.n
	}, "its number of entries")
	for r := range x.allgather.lengths {
		x.allgather.lengths[r] = int(all[r*announcedWords+announcedPassed])
	}
	x.past.even = !x.announces(announcedLong)
	return base.Displacements(x.allgather.lengths, x.allgather.displs)
}

// checkSamples checks what the ranks showed to balance partitions.
func (x *okExchange) checkSamples() {
	x.checkWords(x.samples+sampleCount, sampleCount*x.size, func(int) int { return max(x.n-1, 0) }, "the index of an entry")
}

// share cuts the sums of this rank that passed the threshold to those that go into
// the result: with room, to the first ones that have it, and otherwise to the largest, where all
// ranks together have more than the result may have. It corrects x.allgather.lengths.
func (x *okExchange) share(passing runtime.Entries, total int, limit limits, room int) runtime.Entries {
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
	if mine := counts[x.rank]; mine < passing.N {
		largest := exactly(x.message(&x.largest, mine), mine)
		x.topOf(passing, mine, largest)
		return largest
	}
	return passing
}

// divide cuts counts, which add up to total, to a limit.
func divide(counts []int, total, limit int) {
	// Every rank that has any sum gets one, and its share of the rest of the
	// limit. So the largest of each partition goes, and with it a NaN or infinity.
	// Rounding the running sums makes the shares add up to the limit exactly,
	// and no share exceeds its length. (The limit is never below x.size, and
	// total is above it.)
	sure := 0
	for _, n := range counts {
		sure += min(n, 1)
	}
	passed, granted := 0, 0
	for r, n := range counts {
		first := min(n, 1)
		passed += n - first
		share := passed*(limit-sure)/(total-sure) - granted
		counts[r] = first + share
		granted += share
	}
}

// spread moves sums between ranks so that all have equally many, if one has
// far more than the others: an allgather is as slow as its longest list. It
// corrects x.allgather.lengths.
func (x *okExchange) spread(ctx context.Context, mine runtime.Entries, limit limits) runtime.Entries {
	counts := x.allgather.lengths
	total := 0
	for _, n := range counts {
		total += n
	}
	if float64(slices.Max(counts)*x.size) <= x.cfg.tuning.BalanceFactor*float64(total) {
		return mine
	}
	// List r covers [start, end) of all sums, in rank order; afterwards
	// [r*total/P, (r+1)*total/P).
	even := func(r int) (from, to int) { return r * total / x.size, (r + 1) * total / x.size }
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
			return mine
		}
		if r == x.rank {
			for to := range counts {
				from, n := overlap(start, start+n, to)
				x.sendCounts[to], x.sendDispls[to] = n, max(0, min(from-start, mine.N))
			}
		}
		from, moves := overlap(start, start+n, x.rank)
		x.recvCounts[r], x.recvDispls[r] = moves, max(0, min(from, myTo)-myFrom)
		start += n
	}
	for r := range counts {
		f, t := even(r)
		counts[r] = t - f
	}
	n := myTo - myFrom
	x.allocate(&x.spreadTo, 2*n*base.WordSize)
	share := runtime.Entries{Idx: x.spreadTo.Ptr, Val: base.At(x.spreadTo.Ptr, n), N: n}
	x.add(comm.AllToAllVCall(mine.Idx, x.sendCounts, x.sendDispls, share.Idx, x.recvCounts, x.recvDispls, dtype.I32))
	x.add(comm.AllToAllVCall(mine.Val, x.sendCounts, x.sendDispls, share.Val, x.recvCounts, x.recvDispls, dtype.F32))
	x.engine.together(ctx)
	return share
}

// adapt corrects the threshold after a step in which passed sums passed it,
// and has the next step estimate it when it is far off.
func (x *okExchange) adapt(passed int) {
	used := x.float(numBracket)
	x.past.globalThreshold = used
	if next := correct(used, passed, x.k, thresholdStep); next != used {
		x.setInt(numBracket, int32(math.Float32bits(next)))
	}
	if x.far(passed) {
		x.past.age = x.cfg.tuning.ThresholdInterval
	}
}

// far reports whether a threshold that so many sums passed is no good.
func (x *okExchange) far(passed int) bool { return passed > 2*x.k || 4*passed < x.k }
