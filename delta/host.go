package delta

import (
	"hash/crc32"
	"sync"
	"unsafe"

	"github.com/tutti-go/tutti/delta/internal/differ"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// signed is an element as a signed integer.
type signed interface{ int8 | int16 | int32 | int64 }

// ordered maps an element to an integer that sorts as its type does, and back. flip is the bits that a sign inverts.
func ordered[T signed](x, flip T) T {
	return x ^ x>>(8*unsafe.Sizeof(x)-1)&flip
}

// chunkWords is the number of words that are compared while they are in the cache.
const chunkWords = 4096

// zeroWords replace the old elements if there are none.
var zeroWords [chunkWords]uint64

// differing are the elements of a chunk that differ.
type differing [8*chunkWords + differ.Room]uint16

var differings = sync.Pool{New: func() any { return new(differing) }}

// diffHost lists the elements in which two blocks differ, up to the capacity of idx and diffs, and the differences.
// old is nil for zeros. It returns the number of elements that differ, and the checksum of now, computed from the
// checksum of old.
func diffHost[T signed](
	old, now []byte, d dtype.DType, idx []int32, diffs []T, sum uint32,
) (changed int, after uint32) {
	list := differings.Get().(*differing)
	defer differings.Put(list)
	flip := T(signFlips(d))
	after = sum
	summed := 0
	current := uint32(0)
	for from := 0; from < len(now); {
		words := min(chunkWords, (len(now)-from)/8)
		to := from + 8*words
		was := zeroWords[:words]
		is := view[uint64](now[from:to])
		switch {
		case words == 0: // less than a word remains
			var last [2]uint64
			to = len(now)
			if old != nil {
				copy(hostmem.Bytes(last[:1]), old[from:])
			}
			copy(hostmem.Bytes(last[1:]), now[from:])
			was = last[:1]
			is = last[1:]
		case old != nil:
			was = view[uint64](old[from:to])
		}
		changed += listDiffs(
			list,
			was,
			is,
			from/d.Size(),
			flip,
			idx[min(changed, len(idx)):],
			diffs[min(changed, len(idx)):],
		)
		if changed > 0 { // while the chunk is in the cache
			current = crc32.Update(current, castagnoli, now[summed:to])
			summed = to
			after = current
		}
		from = to
	}
	return changed, after
}

// listDiffs is diffHost for words whose first element has position first. It returns the number of elements that
// differ.
func listDiffs[T signed](
	list *differing,
	old, now []uint64,
	first int,
	flip T,
	idx []int32,
	diffs []T,
) int {
	was := view[T](hostmem.Bytes(old))
	is := view[T](hostmem.Bytes(now))
	found := list[:differ.List(list[:], old, now, int(unsafe.Sizeof(flip)))]
	for i, position := range found[:min(len(found), len(idx))] {
		idx[i] = int32(first + int(position))
		diffs[i] = ordered(is[position], flip) - ordered(was[position], flip)
	}
	return len(found)
}

// patchHost adds differences to the elements of a block, or subtracts them, and replaces each difference by the XOR of
// the old and new element. Positions outside the block are skipped.
func patchHost[T signed](x []T, d dtype.DType, idx []int32, diffs []T, subtract bool) {
	flip := T(signFlips(d))
	sign := T(0)
	if subtract {
		sign = -1
	}
	diffs = diffs[:len(idx)]
	for i, position := range idx {
		if uint(position) >= uint(len(x)) {
			diffs[i] = 0
			continue
		}
		old := x[position]
		now := ordered(ordered(old, flip)+(diffs[i]^sign)-sign, flip)
		x[position] = now
		diffs[i] = old ^ now
	}
}
