package cpu

import (
	"hash/crc32"
	"sort"
	"unsafe"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu/internal/f32"
)

// places are elements as the integers that [runtime.Changes] describes.
type places interface{ int8 | int16 | int32 | int64 }

func (k kernels) Diff(old, new uintptr, dt dtype.DType, n int, dst runtime.Changes) error {
	c := k.checks("Diff")
	idx, sums := c.changes(dt, n, dst, new)
	length := number[int32](&c, "dst.Len", dst.Len)
	if c.err != nil {
		return c.err
	}
	s := scratches.get()
	switch dt.Size() {
	case 1:
		*length = diff[int8](s, old, new, dt, n, idx, dst.Diff, sums)
	case 2:
		*length = diff[int16](s, old, new, dt, n, idx, dst.Diff, sums)
	case 4:
		*length = diff[int32](s, old, new, dt, n, idx, dst.Diff, sums)
	default:
		*length = diff[int64](s, old, new, dt, n, idx, dst.Diff, sums)
	}
	scratches.put(s)
	return nil
}

func (k kernels) Patch(x uintptr, dt dtype.DType, n int, l runtime.Changes, back bool) error {
	c := k.checks("Patch")
	idx, sums := c.changes(dt, n, l, x)
	if length := optional[int32](&c, l.Len); c.err == nil && length != nil {
		idx = idx[:min(max(int(*length), 0), len(idx))]
	}
	if c.err != nil {
		return c.err
	}
	switch dt.Size() {
	case 1:
		patch[int8](x, dt, n, idx, l.Diff, sums, back)
	case 2:
		patch[int16](x, dt, n, idx, l.Diff, sums, back)
	case 4:
		patch[int32](x, dt, n, idx, l.Diff, sums, back)
	default:
		patch[int64](x, dt, n, idx, l.Diff, sums, back)
	}
	return nil
}

// changes checks a list of changes and the array, and returns positions and checksums.
func (c *checks) changes(dt dtype.DType, n int, l runtime.Changes, array uintptr) (idx []int32, sums []uint32) {
	if !dt.Valid() {
		c.fail("the elements have no type")
	}
	c.buffer("the array", array, n)
	c.buffer("the list's differences", l.Diff, l.N)
	if idx = c.ints("the list's positions", l.Idx, l.N); l.Sums != 0 {
		sums = slice[uint32](c, "sums", l.Sums, (n+runtime.DeltaBlock-1)/runtime.DeltaBlock)
	}
	return idx, sums
}

// flips returns the bits of an element that its sign inverts.
func flips[T places](dt dtype.DType) T {
	if dt.IsFloat() {
		return T(uint64(1)<<(8*dt.Size()-1) - 1)
	}
	return 0
}

// place maps an element to an integer in the order of its type, and back.
func place[T places](x, flip T) T { return x ^ x>>(8*unsafe.Sizeof(x)-1)&flip }

// zeroWords is what an array is compared with where there is none.
var zeroWords [chunk]uint64

// diff lists what differs and returns how much. Checksums are taken where something does.
func diff[T places](s *scratch, old, new uintptr, dt dtype.DType, n int, idx []int32, dst uintptr, sums []uint32) int32 {
	m, size, diffs := 0, dt.Size(), hostmem.Slice[T](dst, len(idx))
	for from := 0; from < n; from += runtime.DeltaBlock {
		before, sum, summed := m, uint32(0), 0
		bytes := hostmem.Slice[byte](new+uintptr(from*size), min(runtime.DeltaBlock, n-from)*size)
		for at := 0; at < len(bytes); {
			y, words := zeroWords[:], min(chunk, (len(bytes)-at)/8)
			if words > 0 {
				if old != 0 {
					y = hostmem.Slice[uint64](old+uintptr(from*size+at), words)
				}
				m = diffWords(s, y[:words], hostmem.Slice[uint64](hostmem.Addr(bytes[at:]), words), from+at/size, flips[T](dt), idx, diffs, m)
				at += 8 * words
			} else { // a part of a word
				var a, b [1]uint64
				if copy(hostmem.Bytes(b[:]), bytes[at:]); old != 0 {
					copy(hostmem.Bytes(a[:]), hostmem.Slice[byte](old+uintptr(from*size+at), len(bytes)-at))
				}
				m = diffWords(s, a[:], b[:], from+at/size, flips[T](dt), idx, diffs, m)
				at = len(bytes)
			}
			if m > before && sums != nil { // while it is in the cache
				sum, summed = crc32.Update(sum, castagnoli, bytes[summed:at]), at
				sums[from/runtime.DeltaBlock] = sum
			}
		}
	}
	return int32(m)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// diffWords is diff of at most a chunk of words, of which the first element is first; m differences are known already.
func diffWords[T places](s *scratch, old, new []uint64, first int, flip T, idx []int32, diffs []T, m int) int {
	size := int(unsafe.Sizeof(flip))
	was, is := hostmem.Slice[T](hostmem.Addr(old), 8*len(old)/size), hostmem.Slice[T](hostmem.Addr(new), 8*len(old)/size)
	found := s.differ[:f32.Differ(s.differ[:], old, new, size)]
	for i, at := range found[:max(min(len(found), len(idx)-m), 0)] {
		idx[m+i] = int32(first + int(at))
		diffs[m+i] = place(is[at], flip) - place(was[at], flip)
	}
	return m + len(found)
}

// patch changes elements, and takes the checksums of the blocks that they are in.
func patch[T places](at uintptr, dt dtype.DType, n int, idx []int32, by uintptr, sums []uint32, back bool) {
	x, diffs, flip, sign := hostmem.Slice[T](at, n), hostmem.Slice[T](by, len(idx)), flips[T](dt), T(0)
	if back {
		sign = -1
	}
	for done := 0; done < len(idx); {
		block := uint32(idx[done]) / runtime.DeltaBlock
		from := min(int(block)*runtime.DeltaBlock, n)
		part := x[from:min(from+runtime.DeltaBlock, n)]
		list := idx[done:]
		list = list[:sort.Search(len(list), func(i int) bool { return uint32(list[i])/runtime.DeltaBlock > block })]
		by := diffs[done:][:len(list)]
		for i, at := range list {
			if local := uint(uint32(at)) - uint(from); local < uint(len(part)) {
				part[local] = place(place(part[local], flip)+(by[i]^sign)-sign, flip)
			}
		}
		if done += len(list); len(part) > 0 && sums != nil {
			sums[block] = crc32.Checksum(hostmem.Bytes(part), castagnoli)
		}
	}
}
