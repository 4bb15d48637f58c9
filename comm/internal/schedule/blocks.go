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

// sharedReduce plans a reduction, and reports whether it goes over the segment.
func (p planner) sharedReduce(to int) bool {
	if p.segment.memory == nil {
		return false
	}
	count := p.c.Count
	bytes := p.c.Bytes()
	o := p.operands(0, to)
	o.Step = stepSharedBlocks
	o.reduction.total = count
	o.round.active = true
	o.reads = spanOf(o.send, bytes)
	if o.reduction.receives(p.rank) || to == nobody {
		o.writes = spanOf(o.recv, bytes)
	}
	copies := 1 // as many times as recv is what a rank sends
	if to == nobody {
		copies = p.size
		o.reads = spanOf(o.send, bytes*p.size)
	} else if p.segment.fits(bytes) && (p.size-1)*bytes <= wholeSharedLimit {
		o.Step = stepSharedReduce
		o.round.maxBytes = bytes
	}
	blocks := max(1, roundUp(bytes*copies, p.segment.blockBytes())/p.segment.blockBytes())
	o.round.blocks = blocks
	o.round.block = roundUp(count, blocks) / blocks
	p.add(o)
	return true
}

// blockOf returns the reduction of a block, and where it begins in the buffers.
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

// writeBlock writes what other ranks need of a block to this rank's slot.
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
	results := o.dst[:0]
	switch {
	case r.to == nobody:
		results = append(results, o.recv+offset)
	case r.receives(e.rank):
		results = append(results, o.recv+offset+uintptr(e.rank*r.stride*size))
	}
	if r.to != nobody && r.to != e.rank {
		results = append(results, e.segment.results(e.rank, e.segment.now()))
	}
	hostops.Reduce(results, o.srcs, r.length(e.rank), o.dt, o.reduce, false)
}

// takeBlock copies the other ranks' shares of the result of a block from full slots.
func (e *Engine) takeBlock(o *Op, i int, full []slot) {
	r, offset := o.blockOf(i, e.size)
	size := o.dt.Size()
	for distance := 1; distance < e.size; distance++ {
		rank := (e.rank + distance) % e.size
		to := o.recv + offset + uintptr(rank*r.stride*size)
		hostops.Copy(to, e.segment.results(rank, full), r.length(rank)*size, false)
	}
}
