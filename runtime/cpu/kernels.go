package cpu

import (
	"fmt"
	"math"
	"slices"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu/internal/f32"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// kernels are the [kernel.Kernels] of host memory: each method checks its
// arguments, turns addresses into slices and leaves the work to a function on
// slices. They run on the calling goroutine and are done when they return.
type kernels struct{ rt *Runtime }

var _ kernel.Provider = (*Runtime)(nil)

// Kernels implements [kernel.Provider].
func (rt *Runtime) Kernels() kernel.Kernels { return kernels{rt} }

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

func (k kernels) Store(dst uintptr, dt dtype.DType, src uintptr, n int, scale float32, rest uintptr) error {
	c := k.checks("Store")
	c.elements("dst", dst, dt, n)
	x, kept := c.floats("src", src, n), c.rest(rest, n)
	return c.with(func(s *scratch) { s.store(dst, dt, x, scale, kept) })
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
	f, parts := number[float32](&c, "factor", factor), slice[float64](&c, "squares", squares, m)
	if m < 1 {
		c.fail("%d sums of squares, want at least one", m)
	}
	if c.err == nil {
		*f = 1
		sum := 0.0
		for _, part := range parts {
			sum += part
		}
		if norm := math.Sqrt(sum * share); norm > limit && norm <= math.MaxFloat64 {
			*f = float32(limit / norm)
		}
	}
	return c.err
}

func (k kernels) CopyIf(copies []kernel.Copy, flags uintptr, m int) error {
	c := k.checks("CopyIf")
	if m < 1 {
		c.fail("%d flags, want at least one", m)
	}
	if len(copies) > kernel.MaxCopies {
		c.fail("%d copies, want at most %d", len(copies), kernel.MaxCopies)
	}
	for _, one := range copies {
		c.elements("dst", one.Dst, one.DType, one.N)
		if one.Src != 0 {
			c.elements("src", one.Src, one.DType, one.N)
		}
	}
	raised := func(flag int32) bool { return flag != 0 }
	if set := c.ints("flags", flags, m); c.err != nil || !slices.ContainsFunc(set, raised) {
		return c.err
	}
	for _, one := range copies {
		dst := hostmem.Slice[byte](one.Dst, one.N*one.DType.Size())
		if one.Src == 0 {
			clear(dst)
		} else {
			copy(dst, hostmem.Slice[byte](one.Src, len(dst)))
		}
	}
	return nil
}

func (k kernels) TopK(src kernel.Source, n int, dst kernel.Entries, threshold uintptr) error {
	c := k.checks("TopK")
	from, to := c.source(src), c.target("dst", dst)
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
	from, to := c.source(src), c.target("dst", dst)
	t := number[float32](&c, "threshold", threshold)
	return c.with(func(s *scratch) { set(to.length, int32(s.pick(&from, thresholdKey(*t), to.entries))) })
}

func (k kernels) SelectNear(src kernel.Source, n int, state uintptr, o kernel.Acceptance, dst kernel.Entries, used uintptr) error {
	c := k.checks("SelectNear")
	from, to := c.source(src), c.target("dst", dst)
	c.room(dst, c.length("k", n), src.N)
	number[int32](&c, "dst.Len", dst.Len)
	near, u := number[nearState](&c, "state", state), optional[float32](&c, used)
	return c.with(func(s *scratch) {
		count, threshold := s.selectNear(&from, n, near, o, to.entries)
		set(to.length, int32(count))
		set(u, threshold)
	})
}

func (k kernels) Fit(src kernel.Source, z float64, threshold uintptr) error {
	c := k.checks("Fit")
	from, t := c.source(src), number[float32](&c, "threshold", threshold)
	return c.with(func(s *scratch) {
		mean, std := s.meanStd(&from)
		*t = max(float32(math.Abs(mean)+float64(z*std)), tiny)
	})
}

func (k kernels) Refine(x uintptr, n int, threshold uintptr, wanted int, factors []float32) error {
	c := k.checks("Refine")
	xs, t := c.floats("x", x, n), number[float32](&c, "threshold", threshold)
	c.length("k", wanted)
	c.atMost64("factors", len(factors))
	return c.with(func(s *scratch) { *t = s.refine(xs, *t, wanted, factors) })
}

func (k kernels) TopKList(l kernel.Entries, n int, dst kernel.Entries, without uintptr, rest kernel.Array) error {
	c := k.checks("TopKList")
	from, to, hole := c.list("l", l), c.target("dst", dst), optional[[2]int32](&c, without)
	x, faults := c.optionalArray(rest)
	c.room(dst, c.length("k", n), l.N)
	return c.with(func(s *scratch) {
		if hole != nil {
			from = s.outside(from, hole[0], hole[1])
		}
		count, _ := s.topK(&source{x: from.val}, n, to.entries, guess{}, true)
		set(to.length, int32(count))
		translate(to.idx[:count], from.idx)
		if rest.Ptr != 0 && count < len(from.idx) {
			outside := s.giveBack(x, from, to.idx[:count])
			for _, i := range to.idx[:count] { // are not left out
				outside -= int32(oneIf(uint(uint32(i)) >= uint(len(x))))
			}
			add(faults, outside)
		}
	})
}

func (k kernels) SelectList(l kernel.Entries, threshold uintptr, dst kernel.Entries) error {
	c := k.checks("SelectList")
	from, to := c.list("l", l), c.target("dst", dst)
	t := number[float32](&c, "threshold", threshold)
	if c.err == nil {
		count := f32.SelectRange(from.val, 0, thresholdKey(*t), f32.MaxKey, to.idx, to.val)
		set(to.length, int32(count))
		translate(to.idx[:min(count, len(to.idx))], from.idx)
	}
	return c.err
}

func (k kernels) CountAbove(l kernel.Entries, thresholds uintptr, m int, counts uintptr) error {
	c := k.checks("CountAbove")
	val := c.floats("l", l.Val, c.listLength("l", l))
	ts, out := c.floats("thresholds", thresholds, m), c.ints("counts", counts, m)
	return c.with(func(s *scratch) { s.countAbove(val, ts, out) })
}

func (k kernels) Narrow(bracket uintptr, counts uintptr, wanted int, thresholds uintptr, m int) error {
	c := k.checks("Narrow")
	b, ts := number[[2]uint32](&c, "bracket", bracket), slice[uint32](&c, "thresholds", thresholds, m)
	var passed []int32
	if counts != 0 {
		passed = c.ints("counts", counts, m)
	}
	c.length("k", wanted)
	if c.err == nil {
		narrowBracket(b, counts == 0, passed, wanted, ts)
	}
	return c.err
}

func (k kernels) Merge(dst uintptr, dt dtype.DType, n int, lists []kernel.Entries, scale float32, faults, rest uintptr, back kernel.Restoration) error {
	c := k.checks("Merge")
	c.elements("dst", dst, dt, n)
	f, kept := optional[int32](&c, faults), c.rest(rest, n)
	s := scratches.get()
	defer scratches.put(s)
	c.lists(s, lists)
	x, backFaults := c.array(back.Dst)
	from, without := c.list("back.L", back.L), c.indices("back.Taken", back.Taken)
	if c.err == nil {
		add(f, s.merge(dst, dt, n, scale, kept))
		add(backFaults, s.giveBack(x, from, without))
	}
	return c.err
}

func (k kernels) Union(dst kernel.Entries, n int, lists []kernel.Entries, scale float32, faults, threshold uintptr) error {
	c := k.checks("Union")
	to, f, t := c.target("dst", dst), optional[int32](&c, faults), optional[float32](&c, threshold)
	number[int32](&c, "dst.Len", dst.Len)
	s := scratches.get()
	defer scratches.put(s)
	all := min(c.lists(s, lists), c.length("n", n))
	if c.err == nil {
		sums := to.entries
		if all > dst.N {
			s.around.resize(all)
			sums = s.around
		}
		count, outside := s.union(sums, n, scale)
		if t != nil {
			count = sums.cut(count).keepAbove(thresholdKey(*t))
		}
		if all > dst.N {
			sums = sums.cut(count)
			copy(to.idx, sums.idx)
			copy(to.val, sums.val)
		}
		set(to.length, int32(count))
		add(f, outside)
	}
	return c.err
}

func (k kernels) ScatterAdd(dst kernel.Array, l kernel.Entries, scale float32) error {
	c := k.checks("ScatterAdd")
	x, faults := c.array(dst)
	if from := c.list("l", l); c.err == nil {
		add(faults, scatterAdd(x, from, scale))
	}
	return c.err
}

func (k kernels) ScatterSet(dst kernel.Array, l kernel.Entries) error {
	return k.scatter("ScatterSet", scatterSet, dst, l)
}

func (k kernels) scatter(name string, scatter func([]float32, entries) int32, dst kernel.Array, l kernel.Entries) error {
	c := k.checks(name)
	x, faults := c.array(dst)
	if from := c.list("l", l); c.err == nil {
		add(faults, scatter(x, from))
	}
	return c.err
}

func (k kernels) ScatterZero(dst kernel.Array, l kernel.Entries) error {
	c := k.checks("ScatterZero")
	x, faults := c.array(dst)
	if idx := c.indices("l", l); c.err == nil {
		add(faults, zeroAt(x, idx))
	}
	return c.err
}

func (k kernels) Restore(dst kernel.Array, l, taken kernel.Entries) error {
	c := k.checks("Restore")
	x, faults := c.array(dst)
	from, without := c.list("l", l), c.indices("taken", taken)
	return c.with(func(s *scratch) { add(faults, s.giveBack(x, from, without)) })
}

func (k kernels) LowerBounds(l kernel.Entries, bounds uintptr, m int, positions, lengths uintptr) error {
	c := k.checks("LowerBounds")
	idx := c.indices("l", l)
	bs, ps := c.ints("bounds", bounds, m), c.ints("positions", positions, m)
	var ls []int32
	if lengths != 0 {
		ls = c.ints("lengths", lengths, max(m-1, 0))
	}
	if c.err == nil {
		lowerBounds(idx, bs, ps, ls)
	}
	return c.err
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
		from, to := c.list("from", p.From), c.target("to", p.To)
		place := func(address uintptr, otherwise int) int {
			if address == 0 {
				return otherwise
			}
			bound := *number[int32](&c, "bound", address)
			if p.ByIndex {
				position, _ := slices.BinarySearch(from.idx, bound)
				return position
			}
			return min(max(int(bound), 0), len(from.idx))
		}
		start := place(p.Start, 0)
		end := max(place(p.End, len(from.idx)), start)
		at := min(total, len(to.idx))
		copy(to.idx[at:], from.idx[start:end])
		copy(to.val[at:], from.val[start:end])
		total = min(total+end-start, math.MaxInt32)
		*to.length = int32(total)
	}
	return nil
}

