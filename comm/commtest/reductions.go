package commtest

import (
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reference"
)

// counts are the element counts of the matrix: nothing, one, less than a
// vector register, a cache line of bytes, and two that no block size divides.
var counts = []int{0, 1, 2, 7, 64, 1000, 65537}

// extendedCounts come on top in extended runs.
var extendedCounts = []int{3, 31, 127, 4096, 1<<18 + 5}

// counts returns the counts of a collective whose buffers hold parts times as
// many elements. Worlds so large that they would take gigabytes get a smaller
// largest count. Only every third turn, a type and an operation, has that one, which
// takes most of the time, so that each type and each operation has it; in extended runs
// all have.
func (p *probe) counts(parts, turn int) []int {
	all := counts
	switch {
	case p.extended:
		all = append(append([]int{}, counts...), extendedCounts...)
	case turn%3 != 0:
		all = counts[:len(counts)-1]
	}
	out := make([]int, 0, len(all))
	for _, n := range all {
		if n*parts > 1<<20 {
			n = 1<<20/parts | 1
		}
		out = append(out, n)
	}
	return out
}

// reduction is what the three reducing collectives have in common.
type reduction struct {
	name string
	// parts is how many times count elements the input has.
	parts func(size int) int
	// rooted: the result is the root's alone.
	rooted bool
	// call submits one call.
	call func(l label, send, recv uintptr) comm.Call
	// add makes the buffers of one count, out of place and in place, and hands
	// them to call.
	add func(b *batch, l label, in reductionData, call func(l label, send, recv uintptr))
}

// reductionData is one period of this rank's input, and the result.
type reductionData struct {
	dt    dtype.DType
	input []byte
	ref   *reference.Result
}

func (d reductionData) elements(n int) []byte {
	return reference.Tile(d.input, 0, n*d.dt.Size())
}

// check is that of a result from an element on.
func (d reductionData) check(offset int) func(got []byte) error {
	return func(got []byte) error {
		_, err := d.ref.Check(got, offset)
		return err
	}
}

func one(int) int       { return 1 }
func perRank(n int) int { return n }

var reductions = []reduction{
	{
		name:  "allreduce",
		parts: one,
		call: func(l label, send, recv uintptr) comm.Call {
			return comm.AllReduceCall(send, recv, l.count, l.dt, l.op)
		},
		add: addAllReduce,
	},
	{
		name:   "reduce",
		parts:  one,
		rooted: true,
		call: func(l label, send, recv uintptr) comm.Call {
			return comm.ReduceCall(send, recv, l.count, l.dt, l.op, l.root)
		},
		add: addReduce,
	},
	{
		name:  "reducescatter",
		parts: perRank,
		call: func(l label, send, recv uintptr) comm.Call {
			return comm.ReduceScatterCall(send, recv, l.count, l.dt, l.op)
		},
		add: addReduceScatter,
	},
}

var reductionCases = func() []testCase {
	var cases []testCase
	for _, r := range reductions {
		cases = append(cases, testCase{name: r.name, body: r.matrix})
	}
	return cases
}()

// matrix runs the collective for all types, operations, counts and placements.
func (r reduction) matrix(p *probe) {
	for _, dt := range dtype.All() {
		for _, op := range dtype.ReduceOps() {
			l := label{call: r.name, dt: dt, op: op, root: noRoot}
			if !p.reduces(dt, op) {
				r.refused(p, l)
				continue
			}
			in := reductionData{dt, reference.Input(dt, op, p.rank, p.size), reference.New(dt, op, p.size)}
			b := p.batch(p.c)
			for i, n := range p.counts(r.parts(p.size), int(dt)+int(op)) {
				l.count = n
				if r.rooted {
					l.root = (i + int(op)) % p.size
				}
				r.add(b, l, in, func(l label, send, recv uintptr) {
					b.call(l, r.call(l, send, recv))
				})
			}
			b.run()
		}
	}
}

// refused checks that what the backend does not do is an error at once.
func (r reduction) refused(p *probe, l label) {
	l.count = 4
	if r.rooted {
		l.root = 0
	}
	b := p.batch(p.c)
	n := l.count * p.size * l.dt.Size()
	err := r.call(l, b.untouched(l, n), b.untouched(l, n)).Make(p.c)
	if !errors.Is(err, comm.ErrUnsupported) {
		p.errorf("%v: got error %v, want ErrUnsupported", l, err)
	}
	b.run()
}

func addAllReduce(b *batch, l label, in reductionData, call func(l label, send, recv uintptr)) {
	n := l.count * l.dt.Size()
	check := in.check(0)

	l.what = "out of place"
	call(l, b.input(l, in.elements(l.count)), b.buffer(l, nil, n, check, true))

	l.what = "in place"
	buf := b.buffer(l, in.elements(l.count), n, check, true)
	call(l, buf, buf)
}

func addReduce(b *batch, l label, in reductionData, call func(l label, send, recv uintptr)) {
	n := l.count * l.dt.Size()
	check := in.check(0)
	root := b.p.rank == l.root

	l.what = "out of place"
	send := b.input(l, in.elements(l.count))
	if root {
		call(l, send, b.output(l, n, check))
	} else {
		call(l, send, b.unused(l, n))
	}

	l.what = "in place"
	buf := uintptr(0)
	if root {
		buf = b.buffer(l, in.elements(l.count), n, check, false)
	} else {
		buf = b.input(l, in.elements(l.count))
	}
	call(l, buf, buf)
}

func addReduceScatter(b *batch, l label, in reductionData, call func(l label, send, recv uintptr)) {
	part := l.count * l.dt.Size()
	check := in.check(b.p.rank * l.count)

	l.what = "out of place"
	call(l, b.input(l, in.elements(l.count*b.p.size)), b.output(l, part, check))

	l.what = "in place"
	whole := in.elements(l.count * b.p.size)
	at := b.p.rank * part
	send := b.buffer(l, whole, len(whole), inPart(whole, at, part, l, check), false)
	call(l, send, send+uintptr(at))
}

// inPart checks a buffer of which only the part [at, at+n) may change.
func inPart(before []byte, at, n int, l label, check func([]byte) error) func([]byte) error {
	return func(got []byte) error {
		return errors.Join(
			check(got[at:at+n]),
			diff(got[:at], before[:at], l.dt),
			diff(got[at+n:], before[at+n:], l.dt),
		)
	}
}
