package schedule

import "github.com/tutti-go/tutti/internal/hostops"

// Long reductions go over the segment by shares, a block at a time. Each rank writes its operands to its slot, reduces
// its share of the block from all slots, and writes the result to its slot, from where all take it. So a rank reads
// 2(P-1)/P of the data from others' caches, as with messages by shares, and the slots stay in the caches.
//
// One round serves two blocks: a slot has a rank's operands of one, and its share of the result of the one before.
//
//	step 0                                                    write operands of A     begin round 0
//	step 1   reduce a share of A                              write operands of B     begin round 1
//	step 2   reduce a share of B     take the results of A    write operands of C     begin round 2
//	step 3   reduce a share of C     take the results of B                            begin round 3
//	step 4                           take the results of C

// sharedReduce plans a reduction, and reports whether it uses the segment.
func (p planner) sharedReduce(to int) bool {
	bytes := p.c.Bytes()
	switch {
	case p.segment.memory == nil:
		return false
	case to != nobody && p.size == 2: // shares would read as much, and write more
		p.sharedWhole(to, pairBlockBytes/p.c.DType.Size())
	case to != nobody && (p.size-1)*bytes <= wholeSharedLimit:
		p.sharedWhole(to, p.c.Count)
	default:
		p.sharedBlocks(to)
	}
	return true
}

// sharedWhole plans a reduction in blocks of this many elements, which each rank reads entirely.
func (p planner) sharedWhole(to, block int) {
	count := p.c.Count
	for begin := 0; ; begin += block {
		n := min(block, count-begin)
		o := p.operands(begin, to)
		bytes := n * o.dt.Size()
		o.Step = stepSharedReduce
		o.reduction.total = n
		o.round.active = true
		o.round.maxBytes = bytes
		o.reads = spanOf(o.send, bytes)
		if o.reduction.receives(p.rank) {
			o.writes = spanOf(o.recv, bytes)
		}
		p.add(o)
		if begin+block >= count {
			return
		}
	}
}

// sharedBlocks plans a reduction by shares.
func (p planner) sharedBlocks(to int) {
	count := p.c.Count
	bytes := p.c.Bytes()
	sent := bytes
	o := p.operands(0, to)
	if to == nobody {
		sent *= p.size
	}
	o.Step = stepSharedBlocks
	o.round.active = true
	o.reads = spanOf(o.send, sent)
	if to == nobody || o.reduction.receives(p.rank) {
		o.writes = spanOf(o.recv, bytes)
	}
	o.round.blocks, o.round.block = p.segment.blocksOf(count, o.dt.Size(), to)
	p.add(o)
}

// streamBytes is the length of a result from which stores to it bypass the caches, unless they are in place.
const streamBytes = 8 << 20

// streams reports whether stores to the result bypass the caches.
func (o *Op) streams() bool {
	return o.send != o.recv && o.count*o.dt.Size() >= streamBytes
}

// blockOf returns the reduction of a block, and its offset in the buffers.
func (o *Op) blockOf(i, size int) (r reduction, offset uintptr) {
	begin := i * o.round.block
	n := min(o.round.block, o.count-begin)
	r = reduction{to: o.reduction.to, total: n}
	if r.to == nobody {
		r.share = n
		r.stride = o.count
		r.total = n * size
	} else {
		r.share = roundUp((n+size-1)/size, cacheLine)
		r.stride = r.share
	}
	return r, uintptr(begin * o.dt.Size())
}

// stepSharedBlocks reduces one block, takes the results of another, and writes the operands of a third.
func stepSharedBlocks(e *Engine, o *Op) bool {
	s := &e.segment
	full := s.now()
	blocks := o.round.blocks
	rounds := blocks
	if o.reduction.to != nobody {
		rounds++
	}
	ends := o.phase == rounds
	if !ends {
		s.next(o)
	}
	if i := o.phase - 1; i >= 0 && i < blocks {
		e.reduceBlock(o, i, full)
	}
	if i := o.phase - 2; i >= 0 && o.reduction.receives(e.rank) {
		e.takeBlock(o, i, full)
	}
	if o.phase < blocks {
		e.writeBlock(o, o.phase)
	}
	if !ends {
		s.announce(o)
	}
	return ends
}

// writeBlock writes the data of a block that other ranks need to this rank's slot.
func (e *Engine) writeBlock(o *Op, i int) {
	r, offset := o.blockOf(i, e.size)
	slot := e.segment.now()[e.rank].operands()
	size := o.dt.Size()
	for rank := range e.size {
		if rank != e.rank {
			from := o.send + offset + uintptr(rank*r.stride*size)
			hostops.Copy(slot+uintptr(rank*r.share*size), from, r.length(rank)*size, false)
		}
	}
}

// reduceBlock reduces this rank's share of a block, whose operands are in full slots.
func (e *Engine) reduceBlock(o *Op, i int, full []slot) {
	r, offset := o.blockOf(i, e.size)
	size := o.dt.Size()
	for rank := range o.srcs {
		o.srcs[rank] = full[rank].operands() + uintptr(e.rank*r.share*size)
	}
	o.srcs[e.rank] = o.send + offset + uintptr(e.rank*r.stride*size)
	n := r.length(e.rank)
	recv := o.recv + offset
	if r.to == nobody {
		o.dst[0] = recv
		hostops.Reduce(o.dst[:1], o.srcs, n, o.dt, o.reduce, o.streams())
		return
	}
	recv += uintptr(e.rank * r.stride * size)
	o.dst[0] = e.segment.results(e.rank, e.segment.now())
	o.dst[1] = recv
	if !r.receives(e.rank) || o.streams() {
		hostops.Reduce(o.dst[:1], o.srcs, n, o.dt, o.reduce, false)
	} else {
		hostops.Reduce(o.dst[:], o.srcs, n, o.dt, o.reduce, false)
	}
	if r.receives(e.rank) && o.streams() {
		hostops.Copy(recv, o.dst[0], n*size, true)
	}
}

// takeBlock copies the other ranks' shares of the result of a block from full slots.
func (e *Engine) takeBlock(o *Op, i int, full []slot) {
	r, offset := o.blockOf(i, e.size)
	size := o.dt.Size()
	for distance := 1; distance < e.size; distance++ {
		rank := (e.rank + distance) % e.size
		to := o.recv + offset + uintptr(rank*r.stride*size)
		hostops.Copy(to, e.segment.results(rank, full), r.length(rank)*size, o.streams())
	}
}
