package cpu

import (
	"math"
	"slices"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cpu/internal/f32"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// kernels are the [kernel.Kernels] of host memory: each method checks its
// arguments, turns addresses into slices and leaves the work to a function on
// slices. They run on the calling goroutine and are done when they return.
type kernels struct{ rt *Runtime }

var _ kernel.Provider = (*Runtime)(nil)

// Kernels implements [kernel.Provider].
func (rt *Runtime) Kernels() kernel.Kernels {
	return kernels{rt}
}

// How many numbers Refine and Sample take.
const (
	maxFactors   = 64
	maxQuantiles = 64
)

// tiny is the smallest magnitude above zero.
const tiny = math.SmallestNonzeroFloat32

func (k kernels) Accumulate(src kernel.Source) error {
	c := k.checks("Accumulate")
	from := c.source(src)
	if src.Grad == 0 {
		c.floats("grad", 0, src.N)
	}
	return c.with(func(s *scratch) { s.accumulate(&from, 0, len(from.x)) })
}

func (k kernels) Store(dst uintptr, dt dtype.DType, src uintptr, n int, scale float32, excess uintptr) error {
	c := k.checks("Store")
	c.elements("dst", dst, dt, n)
	x := c.floats("src", src, n)
	e := c.optionalFloats("excess", excess, n)
	return c.with(func(s *scratch) { s.store(dst, dt, x, scale, e) })
}

func (k kernels) Scale(x uintptr, dt dtype.DType, n int, factor uintptr) error {
	c := k.checks("Scale")
	c.elements("x", x, dt, n)
	f := number[float32](&c, "factor", factor)
	return c.with(func(s *scratch) { s.scale(x, dt, n, *f) })
}

func (k kernels) SumSquares(x uintptr, dt dtype.DType, n int, sum uintptr) error {
	c := k.checks("SumSquares")
	c.elements("x", x, dt, n)
	out := number[float64](&c, "sum", sum)
	return c.with(func(s *scratch) { *out = s.sumSquares(x, dt, n) })
}

func (k kernels) ClipFactor(factor, squares uintptr, m int, share, limit float64) error {
	c := k.checks("ClipFactor")
	f := number[float32](&c, "factor", factor)
	parts := slice[float64](&c, "squares", squares, m)
	if m < 1 {
		c.fail("%d sums of squares, want at least one", m)
	}
	if c.err != nil {
		return c.err
	}
	sum := 0.0
	for _, part := range parts {
		sum += part
	}
	*f = 1
	norm := math.Sqrt(sum * share)
	if norm > limit && norm <= math.MaxFloat64 {
		*f = float32(limit / norm)
	}
	return nil
}

func (k kernels) CopyIf(copies []kernel.Copy, flags uintptr, m int) error {
	c := k.checks("CopyIf")
	if m < 1 {
		c.fail("%d flags, want at least one", m)
	}
	if len(copies) > kernel.MaxCopies {
		c.fail("%d copies, want at most %d", len(copies), kernel.MaxCopies)
	}
	for _, x := range copies {
		c.elements("dst", x.Dst, x.DType, x.N)
		if x.Src != 0 {
			c.elements("src", x.Src, x.DType, x.N)
		}
	}
	set := c.ints("flags", flags, m)
	if c.err != nil {
		return c.err
	}
	if !slices.ContainsFunc(set, func(flag int32) bool { return flag != 0 }) {
		return nil
	}
	for _, x := range copies {
		dst := hostmem.Slice[byte](x.Dst, x.N*x.DType.Size())
		if x.Src == 0 {
			clear(dst)
		} else {
			copy(dst, hostmem.Slice[byte](x.Src, len(dst)))
		}
	}
	return nil
}

func (k kernels) TopK(src kernel.Source, n int, dst kernel.Entries, threshold uintptr) error {
	c := k.checks("TopK")
	from := c.source(src)
	to := c.target("dst", dst)
	c.room(dst, c.length("k", n), src.N)
	kept := optional[guess](&c, threshold)
	return c.with(func(s *scratch) {
		var g guess
		if kept != nil {
			g = kept.checked()
		}
		count, key := s.topK(&from, n, to.entries, g, dst.Len == 0)
		set(to.length, int32(count))
		set(kept, g.next(math.Float32frombits(key)))
	})
}

func (k kernels) Select(src kernel.Source, threshold uintptr, dst kernel.Entries) error {
	c := k.checks("Select")
	from := c.source(src)
	to := c.target("dst", dst)
	t := number[float32](&c, "threshold", threshold)
	return c.with(func(s *scratch) {
		count := s.pick(&from, thresholdKey(*t), to.entries)
		set(to.length, int32(count))
	})
}

func (k kernels) SelectNear(src kernel.Source, n int, state uintptr, near kernel.Acceptance, dst kernel.Entries,
	used uintptr) error {
	c := k.checks("SelectNear")
	from := c.source(src)
	to := c.target("dst", dst)
	c.room(dst, c.length("k", n), src.N)
	number[int32](&c, "dst.Len", dst.Len)
	saved := number[nearState](&c, "state", state)
	u := optional[float32](&c, used)
	return c.with(func(s *scratch) {
		count, threshold := s.selectNear(&from, n, saved, near, to.entries)
		set(to.length, int32(count))
		set(u, threshold)
	})
}

func (k kernels) Fit(src kernel.Source, z float64, threshold uintptr) error {
	c := k.checks("Fit")
	from := c.source(src)
	t := number[float32](&c, "threshold", threshold)
	return c.with(func(s *scratch) {
		mean, std := s.meanStd(&from)
		*t = max(float32(math.Abs(mean)+float64(z*std)), tiny)
	})
}

func (k kernels) Refine(x uintptr, n int, threshold uintptr, wanted int, factors []float32) error {
	c := k.checks("Refine")
	xs := c.floats("x", x, n)
	t := number[float32](&c, "threshold", threshold)
	c.length("k", wanted)
	c.limit("factors", len(factors), maxFactors)
	return c.with(func(s *scratch) { *t = s.refine(xs, *t, wanted, factors) })
}

func (k kernels) TopKList(l kernel.Entries, n int, dst kernel.Entries, without uintptr, residual kernel.Array) error {
	c := k.checks("TopKList")
	from := c.list("l", l)
	to := c.target("dst", dst)
	hole := optional[[2]int32](&c, without)
	x, faults := c.optionalArray(residual)
	c.room(dst, c.length("k", n), l.N)
	return c.with(func(s *scratch) {
		if hole != nil {
			from = s.outside(from, hole[0], hole[1])
		}
		count, _ := s.topK(&source{x: from.val}, n, to.entries, guess{}, true)
		set(to.length, int32(count))
		translate(to.idx[:count], from.idx)
		if residual.Ptr == 0 || count == len(from.idx) {
			return
		}
		outside := s.restore(x, from, to.idx[:count])
		for _, i := range to.idx[:count] { // these are not restored, so they are no faults
			outside -= int32(oneIf(uint(uint32(i)) >= uint(len(x))))
		}
		add(faults, outside)
	})
}

func (k kernels) SelectList(l kernel.Entries, threshold uintptr, dst kernel.Entries) error {
	c := k.checks("SelectList")
	from := c.list("l", l)
	to := c.target("dst", dst)
	t := number[float32](&c, "threshold", threshold)
	if c.err != nil {
		return c.err
	}
	count := f32.SelectRange(from.val, 0, thresholdKey(*t), f32.MaxKey, to.idx, to.val)
	set(to.length, int32(count))
	translate(to.idx[:min(count, len(to.idx))], from.idx)
	return nil
}

func (k kernels) CountAbove(l kernel.Entries, thresholds uintptr, m int, counts uintptr) error {
	c := k.checks("CountAbove")
	val := c.floats("l", l.Val, c.listLength("l", l))
	ts := c.floats("thresholds", thresholds, m)
	out := c.ints("counts", counts, m)
	return c.with(func(s *scratch) { s.countAbove(val, ts, out) })
}

func (k kernels) Narrow(bracket, counts uintptr, wanted int, thresholds uintptr, m int) error {
	c := k.checks("Narrow")
	b := number[[2]uint32](&c, "bracket", bracket)
	ts := slice[uint32](&c, "thresholds", thresholds, m)
	var passed []int32
	if counts != 0 {
		passed = c.ints("counts", counts, m)
	}
	c.length("k", wanted)
	if c.err != nil {
		return c.err
	}
	narrowBracket(b, counts == 0, passed, wanted, ts)
	return nil
}

func (k kernels) Merge(dst uintptr, dt dtype.DType, n int, lists []kernel.Entries, scale float32,
	faults, excess uintptr, back kernel.Restoration) error {
	c := k.checks("Merge")
	c.elements("dst", dst, dt, n)
	f := optional[int32](&c, faults)
	e := c.optionalFloats("excess", excess, n)
	s := scratches.get()
	defer scratches.put(s)
	c.lists(s, lists)
	x, backFaults := c.array(back.Dst)
	from := c.list("back.L", back.L)
	taken := c.indices("back.Taken", back.Taken)
	if c.err != nil {
		return c.err
	}
	add(f, s.merge(dst, dt, n, scale, e))
	add(backFaults, s.restore(x, from, taken))
	return nil
}

func (k kernels) Union(dst kernel.Entries, n int, lists []kernel.Entries, scale float32,
	faults, threshold uintptr) error {
	c := k.checks("Union")
	to := c.target("dst", dst)
	f := optional[int32](&c, faults)
	t := optional[float32](&c, threshold)
	number[int32](&c, "dst.Len", dst.Len)
	s := scratches.get()
	defer scratches.put(s)
	capacity := min(c.lists(s, lists), c.length("n", n))
	if c.err != nil {
		return c.err
	}
	sums := to.entries
	if capacity > dst.N { // what does not fit may be below the threshold
		s.around.resize(capacity)
		sums = s.around
	}
	count, outside := s.union(sums, n, scale)
	if t != nil {
		count = sums.cut(count).keepAbove(thresholdKey(*t))
	}
	if capacity > dst.N {
		sums = sums.cut(count)
		copy(to.idx, sums.idx)
		copy(to.val, sums.val)
	}
	set(to.length, int32(count))
	add(f, outside)
	return nil
}

func (k kernels) ScatterAdd(dst kernel.Array, l kernel.Entries, scale float32) error {
	c := k.checks("ScatterAdd")
	x, faults := c.array(dst)
	from := c.list("l", l)
	if c.err != nil {
		return c.err
	}
	add(faults, scatterAdd(x, from, scale))
	return nil
}

func (k kernels) ScatterZero(dst kernel.Array, l kernel.Entries) error {
	c := k.checks("ScatterZero")
	x, faults := c.array(dst)
	idx := c.indices("l", l)
	if c.err != nil {
		return c.err
	}
	add(faults, scatterZero(x, idx))
	return nil
}

func (k kernels) Restore(dst kernel.Array, l, taken kernel.Entries) error {
	c := k.checks("Restore")
	x, faults := c.array(dst)
	from := c.list("l", l)
	without := c.indices("taken", taken)
	return c.with(func(s *scratch) {
		add(faults, s.restore(x, from, without))
	})
}

func (k kernels) LowerBounds(l kernel.Entries, bounds uintptr, m int, positions, lengths uintptr) error {
	c := k.checks("LowerBounds")
	idx := c.indices("l", l)
	bs := c.ints("bounds", bounds, m)
	ps := c.ints("positions", positions, m)
	var ls []int32
	if lengths != 0 {
		ls = c.ints("lengths", lengths, max(m-1, 0))
	}
	if c.err != nil {
		return c.err
	}
	lowerBounds(idx, bs, ps, ls)
	return nil
}

func (k kernels) CopyPieces(pieces []kernel.Piece) error {
	c := k.checks("CopyPieces")
	for i, p := range pieces {
		c.list("from", p.From)
		c.target("to", p.To)
		number[int32](&c, "to.Len", p.To.Len)
		if i >= kernel.MaxPieces && p.To == pieces[i-kernel.MaxPieces].To {
			c.fail("more than %d pieces are to be put together", kernel.MaxPieces)
		}
	}
	if c.err != nil {
		return c.err
	}
	total := 0
	for i, p := range pieces {
		if i == 0 || p.To != pieces[i-1].To {
			total = 0
		}
		from := c.list("from", p.From)
		to := c.target("to", p.To)
		start := c.position(p, from, p.Start, 0)
		end := max(c.position(p, from, p.End, len(from.idx)), start)
		position := min(total, len(to.idx))
		copy(to.idx[position:], from.idx[start:end])
		copy(to.val[position:], from.val[start:end])
		total = min(total+end-start, math.MaxInt32)
		*to.length = int32(total)
	}
	return nil
}

// position returns where in a list a piece begins or ends: the bound at address says it, if that is not 0.
func (c *checks) position(p kernel.Piece, from entries, address uintptr, otherwise int) int {
	if address == 0 {
		return otherwise
	}
	bound := *number[int32](c, "bound", address)
	if p.ByIndex {
		position, _ := slices.BinarySearch(from.idx, bound)
		return position
	}
	return min(max(int(bound), 0), len(from.idx))
}

func (k kernels) Sample(l kernel.Entries, quantiles []float64, n int, dst uintptr) error {
	c := k.checks("Sample")
	idx := c.indices("l", l)
	out := c.ints("dst", dst, len(quantiles))
	c.length("n", n)
	c.limit("quantiles", len(quantiles), maxQuantiles)
	for i, q := range quantiles {
		if math.IsNaN(q) || q < 0 || q >= 1 {
			c.fail("quantiles[%d] is %v, want 0 <= q < 1", i, q)
		}
	}
	if c.err != nil {
		return c.err
	}
	sample(out, idx, quantiles, n)
	return nil
}

func (k kernels) Balance(samples uintptr, m, n int, bounds uintptr, parts int) error {
	c := k.checks("Balance")
	c.length("n", n)
	if m < 1 || parts < 1 {
		c.fail("%d samples for %d parts, want at least one of each", m, parts)
	}
	from := c.ints("samples", samples, m)
	out := c.ints("bounds", bounds, max(parts, 0)+1)
	if c.err != nil {
		return c.err
	}
	balance(out, from, n)
	return nil
}
