package schedule

import (
	"math/bits"

	"github.com/tutti-go/tutti/internal/hostops"
)

// Reductions combine the ranks' data on the host, in rank order, with the same
// kernel as comm/local. The result therefore does not depend on the MPI
// library, the number of messages or who receives first, and is the same on
// every rank to the last bit. Three schedules serve all of them:
//
//   - whole: everybody sends everything to whom the result is for. One step,
//     for messages where latency counts.
//   - gathered: the same, but contributions go by way of other ranks: after k rounds a rank has those of 2^k
//     ranks, from itself on, and sends them all (Bruck et al., "Efficient algorithms for all-to-all
//     communications in multiport message-passing systems", 1997). With many ranks, ⌈log₂P⌉ messages take
//     less than P-1.
//   - by shares: rank r receives and reduces share r, then sends it on to whom
//     the result is for. Two steps, each rank sends and receives 2(P-1)/P of
//     the data, which is the least possible (Patarasuk and Yuan, "Bandwidth
//     optimal all-reduce algorithms for clusters of workstations", 2009).
//
// Shares go to all ranks at once. On links between hosts, long ones go to one rank at a
// time, and their results around a ring, as in that paper: flows that meet on a link hold
// each other up, so that it takes twice as long as the bytes need.

// wholeLimit is the maximum number of bytes that a rank receives in the whole schedule.
const wholeLimit = 128 << 10

// gatheredRanks is from how many ranks on an AllReduce is gathered. A message over tcp takes some 30 µs of
// both processors, and another round as long as a message and its way: 8 ranks save 4 messages for 2
// rounds more, fewer ranks less. Where the way takes milliseconds, no round is worth it, nor where relays
// only go on while they wait.
const gatheredRanks = 8

// gatheredBytes is how long an AllReduce that is gathered may be, for each rank, and longestGathered the most: with
// more ranks a reduction by shares takes more messages, and so pays later.
const (
	gatheredBytes   = 1 << 10
	longestGathered = 16 << 10
)

// blockBytes is the amount of data that is reduced at once by shares. Longer buffers are split, so that working memory
// is bounded, stays in the caches, and one block's messages overlap with the next one's arithmetic.
const blockBytes = 4 << 20

// longShare is the length of shares from which they go over links one at a time.
const longShare = 64 << 10

// cacheLine is the alignment of shares and of working memory, in bytes.
const cacheLine = 64

func roundUp(n, unit int) int { return (n + unit - 1) / unit * unit }

// receives reports whether a rank gets the whole result.
func (r *reduction) receives(rank int) bool {
	return r.to == everybody || r.to == rank
}

// length is the number of elements in a rank's share.
func (r *reduction) length(rank int) int {
	return max(0, min(r.share, r.total-rank*r.share))
}

// reduce plans a reduction whose result goes to one rank or to all.
func (p planner) reduce(to int) {
	count := p.c.Count
	size := p.c.DType.Size()
	gathered := p.gathers(to)
	whole := gathered || p.c.Bytes()*(p.size-1) <= wholeLimit
	block := count
	switch {
	case p.sharedReduce(to):
		return
	case !whole:
		block = blockBytes / size
	}
	for begin := 0; ; begin += block {
		n := min(block, count-begin)
		o := p.operands(begin, to)
		r := &o.reduction
		r.total = n
		o.reads = spanOf(o.send, n*size)
		if r.receives(p.rank) {
			o.writes = spanOf(o.recv, n*size)
		}
		switch {
		case whole:
			o.Step = stepWhole
			if gathered {
				o.Step = stepGathered
				o.work = p.size * n * size
			} else if r.receives(p.rank) {
				o.work = (p.size - 1) * roundUp(n*size, cacheLine)
			}
		default:
			r.share = roundUp((n+p.size-1)/p.size, cacheLine)
			r.stride = r.share
			r.peers = p.peersAtOnce(r.share * size)
			o.work = (p.size - 1) * roundUp(r.share*size, cacheLine)
		}
		p.add(o)
		if begin+block >= count {
			return
		}
	}
}

