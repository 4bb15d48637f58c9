package commtest

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
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
	{
		name: "split: nobody wants in",
		body: splitAs(func(r int) (color, key int) {
			return [...]int{-1, -2, math.MinInt32}[r%3], 0
		}),
	},
	{name: "split: colors are far apart", body: farColors},
	{name: "split: keys are far apart", body: farKeys},
	{name: "split: colors and keys have 64 bits", body: longColorsAndKeys},
	{name: "split: nested", body: nestedSplits},
	{name: "split: splits of splits are independent", body: splitsOfSplits, needs: asynchrony, minRanks: 2},
	{name: "split: groups are independent", body: independentSplits, needs: asynchrony},
	{name: "split: closing a group leaves the others", body: closedSplit},
}

// splitRule returns the color and the key of a rank.
type splitRule func(r int) (color, key int)

// splitAs splits the world by a rule, checks who is in which group and in which
// place, lets the groups work, and closes them.
func splitAs(rule splitRule) func(p *probe) {
	return func(p *probe) {
		c := p.splitBy(rule)
		if c != nil {
			p.exercise(c)
			p.must(c.Close())
		}
		p.exercise(p.c)
	}
}

// splitBy splits the world by a rule, and checks who is in which group and in which place. It returns nil to a rank
// that stays out.
func (p *probe) splitBy(rule splitRule) comm.Communicator {
	color, key := rule(p.rank)
	c := p.split(color, key)
	if color < 0 {
		if c != nil {
			p.errorf("Split with color %d gave a communicator, want nil", color)
		}
		return nil
	}
	if c == nil {
		p.fatalf("Split with color %d gave nil", color)
	}
	p.checkMembers(c, members(p.size, color, rule))
	return c
}

// farColors uses each bit that the colors of MPI have, a signed int of 32 bits. Groups with the highest one also work.
func farColors(p *probe) {
	const highest = 30
	for bit := range highest {
		c := p.splitBy(func(r int) (color, key int) { return r % 2 << bit, 0 })
		p.must(c.Close())
	}
	splitAs(func(r int) (color, key int) { return r % 2 << highest, 0 })(p)
}

func farKeys(p *probe) {
	keys := [...]int{math.MaxInt32, 0, math.MinInt32, 1 << 24, -1 << 16}
	splitAs(func(r int) (color, key int) {
		return 0, keys[r%len(keys)]
	})(p)
}

// longColorsAndKeys need more than 32 bits, on all ranks or on some.
func longColorsAndKeys(p *probe) {
	for _, rule := range []splitRule{
		func(r int) (color, key int) { return 1 << (32 + r%2), 0 },
		func(r int) (color, key int) {
			return r % 2 * math.MaxInt, 0
		},
		func(r int) (color, key int) {
			return math.MaxInt - r%2<<32, -r
		},
		func(r int) (color, key int) {
			return -1 + r%2*math.MaxInt, r
		},
		func(r int) (color, key int) { return -1<<32 + r%2<<33, r },
		func(r int) (color, key int) { return 0, 1 << (40 - r%8) },
		func(r int) (color, key int) {
			return 0, math.MinInt + r%2<<32
		},
		func(r int) (color, key int) { return 0, math.MaxInt - r },
	} {
		splitAs(rule)(p)
	}
}

// relative is a communicator, and how it came about.
type relative struct {
	comm.Communicator
	name string
}

// children splits a communicator again and again, and returns those of the given numbers. The
// others are closed at once.
func (p *probe) children(parent relative, numbers ...int) []relative {
	var children []relative
	for number := range slices.Max(numbers) + 1 {
		c, err := parent.Split(p.ctx, 0, p.rank)
		if err != nil {
			p.fatalf("split %d of %s: %w", number, parent.name, err)
		}
		if slices.Contains(numbers, number) {
			children = append(children, relative{c, fmt.Sprintf("split %d of %s", number, parent.name)})
		} else {
			p.must(c.Close())
		}
	}
	return children
}

// splitsOfSplits has traffic on communicators of several generations at once. They are those that a
// backend may take for each other if it identifies them by a number: if the number has few bits, if
// it leaves out the parent, or if it mixes the parent's number with the number of the split so that two
// pairs give the same.
func splitsOfSplits(p *probe) {
	world := relative{p.c, "the world"}
	generations := [][]int{
		{0, 1, 2, 3, 4, 8, 16, 32, 64, 128, 256},
		{0, 1, 2, 3, 4},
		{0, 1, 2, 3},
		{0, 1},
	}
	if p.Communicators > 0 {
		generations = [][]int{
			{0, 1, 2},
			{0, 1, 2},
			{0},
		} // and one that is closed at once: at most 8
	}
	all := []relative{world}
	parent := world
	for _, numbers := range generations {
		children := p.children(parent, numbers...)
		all = append(all, children...)
		parent = children[0]
	}
	p.independent(all)
	for _, c := range all[1:] {
		p.must(c.Close())
	}
}

