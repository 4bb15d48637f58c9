package cpu

import (
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/fixedpoint"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// fixed is a [kernel.Fixed] whose arrays can be read.
type fixed struct {
	sums      []int32 // of integers
	exponents []byte  // of blocks
	skip      int     // elements of the first block that come before
	precision int     // bits of a contribution
}

// fixed checks an array of sums.
func (c *checks) fixed(f kernel.Fixed) fixed {
	if f.Skip < 0 || f.Skip >= kernel.FixedBlock {
		c.fail("Skip is %d, want 0 to %d", f.Skip, kernel.FixedBlock-1)
	}
	if f.Bits < 1 || f.Bits > 30 {
		c.fail("Bits is %d, want 1 to 30", f.Bits)
	}
	c.length("N", f.N)
	blocks := 0
	if c.err == nil && f.N > 0 {
		blocks = f.Blocks()
	}
	return fixed{
		sums:      slice[int32](c, "sums", f.Sums, f.N),
		exponents: slice[byte](c, "exponents", f.Exponents, blocks),
		skip:      f.Skip,
		precision: f.Bits,
	}
}

// part is f from an element that begins a chunk on.
func (f fixed) part(from, to int) fixed {
	first := (f.skip + from) / kernel.FixedBlock
	return fixed{
		sums:      f.sums[from:to],
		exponents: f.exponents[first:],
		skip:      (f.skip + from) % kernel.FixedBlock,
		precision: f.precision,
	}
}

// inParts calls f for parts of n elements that are float32 already, or will be in chunks.
func inParts(dt dtype.DType, n int, f func(from, to int)) {
	size := n
	if dt != dtype.F32 {
		size = chunk
	}
	for from := 0; from < n; from += size {
		f(from, min(from+size, n))
	}
}

func (k kernels) RaiseExponents(f kernel.Fixed, x uintptr, dt dtype.DType) error {
	c := k.checks("RaiseExponents")
	to := c.fixed(f)
	c.elements("x", x, dt, f.N)
	return c.with(func(s *scratch) {
		inParts(dt, f.N, func(from, end int) {
			p := to.part(from, end)
			values := s.widen(x+uintptr(from*dt.Size()), dt, end-from)
			fixedpoint.RaiseExponents(p.exponents, values, p.skip)
		})
	})
}

func (k kernels) StoreFixed(f kernel.Fixed, x uintptr, dt dtype.DType, sum bool) error {
	c := k.checks("StoreFixed")
	to := c.fixed(f)
	c.elements("x", x, dt, f.N)
	return c.with(func(s *scratch) {
		inParts(dt, f.N, func(from, end int) {
			p := to.part(from, end)
			values := s.widen(x+uintptr(from*dt.Size()), dt, end-from)
			fixedpoint.Store(p.sums, p.exponents, values, p.skip, p.precision, sum)
		})
	})
}

func (k kernels) LoadFixed(dst uintptr, dt dtype.DType, f kernel.Fixed, divisor int, factor uintptr) error {
	c := k.checks("LoadFixed")
	from := c.fixed(f)
	c.elements("dst", dst, dt, f.N)
	by := optional[float32](&c, factor)
	if divisor < 1 {
		c.fail("divisor is %d, want at least 1", divisor)
	}
	return c.with(func(s *scratch) {
		multiple := 1 / float64(divisor)
		if by != nil {
			multiple *= float64(*by)
		}
		inParts(dt, f.N, func(begin, end int) {
			values := s.chunk[:min(end-begin, chunk)]
			if dt == dtype.F32 {
				values = floats(dst, f.N)
			}
			p := from.part(begin, end)
			fixedpoint.Load(values, p.sums, p.exponents, p.skip, p.precision, multiple, fixedpoint.Largest(dt))
			if dt != dtype.F32 {
				s.store(dst+uintptr(begin*dt.Size()), dt, values, 1, nil)
			}
		})
	})
}

func (k kernels) SquareFixed(f kernel.Fixed, divisor int, sum uintptr) error {
	c := k.checks("SquareFixed")
	from := c.fixed(f)
	out := number[float64](&c, "sum", sum)
	if divisor < 1 {
		c.fail("divisor is %d, want at least 1", divisor)
	}
	return c.with(func(*scratch) {
		*out = fixedpoint.Square(from.sums, from.exponents, from.skip, from.precision, divisor)
	})
}
