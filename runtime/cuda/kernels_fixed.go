package cuda

import (
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

var (
	raiseExponentsKernels = typed{kernelRaiseExponentsF32, kernelRaiseExponentsF16, kernelRaiseExponentsBF16}
	storeFixedKernels     = typed{kernelStoreFixedF32, kernelStoreFixedF16, kernelStoreFixedBF16}
	loadFixedKernels      = typed{kernelLoadFixedF32, kernelLoadFixedF16, kernelLoadFixedBF16}
)

// squareBytes is the size of a block's partial sum.
const squareBytes = 16

// fixed checks an array of sums.
func (c *checks) fixed(f kernel.Fixed) {
	c.length("N", f.N)
	if f.Skip < 0 || f.Skip >= kernel.FixedBlock {
		c.fail("Skip is %d, want 0 to %d", f.Skip, kernel.FixedBlock-1)
	}
	if f.Bits < 1 || f.Bits > 30 {
		c.fail("Bits is %d, want 1 to 30", f.Bits)
	}
	if c.err != nil {
		return
	}
	c.floats("sums", f.Sums, f.N)
	c.buffer("exponents", f.Exponents, min(f.N, f.Blocks()), 1)
}

// launchFixed launches a kernel for the elements at x, if there are any.
func (c *checks) launchFixed(kernels typed, f kernel.Fixed, x uintptr, dt dtype.DType, p fixedParameters) error {
	return c.submit(func() error {
		if f.N == 0 {
			return nil
		}
		p.sums = f.Sums
		p.exponents = f.Exponents
		p.n = f.N
		p.skip = f.Skip
		p.bits = f.Bits
		p.x = x
		return launch(c.s.rt, kernels.variant(dt), fixedGrid(f), blocksPerSM, &p)
	})
}

// fixedTile is the number of elements that a warp processes at a time.
const fixedTile = 512

// fixedGrid returns the number of thread blocks that f has work for.
func fixedGrid(f kernel.Fixed) int {
	tiles := (f.Skip + f.N + fixedTile - 1) / fixedTile
	return blocksOf(32 * tiles)
}

// RaiseExponents implements [kernel.Kernels].
func (s *sparse) RaiseExponents(f kernel.Fixed, x uintptr, dt dtype.DType) error {
	c := s.checks("RaiseExponents")
	c.fixed(f)
	c.elements("x", x, dt, f.N)
	return c.launchFixed(raiseExponentsKernels, f, x, dt, fixedParameters{})
}

// StoreFixed implements [kernel.Kernels].
func (s *sparse) StoreFixed(f kernel.Fixed, x uintptr, dt dtype.DType, add bool) error {
	c := s.checks("StoreFixed")
	c.fixed(f)
	c.elements("x", x, dt, f.N)
	return c.launchFixed(storeFixedKernels, f, x, dt, fixedParameters{add: flag(add)})
}

// LoadFixed implements [kernel.Kernels].
func (s *sparse) LoadFixed(dst uintptr, dt dtype.DType, f kernel.Fixed, divisor int, factor uintptr) error {
	c := s.checks("LoadFixed")
	c.fixed(f)
	c.elements("dst", dst, dt, f.N)
	c.optional("factor", factor)
	c.divisor(divisor)
	return c.launchFixed(loadFixedKernels, f, dst, dt, fixedParameters{divisor: divisor, factor: factor})
}

// divisor checks the divisor of sums.
func (c *checks) divisor(n int) {
	if n < 1 {
		c.fail("divisor is %d, want at least 1", n)
	}
}

// SquareFixed implements [kernel.Kernels].
func (s *sparse) SquareFixed(f kernel.Fixed, divisor int, sum uintptr) error {
	c := s.checks("SquareFixed")
	c.fixed(f)
	c.divisor(divisor)
	c.number("sum", sum, 8)
	return c.submit(func() error {
		grid := fixedGrid(f)
		if err := s.grow(partial, squareBytes*(1+s.rt.grid(grid, blocksPerSM))); err != nil {
			return err
		}
		p := squareParameters{
			control:   s.address(control),
			parts:     s.address(partial),
			sums:      f.Sums,
			exponents: f.Exponents,
			n:         f.N,
			skip:      f.Skip,
			bits:      f.Bits,
			divisor:   divisor,
			sum:       sum,
		}
		if err := launch(s.rt, kernelTopHeight, grid, blocksPerSM, &p); err != nil {
			return err
		}
		return launch(s.rt, kernelSquareFixed, grid, blocksPerSM, &p)
	})
}