func (k kernels) Sample(l kernel.Entries, quantiles []float64, n int, dst uintptr) error {
	c := k.checks("Sample")
	idx, out := c.indices("l", l), c.ints("dst", dst, len(quantiles))
	c.length("n", n)
	c.atMost64("quantiles", len(quantiles))
	for i, q := range quantiles {
		if !(q >= 0 && q < 1) {
			c.fail("quantiles[%d] is %v, want 0 <= q < 1", i, q)
		}
	}
	if c.err == nil {
		sample(out, idx, quantiles, n)
	}
	return c.err
}

func (k kernels) Balance(samples uintptr, m, n int, bounds uintptr, parts int) error {
	c := k.checks("Balance")
	c.length("n", n)
	if m < 1 || parts < 1 {
		c.fail("%d samples for %d parts, want at least one of each", m, parts)
	}
	from, out := c.ints("samples", samples, m), c.ints("bounds", bounds, max(parts, 0)+1)
	if c.err == nil {
		balance(out, from, n)
	}
	return c.err
}

// checks are those of the arguments of a method. Their first error sticks; from then on
// what they return is empty.
type checks struct {
	op  string
	err error
}

func (k kernels) checks(op string) checks {
	if k.rt.pool.Closed() {
		return checks{op, errClosed(op)}
	}
	return checks{op, nil}
}

