package commtest

import (
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/reference"
)

// counts are the element counts of the matrix: nothing, one, less than a
// vector register, a cache line of bytes, and two that no block size divides.
var counts = []int{0, 1, 2, 7, 64, 1000, 65537}

// extendedCounts come on top in extended runs.
var extendedCounts = []int{3, 31, 127, 4096, 1<<18 + 5}

// counts returns the counts of a collective whose buffers hold parts times as
// many elements. Worlds so large that their buffers would be long get a smaller
// largest count. Only some cases have that one, which takes most of the time; in
// extended runs all have.
func (p *probe) counts(parts int, large bool) []int {
	all := counts
	limit := 1 << 18 // elements of a buffer
	switch {
	case p.extended:
		all = append(append([]int{}, counts...), extendedCounts...)
		limit = 1 << 20
	case !large:
		all = counts[:len(counts)-1]
	}
	out := make([]int, 0, len(all))
	for _, n := range all {
		if n*parts > limit {
			n = limit/parts | 1
		}
		out = append(out, n)
	}
	return out
}

// types are the element types of the matrix. The race detector sees the same accesses for all, and gets one of each
// kind: floating point of 32, 16 and 8 bits, a signed integer, and unsigned ones of 64 and of 8 bits.
func types() []dtype.DType {
	if race.Enabled {
		return []dtype.DType{dtype.F32, dtype.BF16, dtype.FP8E4M3, dtype.I32, dtype.U64, dtype.U8}
	}
	return dtype.All()
}

// reduction is what the three reducing collectives have in common.
type reduction struct {
	name   string
	rooted bool // the result is the root's alone
	parts  bool // the input has a part for each rank, which gets that part of the result
	// call submits one call.
	call func(l label, send, recv uintptr) comm.Call
}

// reductionData is one period of this rank's input, and the result.
type reductionData struct {
	dt    dtype.DType
	input []byte
	ref   *reference.Result
	// ordered is what the order contract says, nil for a backend that does not keep it.
	ordered *reference.Ordered
}

func (d reductionData) elements(n int) []byte {
	return reference.Tile(d.input, 0, n*d.dt.Size())
}

// check compares a result from an element on.
func (d reductionData) check(offset int) func(got []byte) error {
	return func(got []byte) error {
		if d.ordered != nil {
			return d.ordered.Check(got, offset)
		}
		_, err := d.ref.Check(got, offset)
		return err
	}
}

func one(int) int       { return 1 }
func perRank(n int) int { return n }

var allReductions = []reduction{
	{
		name: "allreduce",
		call: func(l label, send, recv uintptr) comm.Call {
			return comm.AllReduceCall(send, recv, l.count, l.dt, l.op)
		},
	},
	{
		name:   "reduce",
		rooted: true,
		call: func(l label, send, recv uintptr) comm.Call {
			return comm.ReduceCall(send, recv, l.count, l.dt, l.op, l.root)
		},
	},
	{
		name:  "reducescatter",
		parts: true,
		call: func(l label, send, recv uintptr) comm.Call {
			return comm.ReduceScatterCall(send, recv, l.count, l.dt, l.op)
		},
	},
}

var reductionCases = func() []testCase {
	var cases []testCase
	for _, r := range allReductions {
		cases = append(cases, testCase{name: r.name, body: r.matrix})
	}
	return cases
}()

// matrix runs the collective for all types, operations, counts and placements.
func (r reduction) matrix(p *probe) {
	for _, dt := range types() {
		var ops []comm.ReduceOp
		for _, op := range reductions.All() {
			if p.reduces(dt, op) {
				ops = append(ops, op)
			}
		}
		for _, op := range reductions.All() {
			l := label{
				call: r.name,
				dt:   dt,
				op:   op,
				root: noRoot,
			}
			if !p.reduces(dt, op) {
				r.refused(p, l)
				continue
			}
			b := p.batch(p.c)
			parts := 1
			if r.parts {
				parts = p.size
			}
			for i, n := range p.counts(parts, op == ops[int(dt)%len(ops)]) { // each operation with some type
				l.count = n
				if r.rooted {
					l.root = (i + int(op)) % p.size
				}
				r.add(b, l)
			}
			b.run()
		}
	}
}

// add adds a call in both placements.
func (r reduction) add(b *batch, l label) {
	p := b.p
	r.exchange(b, l, p.reductionData(l.dt, l.op, ordinary))
}

// reductionData returns this rank's input, and what comes of it.
func (p *probe) reductionData(dt dtype.DType, op comm.ReduceOp, input *inputs) reductionData {
	d := reductionData{dt: dt, input: input.period(dt, op, p.rank, p.size)}
	if p.NoFixedOrder {
		d.ref = reference.New(dt, op, p.size)
		return d
	}
	d.ordered = input.result(dt, op, p.size)
	return d
}

// exchange adds a call of some data in both placements.
func (r reduction) exchange(b *batch, l label, in reductionData) {
	p := b.p
	e := exchange{
		call:      r.call,
		sends:     true,
		gets:      !r.rooted || p.rank == l.root,
		send:      in.elements(l.count),
		bytes:     l.count * l.dt.Size(),
		check:     in.check(0),
		identical: !r.rooted && !r.parts,
	}
	if r.parts {
		e.send = in.elements(l.count * p.size)
		e.check = in.check(p.rank * l.count)
		e.before = p.rank * e.bytes
	}
	b.add(l, e)
}

// refused checks that what the backend does not do is an error at once.
func (r reduction) refused(p *probe, l label) {
	l.count = 4
	if r.rooted {
		l.root = 0
	}
	b := p.batch(p.c)
	n := l.count * p.size * l.dt.Size()
	err := r.call(
		l,
		b.untouched(l, n),
		b.untouched(l, n),
	).Make(p.c)
	if !errors.Is(err, comm.ErrUnsupported) {
		p.errorf("%v: got error %v, want ErrUnsupported", l, err)
	}
	b.run()
}
