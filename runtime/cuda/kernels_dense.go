package cuda

import (
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// typed are a kernel's variants, by the type of its elements.
type typed struct {
	f32  kernelID // of float32
	f16  kernelID // of binary16
	bf16 kernelID // of bfloat16
}

func (t typed) variant(dt dtype.DType) kernelID {
	switch dt {
	case dtype.F16:
		return t.f16
	case dtype.BF16:
		return t.bf16
	}
	return t.f32
}

var (
	scaleKernels      = typed{kernelScaleF32, kernelScaleF16, kernelScaleBF16}
	storeKernels      = typed{kernelStoreF32, kernelStoreF16, kernelStoreBF16}
	sumSquaresKernels = typed{kernelSumSquaresF32, kernelSumSquaresF16, kernelSumSquaresBF16}
	mergeKernels      = typed{kernelMergeF32, kernelMergeF16, kernelMergeBF16}
)

// gradientKind numbers the types of a gradient as kernels/elements.cuh does.
func gradientKind(src kernel.Source) uint64 {
	switch {
	case src.Grad == 0:
		return 0
	case src.DType == dtype.F16:
		return 2
	case src.DType == dtype.BF16:
		return 3
	}
	return 1
}

// augend returns the address of the array to which the gradient is added.
func augend(src kernel.Source) uintptr {
	if src.From == 0 {
		return src.X
	}
	return src.From
}

// Store implements [kernel.Kernels].
func (s *sparse) Store(dst uintptr, dt dtype.DType, src uintptr, n int, scale float32, excess uintptr) error {
	c := s.checks("Store")
	c.elements("dst", dst, dt, n)
	c.floats("src", src, n)
	c.optional("excess", excess)
	return c.submit(func() error {
		if n == 0 {
			return nil
		}
		return launch(s.rt, storeKernels.variant(dt), tiles(n), blocksPerSM, &storeParameters{
			dst:    dst,
			src:    src,
			n:      n,
			factor: scale,
			excess: excess,
		})
	})
}

// CopyIf implements [kernel.Kernels].
func (s *sparse) CopyIf(copies []kernel.Copy, flags uintptr, m int) error {
	c := s.checks("CopyIf")
	longest := 0
	for _, x := range copies {
		c.elements("dst", x.Dst, x.DType, x.N)
		if x.Src != 0 {
			c.elements("src", x.Src, x.DType, x.N)
		}
		longest = max(longest, x.N)
	}
	c.buffer("flags", flags, max(m, 1), 4)
	if m < 1 {
		c.fail("%d flags, want at least one", m)
	}
	if len(copies) > kernel.MaxCopies {
		c.fail("%d copies, want at most %d", len(copies), kernel.MaxCopies)
	}
	return c.submit(func() error {
		if longest == 0 {
			return nil
		}
		parameters := copyIfParameters{
			flags: flags,
			m:     m,
			count: len(copies),
		}
		for i, x := range copies {
			parameters.copies[i] = copyParameters{
				dst:  x.Dst,
				src:  x.Src,
				n:    x.N,
				size: x.DType.Size(),
			}
		}
		return launch(s.rt, kernelCopyIf, tiles(longest), blocksPerSM, &parameters)
	})
}

// Scale implements [kernel.Kernels].
func (s *sparse) Scale(x uintptr, dt dtype.DType, n int, factor uintptr) error {
	c := s.checks("Scale")
	c.elements("x", x, dt, n)
	c.number("factor", factor, 4)
	return c.submit(func() error {
		if n == 0 {
			return nil
		}
		parameters := scaleParameters{
			x:      x,
			n:      n,
			factor: factor,
		}
		return launch(s.rt, scaleKernels.variant(dt), tiles(n), blocksPerSM, &parameters)
	})
}

// segments returns the number of segments of n elements; the sums of segments are added up at the end.
func segments(n int) int { return n/segmentElements + 1 }

// growPartial makes room for the sums of the segments of n elements.
func (s *sparse) growPartial(n int) error {
	return s.grow(partial, momentsBytes*segments(n))
}

// SumSquares implements [kernel.Kernels].
func (s *sparse) SumSquares(x uintptr, dt dtype.DType, n int, sum uintptr) error {
	c := s.checks("SumSquares")
	c.elements("x", x, dt, n)
	c.number("sum", sum, 8)
	return c.submit(func() error {
		if err := s.growPartial(n); err != nil {
			return err
		}
		return launch(s.rt, sumSquaresKernels.variant(dt), segments(n), streamsPerSM, &sumSquaresParameters{
			control: s.address(control),
			parts:   s.address(partial),
			x:       x,
			n:       n,
			sum:     sum,
		})
	})
}

// ClipFactor implements [kernel.Kernels].
func (s *sparse) ClipFactor(factor, squares uintptr, m int, share, limit float64) error {
	c := s.checks("ClipFactor")
	c.number("factor", factor, 4)
	c.buffer("squares", squares, max(m, 1), 8)
	if m < 1 {
		c.fail("%d sums of squares, want at least one", m)
	}
	return c.submit(func() error {
		return launch(s.rt, kernelClipFactor, 1, 1, &clipFactorParameters{
			factor:  factor,
			squares: squares,
			m:       m,
			share:   share,
			limit:   limit,
		})
	})
}

// Fit implements [kernel.Kernels].
func (s *sparse) Fit(src kernel.Source, z float64, threshold uintptr) error {
	c := s.checks("Fit")
	c.source(src)
	c.number("threshold", threshold, 4)
	return c.submit(func() error {
		if err := s.growPartial(src.N); err != nil {
			return err
		}
		return launch(s.rt, kernelFit, segments(src.N), streamsPerSM, &fitParameters{
			control:            s.address(control),
			parts:              s.address(partial),
			x:                  src.X,
			n:                  src.N,
			gradientParameters: gradientOf(src),
			z:                  z,
			threshold:          threshold,
			keep:               src.Keep,
		})
	})
}

// Refine implements [kernel.Kernels].
func (s *sparse) Refine(x uintptr, n int, threshold uintptr, k int, factors []float32) error {
	c := s.checks("Refine")
	c.floats("x", x, n)
	c.number("threshold", threshold, 4)
	c.length("k", k)
	c.limit("factors", len(factors), maxFactors)
	return c.submit(func() error {
		parameters := refineParameters{
			control:   s.address(control),
			x:         x,
			n:         n,
			threshold: threshold,
			k:         k,
			m:         len(factors),
		}
		copy(parameters.factors[:], factors)
		return launch(s.rt, kernelRefine, tiles(n), streamsPerSM, &parameters)
	})
}
