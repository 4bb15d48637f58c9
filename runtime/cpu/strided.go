package cpu

import (
	"unsafe"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/internal/strided"
)

// maxAxes is how many dimensions are collected without an allocation.
const maxAxes = 9

// bringNearest moves the axis that reading is nearest along beside the last
// one, so that copyPlane can go along both, unless the last one is that axis.
func bringNearest(all []strided.Axis) {
	last := len(all) - 1
	if last < 2 || strided.Distance(all[last].Src) <= 1 {
		return
	}
	nearest := last
	for i, x := range all {
		if strided.Distance(x.Src) < strided.Distance(all[nearest].Src) {
			nearest = i
		}
	}
	if nearest < last-1 {
		x := all[nearest]
		copy(all[nearest:], all[nearest+1:last])
		all[last-1] = x
	}
}

// span is the range of offsets that a copy touches on one side.
type span struct {
	lowest  int // offset, at most 0
	highest int // offset, at least 0
}

func (r *span) extend(stride, size int) {
	end := stride * (size - 1)
	r.lowest += min(end, 0)
	r.highest += max(end, 0)
}

// copyStrided copies along axes that were checked.
func copyStrided(dst, src uintptr, all []strided.Axis, elemSize int) {
	switch elemSize {
	case 1:
		copyAxes[uint8](all, dst, src)
	case 2:
		copyAxes[uint16](all, dst, src)
	case 4:
		copyAxes[uint32](all, dst, src)
	case 8:
		copyAxes[uint64](all, dst, src)
	default:
		// The bytes of an element are an axis like any other.
		for i := range all {
			all[i].Dst *= elemSize
			all[i].Src *= elemSize
		}
		copyAxes[uint8](append(all, strided.Axis{
			Size: elemSize,
			Dst:  1,
			Src:  1,
		}), dst, src)
	}
}

type word interface {
	uint8 | uint16 | uint32 | uint64
}

// copyAxes looks at both arrays as slices that cover all they touch, and at
// elements by their offsets in these.
func copyAxes[T word](all []strided.Axis, dst, src uintptr) {
	all = strided.Join(all)
	bringNearest(all)
	var out, in span
	for _, x := range all {
		out.extend(x.Dst, x.Size)
		in.extend(x.Src, x.Size)
	}
	var element T
	size := int(unsafe.Sizeof(element))
	d := hostmem.Slice[T](dst+uintptr(out.lowest*size), out.highest-out.lowest+1)
	s := hostmem.Slice[T](src+uintptr(in.lowest*size), in.highest-in.lowest+1)
	copyLoop(d, -out.lowest, s, -in.lowest, all)
}

// copyLoop loops over all axes but the last two; i and j are the offsets of
// the first element.
func copyLoop[T word](d []T, i int, s []T, j int, all []strided.Axis) {
	switch len(all) {
	case 0:
		d[i] = s[j]
	case 1:
		copyRow(d, i, s, j, all[0])
	case 2:
		copyPlane(d, i, s, j, all[0], all[1])
	default:
		for range all[0].Size {
			copyLoop(d, i, s, j, all[1:])
			i += all[0].Dst
			j += all[0].Src
		}
	}
}

// tile is the edge, in elements, of the squares that a plane is copied in when
// one side runs along rows and the other along columns: every cache line read
// is used up while it is still in the cache.
const tile = 16

// copyPlane copies two axes.
func copyPlane[T word](d []T, i int, s []T, j int, outer, inner strided.Axis) {
	if strided.Distance(inner.Src) <= strided.Distance(outer.Src) {
		for range outer.Size {
			copyRow(d, i, s, j, inner)
			i += outer.Dst
			j += outer.Src
		}
		return
	}
	for o := 0; o < outer.Size; o += tile {
		rows := min(tile, outer.Size-o)
		for n := 0; n < inner.Size; n += tile {
			part := strided.Axis{
				Size: min(tile, inner.Size-n),
				Dst:  inner.Dst,
				Src:  inner.Src,
			}
			di := i + o*outer.Dst + n*inner.Dst
			sj := j + o*outer.Src + n*inner.Src
			for range rows {
				copyRow(d, di, s, sj, part)
				di += outer.Dst
				sj += outer.Src
			}
		}
	}
}

func copyRow[T word](d []T, i int, s []T, j int, x strided.Axis) {
	if x.Dst == 1 && x.Src == 1 {
		copy(d[i:i+x.Size], s[j:j+x.Size])
		return
	}
	for range x.Size {
		d[i] = s[j]
		i += x.Dst
		j += x.Src
	}
}
