package distributedtest

import (
	"errors"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
)

// testEntries makes steps whose results, as entries, and added to a tensor of zeros, are what was
// written to the gradient, and whose selections are what left the residual.
func testEntries(r *rank, pattern string) {
	if pattern == sparsity.Dense {
		return // has no residual
	}
	for _, density := range []float64{0.05, 0.5, 1} {
		for _, n := range []int{0, 3, 1009} {
			for _, k := range []family{families[0], families[3]} {
				r.entries(config(pattern, density), n, k)
			}
		}
	}
}

func (r *rank) entries(cfg engine.Config, n int, k family) {
	cfg.NoUndo = true
	r.reduces("entries, "+k.name, n, dtype.F32, cfg, func(u *run) {
		dense := r.tensor(dtype.F32, make([]float32, n))
		for step := range 6 {
			r.part(fmt.Sprintf("step %d", step), func() {
				gradient := r.suite.gradient(k, n, r.rank, r.size, step)
				before := u.residual()
				for i, g := range gradient {
					before[i] += g
				}
				u.reduce(gradient)
				if cfg.Values == "" { // others are rounded
					r.rightSelection(u.reducer, cfg.Pattern, before, u.residual())
				}
				r.sameResult(u, dense)
			})
		}
	})
}

// rightSelection compares what the rank selected in a step with the residual and the gradient before
// it: these are its values, and only where it was selected from has the sum changed,
// but that a node of gtopk's tree, which oktopk has for few entries, keeps what it has
// dropped of other ranks'.
func (r *rank) rightSelection(s *engine.Reducer, pattern string, before, after []float32) {
	idx, val, err := s.Read(r.ctx, got(s.SelectedEntries()))
	must(err)
	keeps := pattern == sparsity.Gtopk || pattern == sparsity.Oktopk
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

// sameResult compares the entries of a step with the result in the tensor, and leaves
// dense zero, as it was.
func (r *rank) sameResult(u *run, dense *runtime.Tensor) {
	s := u.reducer
	list, err := s.Entries()
	if sparsity.NeedsHost(u.cfg.Pattern) && errors.Is(err, comm.ErrUnsupported) {
		return // these patterns may make a dense result
	}
	must(err)
	idx, val, err := s.Read(r.ctx, list)
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
	must(dense.Fill(0))
}
