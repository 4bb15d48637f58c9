package distributed

import (
	"context"
	"math"
	"slices"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// okExchange is the exchange of Ok-Topk (Li and Hoefler, "Near-Optimal Sparse
// Allreduce for Distributed Deep Learning", PPoPP 2022): split and reduce by
// regions that are balanced from time to time, pick the globally largest sums
// by a reused threshold, gather them.
//
// # Volume
//
// The paper bounds what a rank sends in a step by 6k(P-1)/P elements (an index
// and a value count one each, an allgather counts what a rank receives): a
// third for the split, two thirds for balancing and gathering. It assumes that
// thresholds pick k entries and regions hold equal shares. Here it holds
// whatever the gradients are, because every message is paid from a budget
// before it is sent:
//
//  1. B = floor(6k(P-1)/P) minus the overhead of the step, which does not
//     depend on data: the lengths that are exchanged before the split and
//     before the gather, samples when regions are balanced, counts when the
//     threshold is estimated ([overhead]).
//  2. In the split a rank sends at most S = floor(B/6) entries to others, so
//     2S <= B/3 elements. If it picked more for others, the largest S go and
//     the rest stays in its residual.
//  3. At most G = min(k, floor((B-2S)/2)) entries make up the result. If more
//     sums pass the global threshold, each rank's share is cut in proportion
//     (but not to nothing) and it keeps its largest; the lengths that all ranks know say so without
//     a further message. A rank receives at most all G of them: 2G elements.
//     2S + 2G <= B, so the bound holds for each rank and each step.
//  4. Spreading the sums before they are gathered would cost a rank up to
//     4(G - floor(G/P)) elements altogether. All ranks compute the exact cost
//     from the lengths, and it is only done if no rank exceeds B - 2S.
//
// For P = 2, the tightest case, 2S + 2G is about k + 2k: the whole budget. If k
// is too small to pay the overhead, [find] takes another exchange.
//
// What a rank receives in the split is not in that sum. Balanced regions keep
// it near 2k; see balanceRegions.
//
// # Conservation
//
// A rank takes the entries that it sent (or had in its own region) out of its
// residual, and when the result is known gives those back whose index is not
// in it. A sum in the result contains the contributions of all ranks that sent
// one, so nothing is lost or counted twice.
type okExchange struct {
	*splitter
	gather *gatherer

	threshold float32 // of the sums
	age       int     // steps since it was estimated
	steps     int

	rest, trimmed                     listBuffer // limitOutgoing
	nonzeros, reduced, largest, share listBuffer

	// Of spread; submitSpread is what it gives to Group.
	sendCounts, sendDispls []int
	recvCounts, recvDispls []int
	from, to               list
	submitSpread           func() error
}

const (
	// sampleCount is how many of its picks a rank shows to balance regions.
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

func maxOverhead(size int) int { return overhead(size, true, true) }

// limits are the shares of a step's budget.
type limits struct {
	outgoing int // entries that a rank sends to others in the split
	global   int // entries of the result
	gather   int // elements for spreading and gathering them
}

func newLimits(k, size, overhead int) limits {
	b := budget(k, size) - overhead
	s := b / 6
	return limits{outgoing: s, global: min(k, (b-2*s)/2), gather: b - 2*s}
}

func oktopk(e *engine) exchange {
	x := &okExchange{splitter: newSplitter(e), gather: newGatherer(e), age: e.cfg.ThresholdInterval}
	x.sendCounts, x.sendDispls = make([]int, e.size), make([]int, e.size)
	x.recvCounts, x.recvDispls = make([]int, e.size), make([]int, e.size)
	x.submitSpread = x.submitSpreadLists
	return x
}

func (x *okExchange) run(ctx context.Context, picks list) int {
	x.age++
	rebalance := x.steps%x.cfg.RebalanceInterval == 0
	estimate := x.age >= x.cfg.ThresholdInterval
	limit := newLimits(x.k, x.size, overhead(x.size, rebalance, estimate))
	x.steps++
	if rebalance {
		x.balanceRegions(ctx, picks)
	}
	own, outgoing := x.limitOutgoing(picks, limit.outgoing)
	added := x.reduce(ctx, own, outgoing)
	if estimate {
		x.estimate(ctx, added)
	}
	mine, total := x.pickGlobal(ctx, added, limit)
	x.clean()
	mine = x.spread(ctx, mine, total, limit)
	global := x.gather.collect(ctx, mine)

	sent := [2]list{own, outgoing}
	if outgoing.idx == picks.idx { // nothing was cut: own is part of it
		sent = [2]list{picks}
	}
	for _, l := range sent {
		x.zeroAt(x.residual, l)
		x.giveBack(l, global)
	}
	x.scale(global.val, global.n, x.average)
	x.scatterSet(x.work, global)
	x.stats.GlobalThreshold = x.threshold
	x.adapt(total)
	return global.n
}

// balanceRegions makes regions that hold about equally many of all ranks'
// picks. Each rank shows a regular sample of its picks, and the sorted samples
// of all ranks are cut into equal parts, as in parallel sorting by regular
// sampling. The samples are staggered by rank, so that ranks with like
// distributions together show P times as many quantiles.
//
// The paper averages the ranks' own boundaries instead, which balances ranks
// with like distributions only: if the entries of each rank cluster at a place
// of their own, all averages fall between the clusters.
func (x *okExchange) balanceRegions(ctx context.Context, picks list) {
	for j := range sampleCount {
		quantile := (float64(j) + (float64(x.rank)+0.5)/float64(x.size)) / sampleCount
		if picks.n == 0 {
			x.host[j] = int32(quantile * float64(x.n))
			continue
		}
		if x.err == nil {
			position := int(quantile * float64(picks.n))
			x.check(x.rt.CopyOut(hostmem.Bytes(x.host[j:j+1]), at(picks.idx, position)))
		}
	}
	samples := x.allGatherWords(ctx, sampleCount)
	x.checkWords(samples, x.n-1, "the index of an entry")
	slices.Sort(samples)
	for r := 1; r < x.size; r++ {
		x.bounds[r] = samples[r*sampleCount]
	}
}

// limitOutgoing locates the regions in the picks and cuts those for other
// ranks down to the limit largest. It returns the picks in this rank's own
// region and the list to send from: all picks if nothing was cut.
func (x *okExchange) limitOutgoing(picks list, limit int) (own, outgoing list) {
	x.locate(picks)
	from, to := x.positions[x.rank], x.positions[x.rank+1]
	own = picks.part(from, to)
	others := picks.n - own.n
	if others <= limit {
		return own, picks
	}
	rest := x.list(&x.rest, others)
	x.copyList(rest, picks.part(0, from))
	x.copyList(rest.part(from, others), picks.part(to, picks.n))
	outgoing = x.topKOf(rest, limit, x.list(&x.trimmed, limit))
	x.locate(outgoing)
	return own, outgoing
}

// estimate finds the threshold that the k largest sums of all ranks pass. All
// ranks search the same intervals of magnitudes (as bits, so in their order)
// by counting how many sums pass; a lower end that at least k pass is kept.
func (x *okExchange) estimate(ctx context.Context, added int) {
	_, length := x.region()
	sums, _ := x.inRegion(tiny, x.list(&x.nonzeros, min(added, length)))
	const parts = bisectFan + 1
	low, high := uint32(1), uint32(1)<<31
	for range bisectRounds {
		width := (high - low) / parts
		for j := range bisectFan {
			bits := low + width*uint32(j+1)
			x.host[j] = int32(x.countAbove(sums.val, sums.n, math.Float32frombits(bits)))
		}
		passed := 0
		for _, count := range x.sumWords(ctx, bisectFan) {
			if int(count) < x.k {
				break
			}
			passed++
		}
		if passed < bisectFan {
			high = low + width*uint32(passed+1)
		}
		low += width * uint32(passed)
	}
	x.threshold, x.age = math.Float32frombits(low), 0
}

// pickGlobal picks the sums of this rank's region that go into the result. It
// returns them and how many sums of all ranks passed the threshold; x.gather
// has the lengths of all ranks' lists.
func (x *okExchange) pickGlobal(ctx context.Context, added int, limit limits) (mine list, total int) {
	_, length := x.region()
	reduced, count := x.inRegion(x.threshold, x.list(&x.reduced, min(added, length)))
	total = x.gather.exchangeCounts(ctx, count)
	if total <= limit.global {
		return reduced, total
	}
	// Every rank that has any sum gets one, and its share of the rest of the
	// limit. So the largest of each region goes, and with it a NaN or infinity.
	// Rounding the running sums makes the shares add up to the limit exactly,
	// and no share exceeds its length. (The limit is never below x.size, and
	// total is above it.)
	counts := x.gather.counts
	sure := 0
	for _, n := range counts {
		sure += min(n, 1)
	}
	passed, granted := 0, 0
	for r, n := range counts {
		first := min(n, 1)
		passed += n - first
		share := passed*(limit.global-sure)/(total-sure) - granted
		counts[r] = first + share
		granted += share
	}
	if mine := counts[x.rank]; mine < count {
		reduced = x.topKOf(reduced, mine, x.list(&x.largest, mine))
	}
	return reduced, total
}

// spread moves sums between ranks so that all have equally many, if one has
// far more than the others: an allgather is as slow as its longest list. It
// corrects x.gather.counts.
func (x *okExchange) spread(ctx context.Context, mine list, passed int, limit limits) list {
	counts := x.gather.counts
	total := min(passed, limit.global)
	if float64(slices.Max(counts)*x.size) <= x.cfg.BalanceFactor*float64(total) {
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
		if 2*(n-stays)+2*(total-(t-f)) > limit.gather {
			return mine
		}
		if r == x.rank {
			for to := range counts {
				from, n := overlap(start, start+n, to)
				x.sendCounts[to], x.sendDispls[to] = n, max(0, min(from-start, mine.n))
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
	x.from, x.to = mine, x.list(&x.share, myTo-myFrom)
	x.fence(ctx)
	if x.err == nil {
		x.check(x.c.Group(x.submitSpread))
	}
	x.join(ctx)
	return x.to
}

func (x *okExchange) submitSpreadLists() error {
	return firstError(
		x.c.AllToAllV(x.from.idx, x.sendCounts, x.sendDispls, x.to.idx, x.recvCounts, x.recvDispls, dtype.I32),
		x.c.AllToAllV(x.from.val, x.sendCounts, x.sendDispls, x.to.val, x.recvCounts, x.recvDispls, dtype.F32))
}

// adapt corrects the threshold after a step in which passed sums passed it,
// and has it estimated anew when it is far off. All ranks know passed, so they
// agree.
func (x *okExchange) adapt(passed int) {
	x.threshold = correct(x.threshold, passed, x.k, x.cfg.ThresholdStep)
	if passed > 2*x.k || 4*passed < x.k {
		x.age = x.cfg.ThresholdInterval
	}
}
