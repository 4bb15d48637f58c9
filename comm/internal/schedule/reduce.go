package schedule

import (
	"github.com/tutti-go/tutti/internal/hostops"
)

// Reductions combine the ranks' data on the host, in rank order, with the same
// kernel as comm/local. The result therefore does not depend on the MPI
// library, the number of messages or who receives first, and is the same on
// every rank to the last bit. Two schedules serve all of them:
//
//   - whole: everybody sends everything to whom the result is for. One step,
//     for messages where latency counts.
//   - by shares: rank r receives and reduces share r, then sends it on to whom
//     the result is for. Two steps, each rank sends and receives 2(P-1)/P of
//     the data, which is the least possible (Patarasuk and Yuan, "Bandwidth
//     optimal all-reduce algorithms for clusters of workstations", 2009).
//
// Shares go to all ranks at once. On links between hosts, long ones go to one rank at a
// time, and their results around a ring, as in that paper: flows that meet on a link hold
// each other up, so that it takes twice as long as the bytes need.

// wholeLimit is how many bytes a rank receives at most in the whole schedule.
const wholeLimit = 128 << 10

// blockBytes is how much data is reduced at once by shares. Longer buffers are
// cut up, so that working memory is bounded, stays in the caches, and one
// block's messages overlap with the next one's arithmetic.
const blockBytes = 4 << 20

// longShare is the length of shares from which on they go over links one at a time.
const longShare = 64 << 10

// cacheLine is the alignment of shares and of working memory, in bytes.
const cacheLine = 64

func roundUp(n, unit int) int { return (n + unit - 1) / unit * unit }

// reduce plans a reduction whose result goes to one rank or to everybody.
func (p planner) reduce(to int) {
	c, size := p.c, p.c.DType.Size()
	mine := to == everybody || to == p.rank
	shared := p.segment.fits(c.Bytes())
	whole := c.Bytes()*(p.size-1) <= wholeLimit
	block := c.Count
	if !shared && !whole {
		block = blockBytes / size
	}
	for from, first := 0, true; first || from < c.Count; from, first = from+block, false {
		n := min(block, c.Count-from)
		o := p.operands(from, to)
		o.total = n
		o.reads = spanOf(o.send, n*size)
		if mine {
			o.writes = spanOf(o.recv, n*size)
		}
		switch {
		case shared:
			o.Step, o.shared, o.most = stepSharedReduce, true, n*size
		case whole:
			o.Step = stepWhole
			if mine {
				o.work = (p.size - 1) * roundUp(n*size, cacheLine)
			}
		default:
			o.share = roundUp((n+p.size-1)/p.size, cacheLine)
			o.stride, o.peers = o.share, p.peersAtOnce(o.share*size)
			o.work = (p.size - 1) * roundUp(o.share*size, cacheLine)
		}
		p.add(o)
	}
}

// reduceScatter plans a ReduceScatter.
func (p planner) reduceScatter() {
	c, size := p.c, p.c.DType.Size()
	block := max(1, blockBytes/size/p.size)
	for from, first := 0, true; first || from < c.Count; from, first = from+block, false {
		n := min(block, c.Count-from)
		o := p.operands(from, nobody)
		o.share, o.stride, o.total, o.peers = n, c.Count, n*p.size, p.peersAtOnce(n*size)
		o.work = (p.size - 1) * roundUp(n*size, cacheLine)
		o.reads = spanOf(o.send, (o.stride*(p.size-1)+n)*size)
		o.writes = spanOf(o.recv, n*size)
		p.add(o)
	}
}

// peersAtOnce is the number of ranks to which shares of that many bytes go at a time.
func (p planner) peersAtOnce(bytes int) int {
	if !p.Near && p.segment.memory == nil && bytes >= longShare {
		return 1
	}
	return max(p.size-1, 1)
}

// operands returns a reduction by shares of the data from an element on.
func (p planner) operands(from, to int) *Op {
	o := p.op(stepShares)
	at := uintptr(from * o.dt.Size())
	o.send, o.recv, o.to = o.send+at, o.recv+at, to
	return o
}

