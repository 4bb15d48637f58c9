package cuda

import (
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/internal/strided"
)

// maxDims is the maximum number of dimensions of the strided copy kernel.
const maxDims = 8

// stridedLayout is `struct layout` of kernels/memory.cu.
type stridedLayout struct {
	shape [maxDims]uint64 // sizes, the slowest dimension first
	dst   [maxDims]int64  // strides in elements; those beyond dims are 0
	src   [maxDims]int64  // like dst
	count uint64          // elements
	dims  uint32          // dimensions of shape, at least 1
}

// set describes the copy along axes, at most maxDims.
func (l *stridedLayout) set(axes []strided.Axis) {
	l.count = 1
	l.dims = uint32(len(axes))
	for i, x := range axes {
		l.count *= uint64(x.Size)
		l.shape[i] = uint64(x.Size)
		l.dst[i] = int64(x.Dst)
		l.src[i] = int64(x.Src)
	}
}

// stridedKernels are the kernels for one element size: one for any layout, and one for layouts that asTransposes
// accepts.
type stridedKernels struct {
	general   kernelID // of any layout
	transpose kernelID // of layouts that asTransposes accepts
}

// stridedKernelsFor returns the kernels for elements of elemSize bytes.
func stridedKernelsFor(elemSize int) (k stridedKernels, ok bool) {
	switch elemSize {
	case 1:
		return stridedKernels{copyStrided1, transpose1}, true
	case 2:
		return stridedKernels{copyStrided2, transpose2}, true
	case 4:
		return stridedKernels{copyStrided4, transpose4}, true
	case 8:
		return stridedKernels{copyStrided8, transpose8}, true
	}
	return k, false
}

// tileSize is the number of rows and columns of a tile of the transposing kernels. With less than half as many rows or
// columns, tiles would be mostly empty.
const tileSize = 32

// asTransposes reports whether a copy is a batch of transposes: contiguous along one axis in the destination and along
// another in the source. It moves the source's axis to the place before the destination's, which is the last, and
// returns the number of tiles.
func asTransposes(axes []strided.Axis) (tiles int, ok bool) {
	last := len(axes) - 1
	columns := axes[last]
	if columns.Size < tileSize/2 || strided.Distance(columns.Dst) != 1 || strided.Distance(columns.Src) <= 1 {
		return 0, false
	}
	row := slices.IndexFunc(axes[:last], func(x strided.Axis) bool {
		return strided.Distance(x.Src) == 1 && x.Size >= tileSize/2
	})
	if row < 0 {
		return 0, false
	}
	rows := axes[row]
	copy(axes[row:], axes[row+1:last])
	axes[last-1] = rows
	tiles = 1
	for i, x := range axes {
		if i >= last-1 {
			x.Size = (x.Size + tileSize - 1) / tileSize
		}
		tiles *= x.Size
	}
	return tiles, true
}

// CopyStrided implements [runtime.Runtime]. It supports elements of 1, 2, 4 and 8 bytes at addresses aligned to their
// size. Layouts may have at most 8 dimensions after it has merged those that are contiguous in both.
func (r *Runtime) CopyStrided(dst uintptr, dstStrides []int, src uintptr, srcStrides []int, shape []int,
	elemSize int) error {
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
	k, ok := stridedKernelsFor(elemSize)
	axes = strided.Join(axes)
	switch {
	case !ok:
		return fmt.Errorf("cuda:%d: copy strided: elements of %d bytes, not 1, 2, 4 or 8: %w",
			r.index, elemSize, runtime.ErrUnsupported)
	case len(axes) > maxDims:
		return fmt.Errorf("cuda:%d: copy strided: %d dimensions that cannot be joined, at most %d: %w",
			r.index, len(axes), maxDims, runtime.ErrUnsupported)
	case len(axes) == 0 || len(axes) == 1 && axes[0].Dst == 1 && axes[0].Src == 1:
		return r.Copy(dst, src, count*elemSize)
	case (dst|src)%uintptr(elemSize) != 0:
		return r.argument("copy strided: %#x or %#x is no multiple of the element size %d", dst, src, elemSize)
	}
	if tiles, ok := asTransposes(axes); ok {
		return r.launchStrided(k.transpose, dst, src, axes, tiles*block) // one block for each tile
	}
	return r.launchStrided(k.general, dst, src, axes, count)
}

// launchStrided runs a strided copy kernel with this number of threads.
func (r *Runtime) launchStrided(k kernelID, dst, src uintptr, axes []strided.Axis, threads int) error {
	if threads == 0 {
		return nil
	}
	parameters := stridedParameters{dst: dst, src: src}
	parameters.layout.set(axes)
	return launch(r, k, blocksOf(threads), blocksPerSM, &parameters)
}