// with calls f with working memory, unless an argument is wrong.
func (c *checks) with(f func(s *scratch)) error {
	if c.err == nil {
		s := scratches.get()
		f(s)
		scratches.put(s)
	}
	return c.err
}

// fail makes an error of a bad argument, if it is the first.
func (c *checks) fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf("cpu: %s: %s: %w", c.op, fmt.Sprintf(format, args...), runtime.ErrArgument)
	}
}

// length checks a number of elements, and returns it.
func (c *checks) length(name string, n int) int {
	if n < 0 || n > math.MaxInt32 {
		c.fail("%s is %d, want 0 to %d", name, n, math.MaxInt32)
	}
	return n
}

func (c *checks) atMost64(name string, n int) {
	if n > 64 {
		c.fail("%d %s, want at most 64", n, name)
	}
}

// buffer checks an array of n elements, and tells whether it can be read.
func (c *checks) buffer(name string, p uintptr, n int) bool {
	if n < 0 || n > math.MaxInt32 {
		c.fail("%s has %d elements, want 0 to %d", name, n, math.MaxInt32)
	} else if p == 0 && n > 0 {
		c.fail("%s is nil but has %d elements", name, n)
	}
	return c.err == nil
}

// elements checks an array of gradients.
func (c *checks) elements(name string, p uintptr, dt dtype.DType, n int) {
	c.buffer(name, p, n)
	switch dt {
	case dtype.F32, dtype.F16, dtype.BF16:
		return
	}
	if c.err == nil {
		c.err = fmt.Errorf("cpu: %s: element type of %s is %s, want f32, f16 or bf16: %w", c.op, name, dt, runtime.ErrDType)
	}
}