// independent sees that no communicator gets what was sent on another one. In each round, half of
// the communicators have calls in flight on the even ranks and the other half on the odd ones, until
// these have met on the last communicator. Any two of the others are in different halves in one of
// the rounds: if they were the same to the backend, calls of one would meet those of the other.
func (p *probe) independent(all []relative) {
	tested := all[:len(all)-1]
	meeting := len(all) - 1
	for bit := 0; 1<<bit < len(tested); bit++ {
		traffic := make([]traffic, len(all))
		for i, c := range all {
			traffic[i] = p.traffic(c, i)
		}
		p.awaitCopies()
		for half := range 2 {
			for i := range tested {
				if i>>bit&1 == (p.rank+half)%2 {
					traffic[i].submit()
				}
			}
			if half == 0 {
				traffic[meeting].submit()
				traffic[meeting].wait()
			}
		}
		for i := range tested {
			traffic[i].wait()
		}
		for _, t := range traffic {
			t.verify(all)
		}
	}
}

// traffic is an allgather and a message to the next rank, which carry a communicator ID.
type traffic struct {
	relative
	p      *probe
	number int
	send   uintptr
	recv   uintptr // of one element from each rank, and one from the rank before
}

func (p *probe) traffic(c relative, number int) traffic {
	return traffic{
		relative: c,
		p:        p,
		number:   number,
		send:     p.alloc(serial(number, p.rank)),
		recv:     p.alloc(make([]byte, (p.size+1)*dtype.U64.Size())),
	}
}

func (t traffic) submit() {
	next := (t.p.rank + 1) % t.p.size
	prev := t.before()
	t.must(t.AllGather(t.send, t.recv, 1, dtype.U64))
	message := t.recv + uintptr(t.p.size*dtype.U64.Size())
	t.must(t.Group(
		comm.SendCall(t.send, 1, dtype.U64, next, 1),
		comm.RecvCall(message, 1, dtype.U64, prev, 1),
	))
}

func (t traffic) before() int {
	return (t.p.rank + t.p.size - 1) % t.p.size
}

func (t traffic) wait() {
	t.must(t.Sync(t.p.ctx))
}

func (t traffic) must(err error) {
	if err != nil {
		t.p.fatalf("%s, beside traffic on other communicators: %w", t.name, err)
	}
}

// verify checks that all elements were sent on this communicator, and finds out on which otherwise.
func (t traffic) verify(all []relative) {
	got := t.p.read(t.recv, (t.p.size+1)*dtype.U64.Size())
	for r, element := range slices.Collect(slices.Chunk(got, dtype.U64.Size())) {
		if r == t.p.size {
			r = t.before()
		}
		if bytes.Equal(element, serial(t.number, r)) {
			continue
		}
		origin := fmt.Sprintf("%#x", element)
		for number, candidate := range all {
			if bytes.Equal(element, serial(number, r)) {
				origin = "what rank " + fmt.Sprint(r) + " sent on " + candidate.name
			}
		}
		t.p.errorf("received on %s: %s", t.name, origin)
	}
	t.p.free(t.send)
	t.p.free(t.recv)
}

// members returns the ranks of one color in the order of a split.
func members(size, color int, rule splitRule) []int {
	var ranks []int
	for r := range size {
		if c, _ := rule(r); c == color {
			ranks = append(ranks, r)
		}
	}
	slices.SortStableFunc(ranks, func(a, b int) int {
		_, ka := rule(a)
		_, kb := rule(b)
		return cmp.Compare(ka, kb)
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
	for r, got := range p.exchange(c, []byte{byte(p.rank)}) {
		if int(got[0]) != ranks[r] {
			p.errorf("split: rank %d of the group is rank %d of the world, want %d", r, got[0], ranks[r])
		}
	}
}

// exercise runs a few operations of each kind on c.
func (p *probe) exercise(c comm.Communicator) {
	p.on(c, func(q *probe) {
		dt := q.sumType()
		b := q.batch(c)
		l := plain("allreduce", "on a group of ranks", 500, dt)
		buf := b.buffer(
			l,
			numbers(dt, 500, q.rank),
			500*dt.Size(),
			want(numbers(dt, 500, q.ranksSum()), dt),
			true,
		)
		b.call(l, comm.AllReduceCall(buf, buf, 500, dt, comm.Sum))
		addBroadcast(b, label{
			call:  "broadcast",
			count: 9,
			dt:    dt,
			op:    noOp,
			root:  q.size - 1,
		})
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
	a := p.split(0, p.rank)
	b := p.split(0, p.rank)
	next := (p.rank + 1) % p.size
	prev := (p.rank + p.size - 1) % p.size
	// Several rounds, as communicators that wait for each other may still begin in one order by chance.
	for range 4 {
		batches := []*batch{
			p.batch(p.c),
			p.batch(a),
			p.batch(b),
		}
		for i, x := range batches {
			addAllGather(x, plain("allgather", "on one of three communicators", 100+i, dt))
			l := plain("exchange", "on one of three communicators", 60, dt)
			send := x.input(l, message(60, dt, p.rank, next, i))
			incoming := message(60, dt, prev, p.rank, i)
			recv := x.output(l, len(incoming), want(incoming, dt))
			x.call(
				l,
				comm.SendCall(send, 60, dt, next, 4),
				comm.RecvCall(recv, 60, dt, prev, 4),
			)
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
	}
	p.must(a.Close())
	p.must(b.Close())
}

// closedSplit closes one of two groups while the other has work in flight.
func closedSplit(p *probe) {
	a := p.split(0, p.rank)
	b := p.split(0, p.rank)
	x := p.batch(b)
	addAllGather(x, plain("allgather", "while another group closes", 1000, dtype.U8))
	x.submit()
	p.must(a.Close())
	p.must(b.Sync(p.ctx))
	x.verify()
	p.must(b.Close())
	p.exercise(p.c)
}
