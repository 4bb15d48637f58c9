package commtest

import (
	"encoding/binary"
	"errors"
	"math"
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
	// addLong adds those calls for a count of which each takes long.
	addLong func(b *batch, l label)
}

var movements = []movement{
	{"broadcast", one, true, addBroadcast, addBroadcast},
	{"allgather", perRank, false, addAllGather, addAllGather},
	{"allgatherv", perRank, false, addAllGatherV, addLongAllGatherV},
	{"alltoall", perRank, false, addAllToAll, addAllToAll},
	{"alltoallv", perRank, false, addAllToAllV, addLongAllToAllV},
	{"gather", perRank, true, addGather, addGather},
	{"scatter", perRank, true, addScatter, addScatter},
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
	for _, dt := range types() {
		b := p.batch(p.c)
		for i, n := range p.counts(m.parts(p.size), int(dt)%3 == 0) {
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
	return payload(count, l.dt, int(l.dt), l.count, src, dest)
}

// payload returns n elements for what only moves data: any bits, different for every key, and
// among them the numbers that arithmetic does not keep.
func payload(n int, dt dtype.DType, keys ...int) []byte {
	out := reference.Payload(n*dt.Size(), keys...)
	const first, distance = 3, 5 // the elements between them tell keys apart
	fragile := fragileElements(dt)
	for i := first; i < min(n, 1000); i += distance {
		copy(out[i*dt.Size():], fragile[i/distance%len(fragile)])
	}
	return out
}

// fragileElements are encoded numbers that change when they are computed with instead of moved:
// -0, the smallest number, which may be flushed to 0, and a signalling NaN, which becomes quiet.
func fragileElements(dt dtype.DType) [][]byte {
	bits := 8 * dt.Size()
	elements := []uint64{1 << (bits - 1), 1}
	if infinity, err := dtype.FromFloat64(dt, math.Inf(1)); err == nil && dt.IsFloat() {
		elements = append(elements, infinity|1)
	}
	var encoded [][]byte
	for _, x := range elements {
		encoded = append(encoded, binary.LittleEndian.AppendUint64(nil, x)[:dt.Size()])
	}
	return encoded
}

// everyone is the dest of a part that all ranks get.
const everyone = -1

// parts is a part of, or for, each rank, in rank order.
func (l label) parts(size int, part func(r int) (src, dest int)) []byte {
	all := make([]byte, 0, size*l.count*l.dt.Size())
	for r := range size {
		src, dest := part(r)
		all = append(all, l.part(src, dest, l.count)...)
	}
	return all
}

// gathered is the parts of all ranks in rank order.
func (l label) gathered(size int) []byte {
	return l.parts(size, func(r int) (src, dest int) { return r, everyone })
}

// scattered is the parts of one rank for all ranks, in rank order.
func (l label) scattered(src, size int) []byte {
	return l.parts(size, func(r int) (int, int) { return src, r })
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

// exchange is what a rank gives to a call and what it gets, in buffers of which one may lie
// in the other.
type exchange struct {
	call        func(l label, send, recv uintptr) comm.Call
	sends, gets bool               // otherwise only other ranks do
	send        []byte             // what it gives
	bytes       int                // how much it gets
	check       func([]byte) error // of that
	identical   bool               // all ranks get the same bits
	before      int                // how many bytes of the longer buffer are before the other, in place
}

// add adds an exchange in both placements.
func (b *batch) add(l label, e exchange) {
	l.variant = "out of place"
	var send, recv uintptr
	if e.sends {
		send = b.input(l, e.send)
	} else {
		send = b.unused(l, len(e.send))
	}
	if e.gets {
		recv = b.buffer(l, nil, e.bytes, e.check, e.identical)
	} else {
		recv = b.unused(l, e.bytes)
	}
	b.call(l, e.call(l, send, recv))

	l.variant = "in place"
	switch shift := uintptr(e.before); {
	case !e.gets && len(e.send) == e.bytes: // reduce has one buffer on all ranks
		send = b.input(l, e.send)
		recv = send
	case !e.gets:
		send = b.input(l, e.send)
		recv = 0
	case !e.sends:
		send = 0
		recv = b.output(l, e.bytes, e.check)
	case len(e.send) <= e.bytes:
		content := slices.Clone(poison(e.bytes))
		copy(content[e.before:], e.send)
		recv = b.buffer(l, content, e.bytes, e.check, e.identical)
		send = recv + shift
	default: // only that part may change
		part := func(got []byte) error {
			end := e.before + e.bytes
			return errors.Join(
				e.check(got[e.before:end]),
				diff(got[:e.before], e.send[:e.before], l.dt),
				diff(got[end:], e.send[end:], l.dt),
			)
		}
		send = b.buffer(l, e.send, len(e.send), part, false)
		recv = send + shift
	}
	b.call(l, e.call(l, send, recv))
}

func addAllGather(b *batch, l label) {
	b.addGathered(l, true, func(l label, send, recv uintptr) comm.Call {
		return comm.AllGatherCall(send, recv, l.count, l.dt)
	})
}

func addGather(b *batch, l label) {
	b.addGathered(l, b.p.rank == l.root, func(l label, send, recv uintptr) comm.Call {
		return comm.GatherCall(send, recv, l.count, l.dt, l.root)
	})
}

func (b *batch) addGathered(l label, gets bool, call func(l label, send, recv uintptr) comm.Call) {
	all := l.gathered(b.p.size)
	part := l.part(b.p.rank, everyone, l.count)
	b.add(l, exchange{
		call:   call,
		sends:  true,
		gets:   gets,
		send:   part,
		bytes:  len(all),
		check:  want(all, l.dt),
		before: b.p.rank * len(part),
	})
}

func addScatter(b *batch, l label) {
	all := l.scattered(l.root, b.p.size)
	part := l.part(l.root, b.p.rank, l.count)
	b.add(l, exchange{
		sends:  b.p.rank == l.root,
		gets:   true,
		send:   all,
		bytes:  len(part),
		check:  want(part, l.dt),
		before: b.p.rank * len(part),
		call: func(l label, send, recv uintptr) comm.Call {
			return comm.ScatterCall(send, recv, l.count, l.dt, l.root)
		},
	})
}

func addAllToAll(b *batch, l label) {
	incoming := l.parts(b.p.size, func(r int) (src, dest int) {
		return r, b.p.rank
	})
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
	out := slices.Clone(poison(l.extent * dt.Size()))
	for r, d := range l.displs {
		copy(out[d*dt.Size():], part(r))
	}
	return out
}

// layouts returns where this rank's parts for others lie, and theirs for it, if ranks send each other the given numbers
// of elements.
func (b *batch) layouts(count func(src, dest int) int) (out, in layout) {
	out = newLayout(b.p.size, func(dest int) int {
		return count(b.p.rank, dest)
	})
	in = newLayout(b.p.size, func(src int) int {
		return count(src, b.p.rank)
	})
	return out, in
}

// outputParts makes a buffer of poison in which parts must lie in their places afterwards.
func (b *batch) outputParts(l label, lay layout, part func(r int) []byte) uintptr {
	blank := lay.buffer(l.dt, func(int) []byte { return nil })
	after := lay.buffer(l.dt, part)
	return b.buffer(l, blank, len(after), want(after, l.dt), false)
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
	b.addUnevenAllGatherV(l)
	l.variant = "equal counts, "
	b.addAllGatherV(l, newLayout(b.p.size, func(int) int { return l.count }))
}

// addLongAllGatherV leaves equal counts out, unless the run is a thorough one.
func addLongAllGatherV(b *batch, l label) {
	if b.p.extended || thorough {
		addAllGatherV(b, l)
		return
	}
	b.addUnevenAllGatherV(l)
}

func (b *batch) addUnevenAllGatherV(l label) {
	b.addAllGatherV(l, newLayout(b.p.size, func(r int) int {
		return unevenCount(l.count, r, 0)
	}))
}

func (b *batch) addAllGatherV(l label, lay layout) {
	variant := l.variant
	part := func(r int) []byte {
		return l.part(r, everyone, lay.counts[r])
	}
	content := func(r int) []byte {
		if r == b.p.rank {
			return part(r)
		}
		return nil
	}
	call := func(l label, send, recv uintptr) {
		b.call(l, comm.AllGatherVCall(send, recv, lay.counts, lay.displs, l.dt))
	}

	l.variant = variant + "out of place"
	send := b.input(l, part(b.p.rank))
	call(l, send, b.outputParts(l, lay, part))

	l.variant = variant + "in place"
	after := lay.buffer(l.dt, part)
	recv := b.buffer(
		l,
		lay.buffer(l.dt, content),
		len(after),
		want(after, l.dt),
		false,
	)
	offset := lay.displs[b.p.rank] * l.dt.Size()
	call(l, recv+uintptr(offset), recv)

	l.variant = variant + "from between the regions of recv"
	b.addAllGatherVFromGap(l, lay.counts)
}

// addAllGatherVFromGap adds a call whose send lies between two regions of recv.
func (b *batch) addAllGatherVFromGap(l label, counts []int) {
	gap := b.p.size / 2 // the number of the region in which send lies
	lengths := slices.Insert(slices.Clone(counts), gap, counts[b.p.rank])
	all := newLayout(len(lengths), func(i int) int { return lengths[i] })
	part := func(r int) []byte { return l.part(r, everyone, counts[r]) }
	before := all.buffer(l.dt, func(i int) []byte {
		if i == gap {
			return part(b.p.rank)
		}
		return nil
	})
	after := all.buffer(l.dt, func(i int) []byte {
		switch {
		case i == gap:
			return part(b.p.rank)
		case i > gap:
			return part(i - 1)
		}
		return part(i)
	})
	recv := b.buffer(l, before, len(after), want(after, l.dt), false)
	send := recv + uintptr(all.displs[gap]*l.dt.Size())
	b.call(l, comm.AllGatherVCall(send, recv, counts, slices.Delete(all.displs, gap, gap+1), l.dt))
}

func addAllToAllV(b *batch, l label) {
	uneven := func(src, dest int) int {
		return unevenCount(l.count, src, dest)
	}
	b.addAllToAllV(l, uneven)
	l.variant = "equal counts"
	equal := func(_, _ int) int { return l.count }
	b.addAllToAllV(l, equal)

	l.variant = "regions of send and recv in turn"
	b.addAllToAllVInTurn(l, uneven)

	l.variant = "from one place"
	out, in := b.layouts(uneven)
	send := b.input(l, l.part(b.p.rank, everyone, slices.Max(out.counts)))
	recv := b.outputParts(l, in, func(src int) []byte {
		return l.part(src, everyone, in.counts[src])
	})
	b.call(l, comm.AllToAllVCall(send, out.counts, make([]int, b.p.size), recv, in.counts, in.displs, l.dt))
}

// addLongAllToAllV adds uneven counts out of place, or in a thorough run all calls.
func addLongAllToAllV(b *batch, l label) {
	if b.p.extended || thorough {
		addAllToAllV(b, l)
		return
	}
	b.addAllToAllV(l, func(src, dest int) int {
		return unevenCount(l.count, src, dest)
	})
}

// addAllToAllV adds a call in which ranks send each other the given numbers of elements.
func (b *batch) addAllToAllV(l label, count func(src, dest int) int) {
	me := b.p.rank
	out, in := b.layouts(count)
	send := b.input(l, out.buffer(l.dt, func(dest int) []byte {
		return l.part(me, dest, out.counts[dest])
	}))
	recv := b.outputParts(l, in, func(src int) []byte {
		return l.part(src, me, in.counts[src])
	})
	b.call(l, comm.AllToAllVCall(send, out.counts, out.displs, recv, in.counts, in.displs, l.dt))
}

// addAllToAllVInTurn adds a call whose send and recv are one buffer, in which each region of send is beside one of
// recv.
func (b *batch) addAllToAllVInTurn(l label, count func(src, dest int) int) {
	me := b.p.rank
	ends := func(i int) (src, dest int) { // of a region: even ones are sent
		if i%2 == 0 {
			return me, i / 2
		}
		return i / 2, me
	}
	all := newLayout(2*b.p.size, func(i int) int { return count(ends(i)) })
	part := func(i int) []byte {
		src, dest := ends(i)
		return l.part(src, dest, all.counts[i])
	}
	before := all.buffer(l.dt, func(i int) []byte {
		if i%2 != 0 {
			return nil
		}
		return part(i)
	})
	after := all.buffer(l.dt, part)
	var out, in layout
	for i, n := range all.counts {
		lay := &out
		if i%2 != 0 {
			lay = &in
		}
		lay.counts = append(lay.counts, n)
		lay.displs = append(lay.displs, all.displs[i])
	}
	buf := b.buffer(l, before, len(after), want(after, l.dt), false)
	b.call(l, comm.AllToAllVCall(buf, out.counts, out.displs, buf, in.counts, in.displs, l.dt))
}