// slice returns the array at p.
func slice[T any](c *checks, name string, p uintptr, n int) []T {
	if !c.buffer(name, p, n) {
		return nil
	}
	return hostmem.Slice[T](p, n)
}

func (c *checks) floats(name string, p uintptr, n int) []float32 {
	return slice[float32](c, name, p, n)
}
func (c *checks) ints(name string, p uintptr, n int) []int32 { return slice[int32](c, name, p, n) }

// rest returns the optional array of what results are too large by.
func (c *checks) rest(p uintptr, n int) []float32 {
	if p == 0 {
		return nil
	}
	return c.floats("rest", p, n)
}

// number returns what is at address p.
func number[T any](c *checks, name string, p uintptr) *T {
	if s := slice[T](c, name, p, 1); s != nil {
		return &s[0]
	}
	return nil
}

// optional returns what is at address p, nil for 0.
func optional[T any](c *checks, p uintptr) *T {
	if p == 0 {
		return nil
	}
	return number[T](c, "", p)
}

// set stores v where an optional number is wanted.
func set[T any](p *T, v T) {
	if p != nil {
		*p = v
	}
}

// add adds to a number that may not be wanted.
func add(p *int32, n int32) {
	if p != nil {
		*p += n
	}
}

// source checks the array of a selection.
func (c *checks) source(src kernel.Source) source {
	s := source{x: c.floats("x", src.X, src.N), take: src.Take}
	if src.Grad != 0 {
		c.elements("grad", src.Grad, src.DType, src.N)
		s.grad, s.dt, s.factor, s.from = src.Grad, src.DType, 1, s.x
		if src.From != 0 {
			s.from = c.floats("from", src.From, src.N)
		}
		if src.Keep != 0 {
			s.keep = c.floats("keep", src.Keep, src.N)
		}
		if src.Factor != 0 {
			if f := number[float32](c, "factor", src.Factor); f != nil {
				s.factor, s.scaled = *f, true
			}
		}
	}
	return s
}

// listLength returns how many entries a list has that is read.
func (c *checks) listLength(name string, l kernel.Entries) int {
	n := c.length(name, l.N)
	if c.err == nil && l.Len != 0 {
		n = min(max(int(*number[int32](c, name, l.Len)), 0), n)
	}
	return n
}

// list returns the entries of a list that is read. Its addresses are checked
// for all that it can hold.
func (c *checks) list(name string, l kernel.Entries) entries {
	e := entries{c.ints(name, l.Idx, l.N), c.floats(name, l.Val, l.N)}
	if n := c.listLength(name, l); c.err == nil {
		e = entries{e.idx[:n], e.val[:n]}
	}
	return e
}

// indices returns the indices of a list whose values are not looked at.
func (c *checks) indices(name string, l kernel.Entries) []int32 {
	idx := c.ints(name, l.Idx, l.N)
	if n := c.listLength(name, l); c.err == nil {
		idx = idx[:n]
	}
	return idx
}

// lists makes s.lists the lists, and returns how many entries they may have.
func (c *checks) lists(s *scratch, lists []kernel.Entries) (capacity int) {
	s.lists = s.lists[:0]
	for _, l := range lists {
		s.lists = append(s.lists, c.list("list", l))
		capacity += l.N
	}
	return min(capacity, math.MaxInt32)
}

// target is where a selection writes.
type target struct {
	entries
	length *int32
}

func (c *checks) target(name string, dst kernel.Entries) target {
	return target{entries{c.ints(name, dst.Idx, dst.N), c.floats(name, dst.Val, dst.N)}, optional[int32](c, dst.Len)}
}

// room checks that dst has room for the lesser of a and b.
func (c *checks) room(dst kernel.Entries, a, b int) {
	if need := min(a, b); dst.N < need {
		c.fail("dst has room for %d entries, want %d", dst.N, need)
	}
}

// array returns what lists point into, and the counter of indices that do not.
func (c *checks) array(a kernel.Array) ([]float32, *int32) {
	return c.floats("dst", a.Ptr, a.N), optional[int32](c, a.Faults)
}

// optionalArray is array of one that may be missing.
func (c *checks) optionalArray(a kernel.Array) ([]float32, *int32) {
	if a.Ptr == 0 {
		return nil, nil
	}
	return c.array(a)
}

// thresholdKey returns the smallest key that counts as at least t.
func thresholdKey(t float32) uint32 {
	if t <= 0 {
		return 0
	}
	return f32.Key(t)
}

func floats(p uintptr, n int) []float32 { return hostmem.Slice[float32](p, n) }
