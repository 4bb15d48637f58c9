package distributed

import (
	"context"

	"github.com/tutti-go/tutti/dtype"
)

// splitTag marks the messages of splitter: indices, and one above it values.
const splitTag uint32 = 0x73706c00

// splitter is the first half of an allreduce by regions: the index space is
// cut into one region per rank, each rank sends every other rank the picks in
// its region, and adds up what it receives in its own. It is SparCML's split
// (Renggli et al., SC 2019, section 5.3.2) with the rotated, throttled
// exchange of Ok-Topk (Li and Hoefler, section 3.1.1): in round t, rank r sends
// to rank r+t and receives from rank r-t, so that no rank gets messages from
// all others at once.
type splitter struct {
	*engine
	bounds    []int32 // region r is [bounds[r], bounds[r+1])
	positions []int   // of the bounds in a list of picks

	received   listBuffer
	sources    []list // by round, so by distance from this rank
	fromWhom   []int  // lengths, by rank
	first, end int    // rounds of the group being submitted
	outgoing   list
	submit     func() error
}

func newSplitter(e *engine) *splitter {
	s := &splitter{engine: e, bounds: make([]int32, e.size+1), positions: make([]int, e.size+1),
		sources: make([]list, e.size), fromWhom: make([]int, e.size)}
	for r := range s.bounds {
		s.bounds[r] = int32(e.n / e.size * r)
	}
	s.bounds[e.size] = int32(e.n)
	s.submit = s.submitRounds
	return s
}

// region returns the start and the length of this rank's region.
func (s *splitter) region() (start, n int) {
	start = int(s.bounds[s.rank])
	return start, int(s.bounds[s.rank+1]) - start
}

// locate finds the regions of a list of picks: those for rank r are
// [s.positions[r], s.positions[r+1]).
func (s *splitter) locate(l list) {
	if s.err != nil || l.n == 0 {
		clear(s.positions)
		return
	}
	s.check(s.kernels.LowerBounds(l.idx, l.n, s.bounds, s.positions))
}

// reduce adds up, in this rank's region of e.work, the entries of own (this
// rank's picks for itself) and what the other ranks' outgoing lists hold for
// this rank. s.positions locates the regions in outgoing; the part for this
// rank is not looked at. It returns the number of entries added, which is at
// least the number of those that are not zero now.
func (s *splitter) reduce(ctx context.Context, own, outgoing list) int {
	for r := range s.size {
		s.host[r] = 0
		if r != s.rank {
			s.host[r] = int32(s.positions[r+1] - s.positions[r])
		}
	}
	counts := s.allToAllWords(ctx)
	_, length := s.region()
	s.checkWords(counts, length, "its number of entries for this rank's region")
	incoming := 0
	for r, n := range counts {
		s.fromWhom[r] = int(n)
		incoming += int(n)
	}
	all := s.list(&s.received, incoming)
	s.sources[0] = own
	offset := 0
	for t := 1; t < s.size; t++ {
		n := s.fromWhom[s.source(t)]
		s.sources[t] = all.part(offset, offset+n)
		offset += n
	}

	s.scatterAdd(s.work, own)
	s.outgoing = outgoing
	for s.first = 1; s.first < s.size; s.first = s.end {
		s.end = min(s.first+s.cfg.Throttle, s.size)
		s.fence(ctx)
		if s.err == nil {
			s.check(s.c.Group(s.submit))
		}
		s.join(ctx)
		for _, l := range s.sources[s.first:s.end] {
			s.scatterAdd(s.work, l)
		}
	}
	return own.n + incoming
}

// source and destination are the peers of a round.
func (s *splitter) source(round int) int      { return (s.rank - round + s.size) % s.size }
func (s *splitter) destination(round int) int { return (s.rank + round) % s.size }

// submitRounds submits the messages of rounds [s.first, s.end). Both sides
// know the lengths, so empty messages are not sent.
func (s *splitter) submitRounds() error {
	for t := s.first; t < s.end; t++ {
		to := s.destination(t)
		out := s.outgoing.part(s.positions[to], s.positions[to+1])
		if out.n > 0 {
			if err := firstError(
				s.c.Send(out.idx, out.n, dtype.I32, to, splitTag),
				s.c.Send(out.val, out.n, dtype.F32, to, splitTag+1)); err != nil {
				return err
			}
		}
		from, in := s.source(t), s.sources[t]
		if in.n > 0 {
			if err := firstError(
				s.c.Recv(in.idx, in.n, dtype.I32, from, splitTag),
				s.c.Recv(in.val, in.n, dtype.F32, from, splitTag+1)); err != nil {
				return err
			}
		}
	}
	return nil
}

// clean makes this rank's region of e.work zero again.
func (s *splitter) clean() {
	for _, l := range s.sources {
		s.zeroAt(s.work, l)
	}
}

// inRegion picks from this rank's region of e.work the entries of magnitude >=
// threshold, at most dst.n of them, and returns how many there are in all.
func (s *splitter) inRegion(threshold float32, dst list) (list, int) {
	start, n := s.region()
	picks, total := s.aboveThreshold(at(s.work, start), n, threshold, dst)
	s.offset(picks, start)
	return picks, total
}

func (s *splitter) offset(l list, by int) {
	if s.err == nil && l.n > 0 && by != 0 {
		s.check(s.kernels.OffsetIndices(l.idx, l.n, int32(by)))
	}
}

// regionExchange is the split followed by an allgather of the reduced regions.
type regionExchange struct {
	*splitter
	gather  *gatherer
	orDense bool // gather whole regions when lists of entries would be longer
	reduced listBuffer
}

func regions(e *engine) exchange {
	return &regionExchange{splitter: newSplitter(e), gather: newGatherer(e)}
}

// regionsOrDense is SparCML's dynamic allreduce: sparse as long as that is
// less. An entry is two words, so a result with more than n/2 entries goes as
// n values.
func regionsOrDense(e *engine) exchange {
	return &regionExchange{splitter: newSplitter(e), gather: newGatherer(e), orDense: true}
}

func (x *regionExchange) run(ctx context.Context, picks list) int {
	x.locate(picks)
	own := picks.part(x.positions[x.rank], x.positions[x.rank+1])
	added := x.reduce(ctx, own, picks)
	_, length := x.region()
	reduced, count := x.inRegion(tiny, x.list(&x.reduced, min(added, length)))
	total := x.gather.exchangeCounts(ctx, count)
	x.zeroAt(x.residual, picks)
	if x.orDense && 2*total > x.n {
		x.gatherRegions(ctx)
		return total
	}
	global := x.gather.collect(ctx, reduced)
	x.scale(global.val, global.n, x.average)
	// All sums of this rank's region are among them, so their averages replace
	// what the reduction left in e.work.
	x.scatterSet(x.work, global)
	return total
}

// gatherRegions completes e.work: every rank has its region, and gets the rest.
func (x *regionExchange) gatherRegions(ctx context.Context) {
	g := x.gather
	for r := range g.counts {
		g.displs[r] = int(x.bounds[r])
		g.counts[r] = int(x.bounds[r+1] - x.bounds[r])
	}
	start, _ := x.region()
	x.fence(ctx)
	if x.err == nil {
		x.check(x.c.AllGatherV(at(x.work, start), x.work, g.counts, g.displs, dtype.F32))
	}
	x.join(ctx)
	x.scale(x.work, x.n, x.average)
}
