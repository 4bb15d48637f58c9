package cuda

import (
	"fmt"
	"math"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// checks are the checks of a method's arguments.
type checks struct {
	s   *sparse // for its errors
	op  string  // the method's name
	err error   // the first one
}

func (s *sparse) checks(op string) checks {
	return checks{
		s:   s,
		op:  op,
		err: s.rt.usable(),
	}
}

// submit launches the kernels of a method, unless its arguments are wrong.
func (c *checks) submit(launch func() error) error {
	if c.err != nil {
		return c.err
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if err := c.s.err; err != nil {
		return fmt.Errorf("%s: %w", c.op, err)
	}
	c.s.rt.Serialize(c.s.rt)
	if err := c.s.rt.BetweenLaunches(launch); err != nil {
		return fmt.Errorf("%s: %w", c.op, err)
	}
	return nil
}

// fail records the error of a bad argument, if it is the first.
func (c *checks) fail(format string, args ...any) {
	if c.err == nil {
		c.err = c.s.rt.argument("%s: %s", c.op, fmt.Sprintf(format, args...))
	}
}

// length checks a number of elements, and returns it.
func (c *checks) length(name string, n int) int {
	if n < 0 || n > math.MaxInt32 {
		c.fail("%s is %d, want 0 to %d", name, n, math.MaxInt32)
	}
	return n
}

// limit checks a number of values that are passed to a kernel by value.
func (c *checks) limit(name string, n, limit int) {
	if n > limit {
		c.fail("%d %s, want at most %d", n, name, limit)
	}
}

// buffer checks an array of n elements of size bytes.
func (c *checks) buffer(name string, p uintptr, n int, size uintptr) {
	switch {
	case n < 0 || n > math.MaxInt32:
		c.fail("%s has %d elements, want 0 to %d", name, n, math.MaxInt32)
	case p == 0 && n > 0:
		c.fail("%s is nil but has %d elements", name, n)
	case p%size != 0:
		c.fail("%s at %#x is not aligned to %d bytes", name, p, size)
	}
}

// floats checks an array of four-byte elements.
func (c *checks) floats(name string, p uintptr, n int) {
	c.buffer(name, p, n, 4)
}

// number checks the address of a number.
func (c *checks) number(name string, p uintptr, size uintptr) {
	c.buffer(name, p, 1, size)
}

// optional checks the address of a four-byte number, which may be 0.
func (c *checks) optional(name string, p uintptr) {
	c.buffer(name, p, 0, 4)
}

// elements checks an array of gradients.
func (c *checks) elements(name string, p uintptr, dt dtype.DType, n int) {
	switch dt {
	case dtype.F32, dtype.F16, dtype.BF16:
		c.buffer(name, p, n, uintptr(dt.Size()))
		return
	}
	c.buffer(name, p, n, 1)
	if c.err == nil {
		c.err = fmt.Errorf("cuda:%d: %s: element type of %s is %v, want f32, f16 or bf16: %w",
			c.s.rt.index, c.op, name, dt, runtime.ErrDType)
	}
}

func (c *checks) source(src kernel.Source) {
	c.floats("x", src.X, src.N)
	if src.Grad != 0 {
		c.elements("grad", src.Grad, src.DType, src.N)
		c.floats("from", augend(src), src.N)
		c.optional("factor", src.Factor)
		if src.Keep != 0 {
			c.floats("keep", src.Keep, src.N)
		}
	}
}

// list checks a list up to its capacity.
func (c *checks) list(name string, l kernel.Entries) {
	c.floats(name, l.Val, l.N)
	c.indices(name, l)
}

// indices checks a list whose values are not read.
func (c *checks) indices(name string, l kernel.Entries) {
	c.floats(name, l.Idx, l.N)
	c.optional(name, l.Len)
}

func (c *checks) target(dst kernel.Entries) {
	c.list("dst", dst)
}

// lists checks the lists of a merge.
func (c *checks) lists(lists []kernel.Entries) {
	for _, l := range lists {
		c.list("list", l)
	}
	if len(lists) > maxLists && c.err == nil {
		c.err = fmt.Errorf("cuda:%d: %s of %d lists, at most %d: %w",
			c.s.rt.index, c.op, len(lists), maxLists, runtime.ErrUnsupported)
	}
}

// room checks that dst has room for the smaller of a and b.
func (c *checks) room(dst kernel.Entries, a, b int) {
	if need := min(a, b); dst.N < need {
		c.fail("dst has room for %d entries, want %d", dst.N, need)
	}
}

func (c *checks) restoration(r kernel.Restoration) {
	c.array(r.Dst)
	c.list("l", r.L)
	c.indices("taken", r.Taken)
}

func (c *checks) array(a kernel.Array) {
	c.floats("dst", a.Ptr, a.N)
	c.optional("faults", a.Faults)
}
