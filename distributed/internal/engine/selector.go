package engine

import (
	"math"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// exact selects the k entries of largest magnitude; of equal ones, those with lower indices.
type exact struct{ *engine }

func exactSelector(e *engine) selector { return exact{e} }

func (s exact) capacity(k int) int { return k }

func (s exact) selectEntries(g Input, k int, dst kernel.Entries) kernel.Entries {
	s.topK(s.source(g), k, exactly(dst, k), s.address(numState))
	s.used = numState
	return exactly(dst, k)
}

// nonzero is exact without the zeros that pad a list when the tensor has fewer than k other entries: if list lengths
// may vary, they need not be sent.
type nonzero struct{ exact }

func nonzeroSelector(e *engine) selector {
	return nonzero{exact{e}}
}

func (s nonzero) selectEntries(g Input, k int, dst kernel.Entries) kernel.Entries {
	s.topK(s.source(g), k, dst, s.address(numState))
	s.used = numState
	return dst
}

// chunks selects the entries of largest magnitude of each chunk, the same number of each; of equal ones, those with
// lower indices. It needs no threshold, and selects the same number on each rank.
type chunks struct{ *engine }

func chunkedSelector(e *engine) selector { return chunks{e} }

// chunkElements is the number of elements of a chunk.
const chunkElements = 4096

// perChunk returns the number of entries selected of each chunk, also of a short last one, if k of all are.
func (s chunks) perChunk(k int) int {
	chunk := min(chunkElements, s.n)
	return min(max(int(math.Round(float64(k)*float64(chunk)/float64(s.n))), 1), chunk)
}

func (s chunks) capacity(k int) int {
	return kernel.ChunkedLen(s.n, s.perChunk(k), chunkElements)
}

func (s chunks) selectEntries(g Input, k int, dst kernel.Entries) kernel.Entries {
	dst = exactly(dst, s.capacity(k))
	dst.Shared = 0
	s.adds(func() error {
		return s.kernels.TopKChunks(s.source(g), s.perChunk(k), chunkElements, dst)
	})
	return dst
}

// nothing selects no entry, for an exchange that takes the whole residual. An exchange that rounds also adds the
// gradient to it, if possible without a separate pass.
type nothing struct{ *engine }

func noSelector(e *engine) selector { return nothing{e} }

func (nothing) capacity(int) int { return 0 }

func (s nothing) selectEntries(g Input, _ int, dst kernel.Entries) kernel.Entries {
	if s.coded() && !g.Lent {
		s.addend = g
	} else {
		s.accumulate(g)
	}
	return exactly(dst, 0)
}

// roomFor returns the capacity of selectors that select about k entries: if more than that reach a threshold, the
// threshold is not usable. It is 3k/2, since lists are padded to it if the host does not wait for their lengths.
func (e *engine) roomFor(k int) int {
	return min(k+(k+1)/2, e.n)
}

// near selects by a threshold if about k entries reach it, and exactly otherwise.
func (e *engine) near(src kernel.Source, k int, o kernel.Acceptance, dst kernel.Entries) {
	e.used = numUsed
	e.makes(dst)
	e.adds(func() error {
		return e.kernels.SelectNear(src, k, e.address(numState), o, dst, e.address(numUsed))
	})
}

// reused selects by the threshold of an earlier exact top-k. Gradient distributions change slowly (Li and Hoefler,
// section 3.1.3), so a threshold serves many steps, which then need only one pass over the tensor.
type reused struct{ *engine }

func reusedSelector(e *engine) selector {
	if e.k == e.n {
		return nonzeroSelector(e) // there is nothing to choose
	}
	return reused{e}
}

func (s reused) capacity(k int) int {
	return s.roomFor(k)
}

func (s reused) selectEntries(g Input, k int, dst kernel.Entries) kernel.Entries {
	s.near(s.source(g), k, kernel.Acceptance{
		Min:      (k + 3) / 4,
		Interval: s.cfg.tuning.ThresholdInterval,
		Step:     thresholdStep,
	}, dst)
	return dst
}

// thresholdStep is the factor by which a reused threshold is corrected.
const thresholdStep float32 = 1.02

// correct moves a threshold that total entries reached where k were wanted, if it was off by more than a third below
// or a quarter above.
func correct(threshold float32, total, k int, step float32) float32 {
	switch {
	case 3*total < 2*k:
		threshold /= step
	case 4*total > 5*k:
		threshold *= step
	}
	return max(threshold, tiny)
}

// gaussian selects by the threshold that k of n entries would reach if they were normally distributed, corrected until
// about k do.
//
// Gradients have heavier tails than the normal distribution, so the first threshold is often far off. The published
// code corrects it by 2 % at a time, at most 20 times, with a pass over the tensor for each. Here a round of
// correction chooses from a ladder of factors. The first ladder spans seven powers of ten either way, and each later
// one the gap between two steps of the previous.
type gaussian struct{ *engine }

func gaussianSelector(e *engine) selector {
	if e.k == e.n {
		return nonzeroSelector(e) // there is nothing to choose
	}
	return gaussian{e}
}

// ladders returns the factors of each round, ascending.
var ladders = sync.OnceValue(func() [][]float32 {
	const steps = 31 // up, and as many down
	const rounds = 3
	var all [][]float32
	ratio := 1.7
	for round := range rounds {
		factors := make([]float32, 2*steps+1)
		first := -steps
		if round > 0 {
			ratio = math.Pow(ratio, 1/float64(2*steps+1))
			first = -2 * steps
		}
		for i := range factors {
			factors[i] = float32(math.Pow(ratio, float64(first+i)))
		}
		all = append(all, factors)
	}
	return all
})

func (s gaussian) capacity(k int) int {
	return s.roomFor(k)
}

func (s gaussian) selectEntries(g Input, k int, dst kernel.Entries) kernel.Entries {
	// t such that a share k/n of a normal distribution with the tensor's mean and
	// deviation is farther than t from the mean.
	z := math.Sqrt2 * math.Erfinv(1-float64(k)/float64(s.n))
	state := s.address(numState)
	s.adds(func() error { return s.kernels.Fit(s.source(g), z, state) })
	for _, factors := range ladders() {
		s.do(func() error {
			return s.kernels.Refine(s.residual, s.n, state, k, factors)
		})
	}
	// No threshold separates the entries of a constant tensor, a few outliers can put the fit out of the correction's
	// reach, and the fit of a NaN is useless: then the selection is exact.
	s.near(s.source(Input{}), k, kernel.Acceptance{Min: 1}, dst)
	return dst
}

// custom selects by a Selector.
type custom struct {
	*engine
	tensors []*runtime.Tensor // of a few addresses
}

func (s *custom) capacity(k int) int { return k }

func (s *custom) selectEntries(g Input, k int, dst kernel.Entries) kernel.Entries {
	s.accumulate(g)
	dst.Shared = 0
	sum := s.tensor(s.residual, dtype.F32, s.n)
	indices := s.tensor(dst.Idx, dtype.I32, k)
	values := s.tensor(dst.Val, dtype.F32, k)
	s.do(func() error {
		return s.cfg.Selector.Select(s.stats.Step, sum, indices, values)
	})
	if s.err == nil && dst.Len != 0 {
		s.check(s.rt.Fill(dst.Len, 1, dtype.I32, float64(k)))
	}
	s.tell(dst)
	s.do(func() error {
		return s.kernels.ScatterZero(s.array(s.residual), dst)
	})
	return dst
}

// tell makes the first value a NaN if any entry, selected or not, is not finite: then all ranks notice in this step,
// as with selectors that rank such entries first.
func (s *custom) tell(dst kernel.Entries) {
	if s.err != nil || s.cfg.NonFinite == PassNonFinite {
		return
	}
	count := s.address(numFan)
	value := s.address(numFan + 1)
	s.check(s.rt.Fill(value, 1, dtype.F32, math.NaN()))
	s.do(func() error {
		return s.kernels.CountAbove(kernel.Entries{Val: s.residual, N: s.n}, s.address(numFiniteLimit), 1, count)
	})
	s.copies = append(s.copies[:0], kernel.Copy{
		Dst:   dst.Val,
		Src:   value,
		DType: dtype.F32,
		N:     1,
	})
	s.do(func() error { return s.kernels.CopyIf(s.copies, count, 1) })
}

// tensor returns a tensor of n elements at an address. There are few: the residual is at one of two addresses.
func (s *custom) tensor(p uintptr, dt dtype.DType, n int) *runtime.Tensor {
	i := slices.IndexFunc(s.tensors, func(t *runtime.Tensor) bool {
		place, err := t.Ptr()
		return err == nil && place == p && t.DType() == dt && t.Len() == n
	})
	switch {
	case i >= 0:
		return s.tensors[i]
	case s.err != nil:
		return nil
	}
	t, err := runtime.Wrap(s.rt, p, dt, []int{n}, nil, nil)
	s.check(err)
	if len(s.tensors) == 8 { // memory has moved, and the earlier tensors are no longer used
		s.tensors = s.tensors[:0]
	}
	s.tensors = append(s.tensors, t)
	return t
}