// reduceScatter plans a ReduceScatter.
func (p planner) reduceScatter() {
	if p.sharedReduce(nobody) {
		return
	}
	count := p.c.Count
	size := p.c.DType.Size()
	block := max(1, blockBytes/size/p.size)
	for begin := 0; ; begin += block {
		n := min(block, count-begin)
		o := p.operands(begin, nobody)
		o.reduction = reduction{
			to:     nobody,
			share:  n,
			stride: count,
			total:  n * p.size,
			peers:  p.peersAtOnce(n * size),
		}
		o.work = (p.size - 1) * roundUp(n*size, cacheLine)
		o.reads = spanOf(o.send, (count*(p.size-1)+n)*size)
		o.writes = spanOf(o.recv, n*size)
		p.add(o)
		if begin+block >= count {
			return
		}
	}
}

// peersAtOnce returns the number of ranks to which shares of this size are sent at a time.
func (p planner) peersAtOnce(bytes int) int {
	if p.Links != OneHost && p.segment.memory == nil && bytes >= longShare {
		return 1
	}
	return max(p.size-1, 1)
}

// operands returns a reduction by shares of the data beginning at an element.
func (p planner) operands(begin, to int) *Op {
	o := p.op(stepShares)
	offset := uintptr(begin * o.dt.Size())
	o.send += offset
	o.recv += offset
	o.reduction.to = to
	return o
}

// gathers reports whether ranks gather all contributions of a reduction that each of them computes.
func (p planner) gathers(to int) bool {
	short := p.c.Bytes() <= min(p.size*gatheredBytes, longestGathered)
	return short && to == everybody && p.size >= gatheredRanks && p.waiter != nil && p.Links != LongLinks
}

// stepGathered runs the gathered schedule. Working memory has the contributions of this rank and of the ranks after it.
// In the last round it receives only the first ones of the peer's contributions.
func stepGathered(e *Engine, o *Op) bool {
	bytes := o.reduction.total * o.dt.Size()
	contribution := func(rank int) uintptr {
		return o.memory + uintptr((rank+e.size-e.rank)%e.size*bytes)
	}
	if o.phase == bits.Len(uint(e.size-1)) {
		for r := range o.srcs {
			o.srcs[r] = contribution(r)
		}
		o.dst[0] = o.recv
		hostops.Reduce(o.dst[:1], o.srcs, o.reduction.total, o.dt, o.reduce, false)
		return true
	}
	if o.phase == 0 {
		hostops.Copy(o.memory, o.send, bytes, false)
	}
	distance := 1 << o.phase
	source := (e.rank + distance) % e.size
	length := min(distance, e.size-distance) * bytes
	e.recvBytes(o, o.tag, contribution(source), length, source)
	e.sendBytes(o, o.tag, o.memory, length, (e.rank+e.size-distance)%e.size)
	return false
}

// stepWhole runs the whole schedule.
func stepWhole(e *Engine, o *Op) bool {
	r := &o.reduction
	receives := r.receives(e.rank)
	bytes := r.total * o.dt.Size()
	if o.phase == 1 {
		if receives {
			o.dst[0] = o.recv
			hostops.Reduce(o.dst[:1], o.srcs, r.total, o.dt, o.reduce, false)
		}
		return true
	}
	if receives {
		e.recvOperands(o, bytes, 0, 1, e.size-1)
		o.srcs[e.rank] = o.send
	}
	for i := 1; i < e.size; i++ {
		dest := (e.rank + i) % e.size
		if r.receives(dest) {
			e.sendBytes(o, o.tag, o.send, bytes, dest)
		}
	}
	return false
}

