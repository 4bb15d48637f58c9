package cpu

import (
	"fmt"
	"math"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu/internal/f32"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// checks are the checks of a method's arguments. Once one has failed, what they return
// is empty.
type checks struct {
	op  string // the method's name
	err error  // the first one, which sticks
}

func (k kernels) checks(op string) checks {
	c := checks{op: op}
	if k.rt.pool.Closed() {
		c.err = errClosed(op)
	}
	return c
}

// with calls f with working memory, unless an argument is wrong.
func (c *checks) with(f func(s *scratch)) error {
	if c.err != nil {
		return c.err
	}
	s := scratches.get()
	f(s)
	scratches.put(s)
	return nil
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

// limit checks how many values there are.
func (c *checks) limit(name string, n, limit int) {
	if n > limit {
		c.fail("%d %s, want at most %d", n, name, limit)
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
		c.err = fmt.Errorf("cpu: %s: element type of %s is %s, want f32, f16 or bf16: %w",
			c.op, name, dt, runtime.ErrDType)
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

func (c *checks) ints(name string, p uintptr, n int) []int32 {
	return slice[int32](c, name, p, n)
}

// optionalFloats returns the array at p, nil for 0.
func (c *checks) optionalFloats(name string, p uintptr, n int) []float32 {
	if p == 0 {
		return nil
	}
	return c.floats(name, p, n)
}

// number returns what is at address p.
func number[T any](c *checks, name string, p uintptr) *T {
	s := slice[T](c, name, p, 1)
	if s == nil {
		return nil
	}
	return &s[0]
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
	if src.Grad == 0 {
		return s
	}
	c.elements("grad", src.Grad, src.DType, src.N)
	s.grad = src.Grad
	s.dt = src.DType
	s.factor = 1
	s.from = s.x
	if src.From != 0 {
		s.from = c.floats("from", src.From, src.N)
	}
	if src.Keep != 0 {
		s.keep = c.floats("keep", src.Keep, src.N)
	}
	if src.Factor == 0 {
		return s
	}
	if f := number[float32](c, "factor", src.Factor); f != nil {
		s.factor = *f
		s.scaled = true
	}
	return s
}

// listLength returns how many entries a list has that is read.
func (c *checks) listLength(name string, l kernel.Entries) int {
	n := c.length(name, l.N)
	if c.err != nil || l.Len == 0 {
		return n
	}
	length := int(*number[int32](c, name, l.Len))
	return min(max(length, 0), n)
}

// list returns the entries of a list that is read. Its addresses are checked
// for all that it can hold.
func (c *checks) list(name string, l kernel.Entries) entries {
	e := entries{c.ints(name, l.Idx, l.N), c.floats(name, l.Val, l.N)}
	n := c.listLength(name, l)
	if c.err != nil {
		return entries{}
	}
	return e.cut(n)
}

// indices returns the indices of a list whose values are not looked at.
func (c *checks) indices(name string, l kernel.Entries) []int32 {
	idx := c.ints(name, l.Idx, l.N)
	n := c.listLength(name, l)
	if c.err != nil {
		return nil
	}
	return idx[:n]
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
	length *int32 // nil where dst.Len is 0
}

func (c *checks) target(name string, dst kernel.Entries) target {
	e := entries{c.ints(name, dst.Idx, dst.N), c.floats(name, dst.Val, dst.N)}
	return target{entries: e, length: optional[int32](c, dst.Len)}
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

func floats(p uintptr, n int) []float32 {
	return hostmem.Slice[float32](p, n)
}
