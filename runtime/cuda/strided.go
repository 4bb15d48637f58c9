package cuda

import (
	"fmt"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/strided"
	"github.com/tutti-go/tutti/runtime"
)

// maxDims is the number of dimensions that the strided copy kernel takes.
const maxDims = 8

// stridedLayout is `struct layout` of kernels/memory.cu.
type stridedLayout struct {
	shape [maxDims]uint64
	dst   [maxDims]int64
	src   [maxDims]int64
	count uint64
	dims  uint32
}

// set describes the copy of count elements along axes, at most maxDims.
func (l *stridedLayout) set(axes []strided.Axis, count int) {
	l.count, l.dims = uint64(count), uint32(len(axes))
	for i, x := range axes {
		l.shape[i], l.dst[i], l.src[i] = uint64(x.Size), int64(x.Dst), int64(x.Src)
	}
}

// copyStridedKernel returns the kernel that copies elements of that many bytes.
func copyStridedKernel(elemSize int) (k kernel, ok bool) {
	switch elemSize {
	case 1:
		return copyStrided1, true
	case 2:
		return copyStrided2, true
	case 4:
		return copyStrided4, true
	case 8:
		return copyStrided8, true
	}
	return 0, false
}

// CopyStrided implements [runtime.Runtime]. Elements of 1, 2, 4 and 8 bytes are
// supported, at addresses that are multiples of their size, and layouts of
// which at most 8 dimensions are left when those that are one in both are
// joined.
func (r *Runtime) CopyStrided(dst uintptr, dstStrides []int, src uintptr, srcStrides []int, shape []int, elemSize int) error {
	if err := r.usable(); err != nil {
		return err
	}
	var buffer [maxDims]strided.Axis
	axes, count, err := strided.Axes(buffer[:0], dstStrides, srcStrides, shape, elemSize)
	if err != nil {
		return fmt.Errorf("cuda:%d: copy strided: %w", r.index, err)
	}
	if err := r.check("copy strided", count, dst, src); err != nil || count == 0 {
		return err
	}
	k, ok := copyStridedKernel(elemSize)
	axes = strided.Join(axes)
	switch {
	case !ok:
		return fmt.Errorf("cuda:%d: copy strided: elements of %d bytes, not 1, 2, 4 or 8: %w", r.index, elemSize, runtime.ErrUnsupported)
	case len(axes) > maxDims:
		return fmt.Errorf("cuda:%d: copy strided: %d dimensions that cannot be joined, at most %d: %w", r.index, len(axes), maxDims, runtime.ErrUnsupported)
	case len(axes) == 0 || len(axes) == 1 && axes[0].Dst == 1 && axes[0].Src == 1:
		return r.Copy(dst, src, count*elemSize)
	case (dst|src)%uintptr(elemSize) != 0:
		return r.argument("copy strided: %#x or %#x is no multiple of the element size %d", dst, src, elemSize)
	}
	return r.launchStrided(k, dst, src, axes, count)
}

// launchStrided runs a strided copy kernel, whose third parameter is not a
// number but the layout.
func (r *Runtime) launchStrided(k kernel, dst, src uintptr, axes []strided.Axis, count int) error {
	a := argumentPool.Get().(*arguments)
	defer argumentPool.Put(a)
	a.values[0], a.values[1] = uint64(dst), uint64(src)
	a.layout.set(axes, count)
	third := a.params[2]
	a.params[2] = hostmem.AddrOf(&a.layout)
	err := r.launchArguments(k, count, a)
	a.params[2] = third
	return err
}