// stepShares runs the schedule by shares: rounds in which shares are exchanged, and as
// many in which results are spread, each with the ranks at the distances from first to
// last, those to send to after this one, those to receive from before it.
//
// An AllReduce of ranks 0, 1 and 2, whose shares are A, B and C. Where shares go to all ranks at once:
//
//	phase 0   exchange   0 sends B0 to 1, C0 to 2    1 sends C1 to 2, A1 to 0    2 sends A2 to 0, B2 to 1
//	phase 1   reduce     0: A = A0+A1+A2             1: B = B0+B1+B2             2: C = C0+C1+C2
//	          spread     0 sends A to 1 and 2        1 sends B to 2 and 0        2 sends C to 0 and 1
//
// Where they go to one rank at a time:
//
//	phase 0   exchange   0 sends B0 to 1             1 sends C1 to 2             2 sends A2 to 0
//	phase 1   exchange   0 sends C0 to 2             1 sends A1 to 0             2 sends B2 to 1
//	phase 2   reduce     0: A = A0+A1+A2             1: B = B0+B1+B2             2: C = C0+C1+C2
//	          forward    0 sends A to 1              1 sends B to 2              2 sends C to 0
//	phase 3   forward    0 sends C to 1              1 sends A to 2              2 sends B to 0
//
// Operands are added in rank order, whichever comes first.
func stepShares(e *Engine, o *Op) bool {
	r := &o.reduction
	rounds := max(1, (e.size-1+r.peers-1)/r.peers)
	first := o.phase%rounds*r.peers + 1
	last := min(first+r.peers, e.size) - 1
	switch o.phase / rounds {
	case 0:
		e.exchangeShares(o, first, last)
	case 1:
		if first == 1 {
			o.dst[0] = o.result(e.rank)
			hostops.Reduce(o.dst[:1], o.srcs, r.length(e.rank), o.dt, o.reduce, false)
		}
		if r.to == everybody && first == last {
			e.forwardShares(o, first)
		} else {
			e.spreadShares(o, first, last)
		}
	}
	return o.phase == 2*rounds
}

// share returns the address of a rank's share in a buffer of all shares, and its length in bytes.
func (o *Op) share(buffer uintptr, rank int) (address uintptr, bytes int) {
	r := &o.reduction
	size := o.dt.Size()
	return buffer + uintptr(rank*r.stride*size), r.length(rank) * size
}

// result returns the address where this rank stores its share of the result.
func (o *Op) result(rank int) uintptr {
	switch o.reduction.to {
	case nobody:
		return o.recv
	case everybody, rank:
		address, _ := o.share(o.recv, rank)
		return address
	}
	return o.memory // in place of an operand
}

// exchangeShares sends ranks their shares of this rank's data.
func (e *Engine) exchangeShares(o *Op, first, last int) {
	spare := uintptr(0)
	if to := o.reduction.to; (to == everybody || to == nobody) && !o.reads.overlaps(o.writes) {
		spare = o.result(e.rank)
	}
	operand, bytes := o.share(o.send, e.rank)
	e.recvOperands(o, bytes, spare, first, last)
	o.srcs[e.rank] = operand
	for i := first; i <= last; i++ {
		dest := (e.rank + i) % e.size
		address, bytes := o.share(o.send, dest)
		e.sendBytes(o, o.tag, address, bytes, dest)
	}
}

// recvOperands receives bytes from other ranks, and stores their addresses in o.srcs. They go to working memory; those
// of the previous rank go to spare, if there is such a place.
func (e *Engine) recvOperands(o *Op, bytes int, spare uintptr, first, last int) {
	for i := first; i <= last; i++ {
		src := (e.rank + e.size - i) % e.size
		buffer := spare
		if i > 1 || spare == 0 {
			buffer = o.memory + uintptr((i-1)*roundUp(bytes, cacheLine))
		}
		o.srcs[src] = buffer
		e.recvBytes(o, o.tag, buffer, bytes, src)
	}
}

// spreadShares sends this rank's share of the result to the ranks that get the result, and receives the other shares.
func (e *Engine) spreadShares(o *Op, first, last int) {
	r := &o.reduction
	if r.receives(e.rank) {
		for i := first; i <= last; i++ {
			src := (e.rank + e.size - i) % e.size
			address, bytes := o.share(o.recv, src)
			e.recvBytes(o, o.tag+1, address, bytes, src)
		}
	}
	if r.to == nobody || r.to == e.rank {
		return
	}
	for i := first; i <= last; i++ {
		dest := (e.rank + i) % e.size
		if r.receives(dest) {
			e.sendBytes(o, o.tag+1, o.dst[0], r.length(e.rank)*o.dt.Size(), dest)
		}
	}
}

// forwardShares sends the share of the result that arrived in the previous round to the next rank; in the first round
// it sends this rank's.
func (e *Engine) forwardShares(o *Op, round int) {
	source := (e.rank + e.size - round) % e.size
	address, bytes := o.share(o.recv, source)
	e.recvBytes(o, o.tag+1, address, bytes, (e.rank+e.size-1)%e.size)

	source = (e.rank + 1 + e.size - round) % e.size
	address, bytes = o.share(o.recv, source)
	e.sendBytes(o, o.tag+1, address, bytes, (e.rank+1)%e.size)
}
