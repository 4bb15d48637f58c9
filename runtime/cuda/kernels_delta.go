package cuda

import (
	"math/bits"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// Diff implements [runtime.Kernels].
func (s *sparse) Diff(old, new uintptr, dt dtype.DType, n int, dst runtime.Changes) error {
	c := s.checks("Diff")
	size := c.changes(dt, n, dst, new)
	c.number("dst.Len", dst.Len, 4)
	if old != 0 && c.err == nil {
		c.buffer("old", old, n, uintptr(size))
	}
	return c.submit(func() error {
		if err := s.growStatus(n * size / 2); err != nil { // a tile has at least eight KiB
			return err
		}
		return s.rt.launchBlocks(kernelDiff1+kernel(bits.TrailingZeros(uint(size))), n*size/(2*tileElements)+1, diffsPerSM,
			s.at(control), s.at(status), uint64(old), uint64(new), uint64(n), signFlips(dt),
			uint64(dst.Idx), uint64(dst.Diff), uint64(dst.N), uint64(dst.Len), uint64(dst.Sums))
	})
}

// Patch implements [runtime.Kernels].
func (s *sparse) Patch(x uintptr, dt dtype.DType, n int, l runtime.Changes, back bool) error {
	c := s.checks("Patch")
	size := c.changes(dt, n, l, x)
	c.optional("l.Len", l.Len)
	return c.submit(func() error {
		return s.rt.launch(kernelPatch1+kernel(bits.TrailingZeros(uint(size))), l.N,
			uint64(x), uint64(n), signFlips(dt), uint64(l.Idx), uint64(l.Diff), uint64(l.N), uint64(l.Len), uint64(l.Sums), flag(back))
	})
}

// diffsPerSM is how many blocks of diff a multiprocessor gets.
const diffsPerSM = 4

// changes checks a list of changes and the array, and returns the size of its elements.
func (c *checks) changes(dt dtype.DType, n int, l runtime.Changes, array uintptr) (size int) {
	if size = dt.Size(); !dt.Valid() {
		c.fail("the elements have no type")
		return 1
	}
	c.buffer("the array", array, n, uintptr(size))
	c.floats("the list's positions", l.Idx, l.N)
	c.buffer("the list's differences", l.Diff, l.N, uintptr(size))
	c.optional("sums", l.Sums)
	return size
}

// signFlips are the bits of an element that its sign inverts, see [runtime.Changes].
func signFlips(dt dtype.DType) uint64 {
	if dt.IsFloat() {
		return 1<<(8*dt.Size()-1) - 1
	}
	return 0
}