// stepWhole runs the whole schedule.
func stepWhole(e *Engine, o *Op) bool {
	receives := o.to == everybody || o.to == e.rank
	bytes := o.total * o.dt.Size()
	if o.phase == 1 {
		if receives {
			o.dst[0] = o.recv
			hostops.Reduce(o.dst[:], o.srcs, o.total, o.dt, o.reduce, false)
		}
		return true
	}
	if receives {
		e.recvOperands(o, bytes, 0, 1, e.size-1)
		o.srcs[e.rank] = o.send
	}
	for i := 1; i < e.size; i++ {
		dest := (e.rank + i) % e.size
		if o.to == everybody || o.to == dest {
			e.sendBytes(o, o.tag, o.send, bytes, dest)
		}
	}
	return false
}

// stepShares runs the schedule by shares: rounds in which shares are exchanged, and as
// many in which results are spread, each with the ranks at the distances from first to
// last, those to send to after this one, those to receive from before it.
func stepShares(e *Engine, o *Op) bool {
	rounds := max(1, (e.size-1+o.peers-1)/o.peers)
	first := o.phase%rounds*o.peers + 1
	last := min(first+o.peers, e.size) - 1
	switch o.phase / rounds {
	case 0:
		e.exchangeShares(o, first, last)
	case 1:
		if first == 1 {
			o.dst[0] = o.result(e.rank)
			hostops.Reduce(o.dst[:], o.srcs, o.length(e.rank), o.dt, o.reduce, false)
		}
		if o.to == everybody && first == last {
			e.passShares(o, first)
		} else {
			e.spreadShares(o, first, last)
		}
	}
	return o.phase == 2*rounds
}

// length is the number of elements in rank r's share.
func (o *Op) length(r int) int { return max(0, min(o.share, o.total-r*o.share)) }

// result is where this rank puts its share of the result.
func (o *Op) result(rank int) uintptr {
	switch o.to {
	case nobody:
		return o.recv
	case everybody, rank:
		return o.recv + uintptr(rank*o.stride*o.dt.Size())
	}
	return o.memory // in place of an operand
}

// exchangeShares sends ranks their shares of this rank's data.
func (e *Engine) exchangeShares(o *Op, first, last int) {
	size := o.dt.Size()
	spare := uintptr(0)
	if (o.to == everybody || o.to == nobody) && !o.reads.overlaps(o.writes) {
		spare = o.result(e.rank)
	}
	e.recvOperands(o, o.length(e.rank)*size, spare, first, last)
	o.srcs[e.rank] = o.send + uintptr(e.rank*o.stride*size)
	for i := first; i <= last; i++ {
		dest := (e.rank + i) % e.size
		e.sendBytes(o, o.tag, o.send+uintptr(dest*o.stride*size), o.length(dest)*size, dest)
	}
}

// recvOperands receives bytes from other ranks and notes where in o.srcs. They go to
// working memory, those of the rank before this one to spare if there is such a place.
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

// spreadShares sends this rank's share of the result to whom it is for, and
// receives the others'.
func (e *Engine) spreadShares(o *Op, first, last int) {
	size := o.dt.Size()
	if o.to == everybody || o.to == e.rank {
		for i := first; i <= last; i++ {
			src := (e.rank + e.size - i) % e.size
			e.recvBytes(o, o.tag+1, o.recv+uintptr(src*o.stride*size), o.length(src)*size, src)
		}
	}
	if o.to == nobody || o.to == e.rank {
		return
	}
	for i := first; i <= last; i++ {
		dest := (e.rank + i) % e.size
		if o.to == everybody || o.to == dest {
			e.sendBytes(o, o.tag+1, o.dst[0], o.length(e.rank)*size, dest)
		}
	}
}

// passShares passes the share of the result that came in the round before on to the next
// rank, at first this rank's own.
func (e *Engine) passShares(o *Op, round int) {
	size := o.dt.Size()
	in, out := (e.rank+e.size-round)%e.size, (e.rank+1+e.size-round)%e.size
	e.recvBytes(o, o.tag+1, o.recv+uintptr(in*o.stride*size), o.length(in)*size, (e.rank+e.size-1)%e.size)
	e.sendBytes(o, o.tag+1, o.recv+uintptr(out*o.stride*size), o.length(out)*size, (e.rank+1)%e.size)
}
