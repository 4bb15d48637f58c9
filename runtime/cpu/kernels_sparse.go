package cpu

import (
	"math"
	"slices"
)

// entries are sparse elements: strictly ascending indices and their values.
type entries struct {
	idx []int32
	val []float32
}

// outside returns the position of an index in list that is not in [0, n), if
// there is one. A negative index, read as unsigned, is larger than any n.
func outside(list []int32, n int) (position int, found bool) {
	var top uint32
	for _, i := range list {
		top = max(top, uint32(i))
	}
	if len(list) == 0 || int64(top) < int64(n) {
		return 0, false
	}
	return slices.Index(list, int32(top)), true
}

func scatterAdd(dst []float32, idx []int32, val []float32) {
	val = val[:len(idx)]
	for j, i := range idx {
		dst[i] += val[j]
	}
}

func scatterSet(dst []float32, idx []int32, val []float32) {
	val = val[:len(idx)]
	for j, i := range idx {
		dst[i] = val[j]
	}
}

func gather(val, src []float32, idx []int32) {
	val = val[:len(idx)]
	for j, i := range idx {
		val[j] = src[i]
	}
}

func zeroAt(dst []float32, idx []int32) {
	for _, i := range idx {
		dst[i] = 0
	}
}

func offsetIndices(idx []int32, offset int32) {
	for j := range idx {
		idx[j] += offset
	}
}

// mergeAdd merges a and b into out and returns the length of the result.
// Which list comes next is as good as random, so nothing in the loop branches
// on it: the smaller index and its value are chosen by conditional moves, and
// each list moves on by a comparison's outcome.
func mergeAdd(a, b, out entries) int {
	// Equal lengths, said in the compiler's terms: one bounds check for two.
	idxA, valA := a.idx, a.val[:len(a.idx)]
	idxB, valB := b.idx, b.val[:len(b.idx)]
	idxOut, valOut := out.idx, out.val[:len(out.idx)]
	var i, j, m int
	for i < len(idxA) && j < len(idxB) {
		ia, ib := idxA[i], idxB[j]
		va, vb := valA[i], valB[j]
		// As bits: conditional moves exist for integers only.
		first, second, sum := math.Float32bits(va), math.Float32bits(vb), math.Float32bits(va+vb)
		value := first
		if ib < ia {
			value = second
		}
		if ia == ib {
			value = sum
		}
		idxOut[m], valOut[m] = min(ia, ib), math.Float32frombits(value)
		m++
		i += oneIf(ia <= ib)
		j += oneIf(ib <= ia)
	}
	for _, rest := range [2]entries{{idxA[i:], valA[i:]}, {idxB[j:], valB[j:]}} {
		copy(valOut[m:], rest.val)
		m += copy(idxOut[m:], rest.idx)
	}
	return m
}

// oneIf returns 1 if the condition holds and 0 if not, without branching.
func oneIf(condition bool) int {
	var n int
	if condition {
		n = 1
	}
	return n
}

func lowerBounds(idx, bounds []int32, positions []int) {
	for j, bound := range bounds {
		positions[j], _ = slices.BinarySearch(idx, bound)
	}
}
