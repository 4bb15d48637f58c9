package schedule

// treeLimit is the length up to which data is broadcast along a tree, which needs the fewest steps. Longer data is
// scattered and then gathered by all, so that the root sends it about twice instead of once per branch (van de Geijn).
const treeLimit = 64 << 10

// broadcast plans a broadcast.
func (p planner) broadcast() {
	bytes := p.c.Bytes()
	if p.size > 2 && bytes > treeLimit {
		p.scatterAndGather(bytes)
		return
	}
	o := p.op(stepTree)
	o.writes = spanOf(o.recv, bytes)
	p.add(o)
}

// scatterAndGather plans a broadcast in two exchanges. The second waits for the
// first because it uses the same memory, in a group as well.
func (p planner) scatterAndGather(bytes int) {
	root := p.c.Peer
	part := roundUp((bytes+p.size-1)/p.size, cacheLine)
	length := func(r int) int { return max(0, min(part, bytes-r*part)) }
	scatter := p.parts()
	gather := p.parts()
	gather.chained = true
	for r := range p.size {
		if r == p.rank {
			continue // a rank's own part is already in place
		}
		if p.rank == root {
			scatter.sends(r, r*part, length(r))
			scatter.receives(r, 0, 0)
		} else {
			gather.receives(r, r*part, length(r))
		}
		if r == root {
			scatter.sends(r, 0, 0)
			scatter.receives(r, p.rank*part, length(p.rank))
		} else {
			gather.sends(r, p.rank*part, length(p.rank))
		}
	}
	for _, o := range []*Op{scatter, gather} {
		o.writes = spanOf(o.recv, bytes)
		p.add(o)
	}
}

// stepTree broadcasts along a binomial tree: in the order that starts at the root, rank v receives from v without its
// lowest set bit, then sends to v plus every lower power of two. Each rank sends an empty message to the rank that it
// receives from: a rank that alone considers itself the root waits for these.
func stepTree(e *Engine, o *Op) bool {
	bytes := o.count * o.dt.Size()
	root := int(o.peer)
	place := (e.rank - root + e.size) % e.size
	branch := place & -place
	if place == 0 {
		for branch = 1; branch < e.size; branch *= 2 {
		}
	}
	switch o.phase {
	case 0:
		if place == 0 {
			return false
		}
		from := (place - branch + root) % e.size
		e.sendBytes(o, o.tag+1, 0, 0, from)
		e.recvBytes(o, o.tag, o.recv, bytes, from)
	case 1:
		for step := branch / 2; step > 0; step /= 2 {
			if place+step < e.size {
				to := (place + step + root) % e.size
				e.sendBytes(o, o.tag, o.recv, bytes, to)
				e.recvBytes(o, o.tag+1, 0, 0, to)
			}
		}
	}
	return o.phase == 2
}
