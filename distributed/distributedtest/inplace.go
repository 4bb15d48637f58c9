package distributedtest

import (
	"bytes"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// testInPlace does the same steps in place and beside a residual: the tensors and
// the residuals have the same bits, and so have the results, as entries, added to
// a tensor of zeros, and written to the gradient.
func testInPlace(r *rank, pattern string) {
	if pattern == sparse.Dense {
		return // has no residual
	}
	for _, density := range []float64{0.05, 0.5, 1} {
		for _, n := range []int{0, 3, 1009} {
			for _, k := range []family{families[0], families[3]} {
				r.inPlace(often(pattern, density), n, k)
			}
		}
	}
}

func (r *rank) inPlace(cfg sparse.Config, n int, k family) {
	cfg.NoUndo, cfg.Selector = true, r.selector
	r.reduces("in place, "+k.name, n, dtype.F32, cfg, func(u *run) {
		cfg.InPlace = true
		s := got(sparse.New(r.rt, r.c, n, cfg))
		r.after(s.Close)
		x := make([]float32, n)
		t, dense := r.tensor(dtype.F32, x), r.tensor(dtype.F32, x)
		for step := range 6 {
			r.part(fmt.Sprintf("step %d", step), func() {
				gradient := r.suite.gradient(k, n, r.rank, r.size, step)
				u.reduce(gradient)
				for i, g := range gradient {
					x[i] += g
				}
				r.write(t, x)
				must(s.AllReduce(r.ctx, t))
				must(r.c.Sync(r.ctx))
				before := x
				x = r.read(t)
				if cfg.Values == "" { // others are rounded
					r.rightSelection(s, cfg.Pattern, before, x)
				}
				for i, want := range u.residual() {
					if math.Float32bits(x[i]) != math.Float32bits(want) {
						fail("element %d: %v is left in place, the residual is %v", i, x[i], want)
					}
				}
				r.sameResult(s, u, dense)
			})
		}
	})
}

// rightSelection compares what the rank selected in a step in place with the tensor before
// it: these are its values, and only where it was selected from has the tensor changed,
// but that a node of gtopk's tree, which oktopk has for few entries, keeps what it has
// dropped of other ranks'.
func (r *rank) rightSelection(s *sparse.Reducer, pattern string, before, after []float32) {
	idx, val, err := s.Read(r.ctx, got(s.SelectedEntries()))
	must(err)
	keeps := pattern == sparse.Gtopk || pattern == sparse.Oktopk
	selected := make([]bool, len(before))
	for j, i := range idx {
		if math.Float32bits(val[j]) != math.Float32bits(before[i]) {
			fail("selected %v as element %d, which was %v", val[j], i, before[i])
		}
		selected[i] = true
	}
	for i, v := range after {
		if len(idx) > 0 && !keeps && v != before[i] && !selected[i] {
			fail("element %d was %v and is %v, and was not selected", i, before[i], v)
		}
	}
}

// sameResult compares what a step in place made with the result beside it, and
// leaves dense zero, as it was.
func (r *rank) sameResult(s *sparse.Reducer, u *run, dense *runtime.Tensor) {
	idx, val, err := s.Read(r.ctx, got(s.Entries()))
	must(err)
	entries := make([]float32, u.t.Len())
	for j, i := range idx {
		if j > 0 && i <= idx[j-1] {
			fail("entry %d has index %d after %d", j, i, idx[j-1])
		}
		entries[i] = val[j]
	}
	must(s.AddResult(dense, 1))
	added := r.read(dense)
	for i, w := range r.read(u.t) {
		if entries[i] != w || added[i] != w {
			fail("element %d is %v as entry and %v added, %v beside", i, entries[i], added[i], w)
		}
	}
	must(s.ClearResult(dense))
	if len(bytes.Trim(r.bytes(dense), "\x00")) > 0 {
		fail("the result is not cleared")
	}
}
