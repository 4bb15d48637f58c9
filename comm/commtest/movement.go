package commtest

import (
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reference"
)

// movement is a collective that moves data without changing it.
type movement struct {
	name string
	// parts is how many times count elements the larger buffer has.
	parts  func(size int) int
	rooted bool
	// add adds the calls for one count, in all placements.
	add func(b *batch, l label)
}

var movements = []movement{
	{"broadcast", one, true, addBroadcast},
	{"allgather", perRank, false, addAllGather},
	{"allgatherv", perRank, false, addAllGatherV},
	{"alltoall", perRank, false, addAllToAll},
	{"alltoallv", perRank, false, addAllToAllV},
	{"gather", perRank, true, addGather},
	{"scatter", perRank, true, addScatter},
}

var movementCases = func() []testCase {
	var cases []testCase
	for _, m := range movements {
		cases = append(cases, testCase{name: m.name, body: m.matrix})
	}
	return cases
}()

// matrix runs the collective for all types, counts and placements.
func (m movement) matrix(p *probe) {
	for _, dt := range dtype.All() {
		b := p.batch(p.c)
		for i, n := range p.counts(m.parts(p.size), int(dt)) {
			l := plain(m.name, "", n, dt)
			if m.rooted {
				l.root = (i + int(dt)) % p.size
			}
			m.add(b, l)
		}
		b.run()
	}
}

// part is what rank src gives to rank dest (or to everybody) in a call.
func (l label) part(src, dest, count int) []byte {
	return reference.Payload(count*l.dt.Size(), int(l.dt), l.count, src, dest)
}

// everyone is the dest of a part that all ranks get.
const everyone = -1

// gathered is the parts of all ranks in rank order.
func (l label) gathered(size int) []byte {
	var all []byte
	for r := range size {
		all = append(all, l.part(r, everyone, l.count)...)
	}
	return all
}

// scattered is the parts of one rank for all ranks, in rank order.
func (l label) scattered(src, size int) []byte {
	var all []byte
	for r := range size {
		all = append(all, l.part(src, r, l.count)...)
	}
	return all
}

// withOwn is n bytes of poison with this rank's part in its place: the buffer
// of an in-place gather before the call.
func (b *batch) withOwn(l label, n int) []byte {
	content := reference.Tile(poisonBlock, 0, n)
	own := l.part(b.p.rank, everyone, l.count)
	copy(content[b.p.rank*len(own):], own)
	return content
}

func addBroadcast(b *batch, l label) {
	data := l.part(l.root, everyone, l.count)
	var buf uintptr
	if b.p.rank == l.root {
		buf = b.input(l, data)
	} else {
		buf = b.output(l, len(data), want(data, l.dt))
	}
	b.call(l, comm.BroadcastCall(buf, l.count, l.dt, l.root))
}

func addAllGather(b *batch, l label) {
	all := l.gathered(b.p.size)
	call := func(l label, send, recv uintptr) {
		b.call(l, comm.AllGatherCall(send, recv, l.count, l.dt))
	}

	l.what = "out of place"
	call(l, b.input(l, l.part(b.p.rank, everyone, l.count)), b.output(l, len(all), want(all, l.dt)))

	l.what = "in place"
	recv := b.buffer(l, b.withOwn(l, len(all)), len(all), want(all, l.dt), false)
	call(l, recv+uintptr(b.p.rank*l.count*l.dt.Size()), recv)
}

func addGather(b *batch, l label) {
	all := l.gathered(b.p.size)
	own := l.part(b.p.rank, everyone, l.count)
	call := func(l label, send, recv uintptr) {
		b.call(l, comm.GatherCall(send, recv, l.count, l.dt, l.root))
	}

	l.what = "out of place"
	if b.p.rank != l.root {
		call(l, b.input(l, own), b.unused(l, len(all)))
	} else {
		call(l, b.input(l, own), b.output(l, len(all), want(all, l.dt)))
	}

	l.what = "in place"
	if b.p.rank != l.root {
		call(l, b.input(l, own), 0)
	} else {
		recv := b.buffer(l, b.withOwn(l, len(all)), len(all), want(all, l.dt), false)
		call(l, recv+uintptr(b.p.rank*len(own)), recv)
	}
}

