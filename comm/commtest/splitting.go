package commtest

import (
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

var splitCases = []testCase{
	{name: "split: by parity", body: splitAs(func(r int) (color, key int) { return r % 2, r })},
	{name: "split: keys reverse the order", body: splitAs(func(r int) (color, key int) { return 0, -r })},
	{name: "split: equal keys keep the order", body: splitAs(func(int) (color, key int) { return 3, 11 })},
	{name: "split: keys tie in part", body: splitAs(func(r int) (color, key int) { return 1 << 20, r % 2 })},
	{name: "split: a group for each rank", body: splitAs(func(r int) (color, key int) { return 1000 - r, 0 })},
	{name: "split: negative colors stay out", body: splitAs(func(r int) (color, key int) { return r%3 - 1, 5 - r })},
	{name: "split: nobody wants in", body: splitAs(func(int) (color, key int) { return -1, 0 })},
	{name: "split: nested", body: nestedSplits},
	{name: "split: groups are independent", body: independentSplits, needs: asynchrony},
	{name: "split: closing a group leaves the others", body: closedSplit},
}

// splitAs splits the world by a rule, checks who is in which group and in which
// place, lets the groups work, and closes them.
func splitAs(rule func(r int) (color, key int)) func(p *probe) {
	return func(p *probe) {
		color, key := rule(p.rank)
		c, err := p.c.Split(p.ctx, color, key)
		p.must(err)
		if color < 0 {
			if c != nil {
				p.errorf("Split with color %d gave a communicator, want nil", color)
			}
			p.exercise(p.c)
			return
		}
		if c == nil {
			p.fatalf("Split with color %d gave nil", color)
		}
		p.checkMembers(c, members(p.size, color, rule))
		p.exercise(c)
		p.must(c.Close())
		p.exercise(p.c)
	}
}

// members returns the ranks of one color in the order of a split.
func members(size, color int, rule func(r int) (color, key int)) []int {
	var ranks []int
	for r := range size {
		if c, _ := rule(r); c == color {
			ranks = append(ranks, r)
		}
	}
	slices.SortStableFunc(ranks, func(a, b int) int {
		_, ka := rule(a)
		_, kb := rule(b)
		return ka - kb
	})
	return ranks
}

// checkMembers checks that c consists of the given ranks of the world, in that
// order.
func (p *probe) checkMembers(c comm.Communicator, ranks []int) {
	if c.WorldSize() != len(ranks) {
		p.fatalf("split: group has %d ranks, want %d", c.WorldSize(), len(ranks))
	}
	if want := slices.Index(ranks, p.rank); c.Rank() != want {
		p.errorf("split: rank %d of its group, want %d", c.Rank(), want)
	}
	for r, who := range p.exchange(c, []byte{byte(p.rank)}) {
		if int(who[0]) != ranks[r] {
			p.errorf("split: rank %d of the group is rank %d of the world, want %d", r, who[0], ranks[r])
		}
	}
}

// exercise runs a few operations of each kind on c.
func (p *probe) exercise(c comm.Communicator) {
	p.on(c, func(q *probe) {
		dt := q.sumType()
		b := q.batch(c)
		l := plain("allreduce", "on a group of ranks", 500, dt)
		buf := b.buffer(l, numbers(dt, 500, q.rank), 500*dt.Size(), want(numbers(dt, 500, q.ranksSum()), dt), true)
		b.call(l, comm.AllReduceCall(buf, buf, 500, dt, comm.Sum))
		addBroadcast(b, label{call: "broadcast", count: 9, dt: dt, op: noOp, root: q.size - 1})
		addAllGather(b, plain("allgather", "on a group of ranks", 65, dt))
		addAllToAll(b, plain("alltoall", "on a group of ranks", 3, dt))
		b.run()
		q.must(c.Barrier(q.ctx))
		ring(q)
	})
}

// nestedSplits halves the world until nothing is left to halve.
func nestedSplits(p *probe) {
	c := p.c
	for c.WorldSize() > 1 {
		half := (c.WorldSize() + 1) / 2
		next, err := c.Split(p.ctx, c.Rank()/half, c.Rank())
		p.must(err)
		p.exercise(next)
		if c != p.c {
			p.must(c.Close())
		}
		c = next
	}
	if c != p.c {
		p.must(c.Close())
	}
	p.exercise(p.c)
}

// independentSplits has work in flight on the world and on two groups of the
// same ranks, submitted in another order on each rank: every communicator
// matches by itself, the same tags notwithstanding.
func independentSplits(p *probe) {
	const dt = dtype.U8
	a, b := p.split(0, p.rank), p.split(0, p.rank)
	batches := []*batch{p.batch(p.c), p.batch(a), p.batch(b)}
	next, prev := (p.rank+1)%p.size, (p.rank+p.size-1)%p.size
	for i, x := range batches {
		addAllGather(x, plain("allgather", "on one of three communicators", 100+i, dt))
		l := plain("exchange", "on one of three communicators", 60, dt)
		send := x.input(l, message(60, dt, p.rank, next, i))
		incoming := message(60, dt, prev, p.rank, i)
		recv := x.output(l, len(incoming), want(incoming, dt))
		x.call(l, comm.SendCall(send, 60, dt, next, 4), comm.RecvCall(recv, 60, dt, prev, 4))
	}
	for i := range batches {
		batches[(p.rank+i)%len(batches)].submit()
	}
	for i := range batches {
		p.must(batches[(p.rank+2*i)%len(batches)].c.Sync(p.ctx))
	}
	for _, x := range batches {
		x.verify()
	}
	p.must(a.Close())
	p.must(b.Close())
}

// closedSplit closes one of two groups while the other has work in flight.
func closedSplit(p *probe) {
	a, b := p.split(0, p.rank), p.split(0, p.rank)
	x := p.batch(b)
	addAllGather(x, plain("allgather", "while another group closes", 1000, dtype.U8))
	x.submit()
	p.must(a.Close())
	p.must(b.Sync(p.ctx))
	x.verify()
	p.must(b.Close())
	p.exercise(p.c)
}
