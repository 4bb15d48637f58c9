package distributedtest

import (
	"bytes"
	"errors"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// testInPlace does the same steps in place and beside a residual: the tensors and
// the residuals have the same bits, and so have the results, as entries, added to
// a tensor of zeros, and written to the gradient.
func testInPlace(r *rank, pattern string) error {
	if pattern == sparse.Dense {
		return nil // has no residual
	}
	for _, density := range []float64{0.05, 0.5, 1} {
		for _, n := range []int{0, 3, 1009} {
			for _, k := range []family{families[0], families[3]} {
				if err := r.inPlace(often(pattern, density), n, k); err != nil {
					return fmt.Errorf("%s, density %v, %d elements: %w", k.name, density, n, err)
				}
			}
		}
	}
	return nil
}

func (r *rank) inPlace(cfg sparse.Config, n int, k family) (err error) {
	cfg.NoUndo, cfg.Selector = true, r.selector
	u, err := r.newRun("beside", n, dtype.F32, cfg)
	if err != nil {
		return err
	}
	defer func() { err = u.close(err) }()
	cfg.InPlace = true
	s, err := sparse.New(r.rt, r.c, n, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	x := make([]float32, n)
	t, err := r.tensor(dtype.F32, x)
	if err != nil {
		return err
	}
	dense, err := r.tensor(dtype.F32, x)
	if err != nil {
		return err
	}
	for step := range 6 {
		gradient := r.suite.gradient(k, n, r.rank, r.size, step)
		if err := u.reduce(gradient); err != nil {
			return err
		}
		for i, g := range gradient {
			x[i] += g
		}
		if err := r.write(t, x); err != nil {
			return err
		}
		if err := s.AllReduce(r.ctx, t); err != nil {
			return err
		}
		if err := r.c.Sync(r.ctx); err != nil {
			return err
		}
		before := x
		if x, err = r.read(t); err != nil {
			return err
		}
		if cfg.Values == "" { // others are rounded
			if err := r.rightSelection(s, cfg.Pattern, before, x); err != nil {
				return fmt.Errorf("step %d: %w", step, err)
			}
		}
		residual, err := u.residual()
		if err != nil {
			return err
		}
		for i, want := range residual {
			if math.Float32bits(x[i]) != math.Float32bits(want) {
				return fmt.Errorf("step %d, element %d: %v is left in place, the residual is %v", step, i, x[i], want)
			}
		}
		if err := r.sameResult(s, u, dense); err != nil {
			return fmt.Errorf("step %d: %w", step, err)
		}
	}
	return nil
}

// rightSelection compares what the rank selected in a step in place with the tensor before
// it: these are its values, and only where it was selected from has the tensor changed,
// but that a node of gtopk's tree, which oktopk has for few entries, keeps what it has
// dropped of other ranks'.
func (r *rank) rightSelection(s *sparse.Reducer, pattern string, before, after []float32) error {
	list, err := s.SelectedEntries()
	if err != nil {
		return err
	}
	idx, val, err := s.Read(r.ctx, list)
	if err != nil {
		return err
	}
	keeps := pattern == sparse.Gtopk || pattern == sparse.Oktopk
	selected := make([]bool, len(before))
	for j, i := range idx {
		if math.Float32bits(val[j]) != math.Float32bits(before[i]) {
			return fmt.Errorf("selected %v as element %d, which was %v", val[j], i, before[i])
		}
		selected[i] = true
	}
	for i, v := range after {
		if len(idx) > 0 && !keeps && v != before[i] && !selected[i] {
			return fmt.Errorf("element %d was %v and is %v, and was not selected", i, before[i], v)
		}
	}
	return nil
}

// sameResult compares what a step in place made with the result beside it, and
// leaves dense zero, as it was.
func (r *rank) sameResult(s *sparse.Reducer, u *run, dense *runtime.Tensor) error {
	want, err := r.read(u.t)
	if err != nil {
		return err
	}
	list, err := s.Entries()
	if err != nil {
		return err
	}
	idx, val, err := s.Read(r.ctx, list)
	if err != nil {
		return err
	}
	entries := make([]float32, u.t.Len())
	for j, i := range idx {
		if j > 0 && i <= idx[j-1] {
			return fmt.Errorf("entry %d has index %d after %d", j, i, idx[j-1])
		}
		entries[i] = val[j]
	}
	if err := s.AddResult(dense, 1); err != nil {
		return err
	}
	added, err := r.read(dense)
	if err != nil {
		return err
	}
	for i, w := range want {
		if entries[i] != w || added[i] != w {
			return fmt.Errorf("element %d is %v as entry and %v added, %v beside", i, entries[i], added[i], w)
		}
	}
	if err := s.ClearResult(dense); err != nil {
		return err
	}
	cleared, err := r.bytes(dense)
	if err == nil && len(bytes.Trim(cleared, "\x00")) > 0 {
		err = errors.New("the result is not cleared")
	}
	return err
}