func addScatter(b *batch, l label) {
	all := l.scattered(l.root, b.p.size)
	own := l.part(l.root, b.p.rank, l.count)
	call := func(l label, send, recv uintptr) {
		b.call(l, comm.ScatterCall(send, recv, l.count, l.dt, l.root))
	}

	l.what = "out of place"
	if b.p.rank != l.root {
		call(l, b.unused(l, len(all)), b.output(l, len(own), want(own, l.dt)))
	} else {
		call(l, b.input(l, all), b.output(l, len(own), want(own, l.dt)))
	}

	l.what = "in place"
	if b.p.rank != l.root {
		call(l, 0, b.output(l, len(own), want(own, l.dt)))
	} else {
		send := b.input(l, all)
		call(l, send, send+uintptr(b.p.rank*len(own)))
	}
}

func addAllToAll(b *batch, l label) {
	var incoming []byte
	for r := range b.p.size {
		incoming = append(incoming, l.part(r, b.p.rank, l.count)...)
	}
	send := b.input(l, l.scattered(b.p.rank, b.p.size))
	recv := b.output(l, len(incoming), want(incoming, l.dt))
	b.call(l, comm.AllToAllCall(send, recv, l.count, l.dt))
}

// layout places parts of different lengths in one buffer: not in rank order,
// with gaps before, between and behind them, some parts empty.
type layout struct {
	counts, displs []int
	extent         int
}

func newLayout(size int, count func(r int) int) layout {
	l := layout{counts: make([]int, size), displs: make([]int, size)}
	for r := range slices.Backward(l.counts) {
		l.extent += 1 + r%3
		l.counts[r] = count(r)
		l.displs[r] = l.extent
		l.extent += l.counts[r]
	}
	l.extent++
	return l
}

// buffer returns poison with the given parts in their places.
func (l layout) buffer(dt dtype.DType, part func(r int) []byte) []byte {
	out := reference.Tile(poisonBlock, 0, l.extent*dt.Size())
	for r, d := range l.displs {
		copy(out[d*dt.Size():], part(r))
	}
	return out
}

// unevenCount varies the number of elements by rank, zero included.
func unevenCount(base, a, b int) int {
	switch (a + 2*b) % 4 {
	case 0:
		return base
	case 1:
		return base/2 + 1
	case 2:
		return 0
	}
	return base - base/3
}

func addAllGatherV(b *batch, l label) {
	lay := newLayout(b.p.size, func(r int) int { return unevenCount(l.count, r, 0) })
	part := func(r int) []byte { return l.part(r, everyone, lay.counts[r]) }
	own := func(r int) []byte {
		if r == b.p.rank {
			return part(r)
		}
		return nil
	}
	after := lay.buffer(l.dt, part)
	call := func(l label, send, recv uintptr) {
		b.call(l, comm.AllGatherVCall(send, recv, lay.counts, lay.displs, l.dt))
	}

	l.what = "out of place"
	blank := lay.buffer(l.dt, func(int) []byte { return nil })
	call(l, b.input(l, part(b.p.rank)), b.buffer(l, blank, len(after), want(after, l.dt), false))

	l.what = "in place"
	recv := b.buffer(l, lay.buffer(l.dt, own), len(after), want(after, l.dt), false)
	call(l, recv+uintptr(lay.displs[b.p.rank]*l.dt.Size()), recv)
}

func addAllToAllV(b *batch, l label) {
	me := b.p.rank
	out := newLayout(b.p.size, func(dest int) int { return unevenCount(l.count, me, dest) })
	in := newLayout(b.p.size, func(src int) int { return unevenCount(l.count, src, me) })
	send := b.input(l, out.buffer(l.dt, func(dest int) []byte { return l.part(me, dest, out.counts[dest]) }))
	after := in.buffer(l.dt, func(src int) []byte { return l.part(src, me, in.counts[src]) })
	blank := in.buffer(l.dt, func(int) []byte { return nil })
	recv := b.buffer(l, blank, len(after), want(after, l.dt), false)
	b.call(l, comm.AllToAllVCall(send, out.counts, out.displs, recv, in.counts, in.displs, l.dt))

	l.what = "from one place"
	send = b.input(l, l.part(me, everyone, slices.Max(out.counts)))
	after = in.buffer(l.dt, func(src int) []byte { return l.part(src, everyone, in.counts[src]) })
	recv = b.buffer(l, blank, len(after), want(after, l.dt), false)
	b.call(l, comm.AllToAllVCall(send, out.counts, make([]int, b.p.size), recv, in.counts, in.displs, l.dt))
}
