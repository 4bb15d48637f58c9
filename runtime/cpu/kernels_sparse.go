package cpu

import (
	"math"
	"math/bits"
	"slices"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
	"github.com/tutti-go/tutti/internal/simd"
	"github.com/tutti-go/tutti/runtime/cpu/internal/f32"
)

// entries are sparse elements: indices, strictly ascending if their sender
// does what he should, and their values.
type entries struct {
	idx []int32   // indices
	val []float32 // values, as many
}

// cut returns at most the first n entries.
func (e entries) cut(n int) entries {
	n = min(n, len(e.idx))
	return entries{e.idx[:n], e.val[:n]}
}

// from returns all but the first n entries.
func (e entries) from(n int) entries {
	n = min(n, len(e.idx))
	return entries{e.idx[n:], e.val[n:]}
}

// The functions that follow indices into an array skip those that are not in
// it, and return how many these are. A negative index, read as unsigned, is
// larger than any length.

func scatterAdd(dst []float32, l entries, scale float32) (outside int32) {
	val := l.val[:len(l.idx)]
	for j, i := range l.idx {
		if uint(uint32(i)) >= uint(len(dst)) {
			outside++
			continue
		}
		dst[uint32(i)] += float32(val[j] * scale)
	}
	return outside
}

func scatterSet(dst []float32, l entries) (outside int32) {
	val := l.val[:len(l.idx)]
	for j, i := range l.idx {
		if uint(uint32(i)) >= uint(len(dst)) {
			outside++
			continue
		}
		dst[uint32(i)] = val[j]
	}
	return outside
}

func scatterZero(dst []float32, idx []int32) (outside int32) {
	for _, i := range idx {
		if uint(uint32(i)) >= uint(len(dst)) {
			outside++
			continue
		}
		dst[uint32(i)] = 0
	}
	return outside
}

// restore puts together what is restored, and adds it: of an element that is not, the
// cache line is not even read. It steps through two sorted lists. Which one goes on next
// is as good as random, so nothing branches on it.
func (s *scratch) restore(dst []float32, l entries, taken []int32) (outside int32) {
	idx := l.idx
	val := l.val[:len(l.idx)]
	s.compacted.resize(len(idx))
	restored := s.compacted
	n := 0
	for j, t := 0, 0; j < len(idx); {
		i := idx[j]
		if uint(uint32(i)) >= uint(len(dst)) {
			outside++
			j++
			continue
		}
		next := int32(math.MaxInt32)
		if t < len(taken) {
			next = taken[t]
		}
		restored.idx[n] = i
		restored.val[n] = val[j]
		n += oneIf(i < next)
		j += oneIf(i <= next)
		t += oneIf(next < i)
	}
	scatterAdd(dst, restored.cut(n), 1)
	return outside
}

// outside returns the entries of a list whose index is below low, or not below high and low.
func (s *scratch) outside(l entries, low, high int32) entries {
	start, _ := slices.BinarySearch(l.idx, low)
	end, _ := slices.BinarySearch(l.idx, high)
	end = max(start, end)
	if start == 0 {
		return l.from(end)
	}
	if end == len(l.idx) {
		return l.cut(start)
	}
	s.around.resize(len(l.idx) - (end - start))
	copy(s.around.idx[copy(s.around.idx, l.idx[:start]):], l.idx[end:])
	copy(s.around.val[copy(s.around.val, l.val[:start]):], l.val[end:])
	return s.around
}

// translate replaces positions in a list by the indices that are there.
func translate(positions, idx []int32) {
	for j, p := range positions {
		positions[j] = idx[p]
	}
}

// merge writes the sums of s.lists, tile by tile of the index space: while a tile is in the cache it is cleared, gets
// its part of every list, and is rounded to dt, or written past the caches: a reader of that much finds little of it
// there. excess is as in store.
func (s *scratch) merge(dst uintptr, dt dtype.DType, n int, scale float32, excess []float32) (outside int32) {
	memory := s.chunk[:]
	streaming := false
	if dt == dtype.F32 && n >= 2*streamFrom && simd.AVX2 {
		if s.tile == nil {
			s.tile = make([]float32, streamTile)
		}
		memory = s.tile
		streaming = true
	}
	for from := 0; from < n; from += len(memory) {
		size := min(len(memory), n-from)
		target := dst + uintptr(from*dt.Size())
		tile := memory[:size]
		if dt == dtype.F32 && !streaming {
			tile = floats(target, size)
		}
		clear(tile)
		for j := range s.lists {
			outside += s.lists[j].addTo(tile, from, scale)
		}
		if streaming {
			hostops.Copy(target, hostmem.Addr(tile), size*dt.Size(), true)
		} else if dt != dtype.F32 {
			s.store(target, dt, tile, 1, excess)
			if excess != nil {
				excess = excess[size:]
			}
		}
	}
	return outside + s.drain(n)
}

// addTo adds the entries that come first and belong to a tile of the index space, which starts at from, and removes
// them from the list. Indices below the tile, out of range or out of order are removed, too; it returns how many
// indices were negative.
func (e *entries) addTo(tile []float32, from int, scale float32) (negative int32) {
	idx := e.idx
	val := e.val[:len(e.idx)]
	j := 0
	for ; j < len(idx); j++ {
		i := int(idx[j]) - from
		if uint(i) >= uint(len(tile)) {
			if i >= 0 {
				break
			}
			negative += int32(uint32(idx[j]) >> 31)
			continue
		}
		tile[i] += float32(val[j] * scale)
	}
	e.idx = idx[j:]
	e.val = val[j:]
	return negative
}

// drain returns how many indices of what is left of s.lists are not in
// [0, n), and lets go of the lists.
func (s *scratch) drain(n int) (outside int32) {
	for j := range s.lists {
		for _, i := range s.lists[j].idx {
			if int64(uint32(i)) >= int64(n) {
				outside++
			}
		}
		s.lists[j] = entries{}
	}
	return outside
}

// unionOfTwo is union for two lists that are as they should be: ascending, with
// indices in [0, n). If they turn out not to be, it reports false, and what it wrote
// is void. dst has room for both.
//
// Which list comes next is as good as random, so nothing in the loop branches on it: the smaller index and its value
// are chosen by conditional moves, and each list moves on by a comparison's outcome. The result ascends only if both
// lists do.
func unionOfTwo(a, b, dst entries, n int, scale float32) (count int, ok bool) {
	// Equal lengths, said in the compiler's terms: one bounds check for two. Values come before indices, since Go 1.26
	// then has registers for i and j: in the other order the loop takes 1.9 times as long (BenchmarkUnionOfTwo).
	valA := a.val[:len(a.idx)]
	valB := b.val[:len(b.idx)]
	idxA := a.idx
	idxB := b.idx
	idx := dst.idx
	val := dst.val[:len(dst.idx)]
	i := 0
	j := 0
	last := int64(-1)
	falls := int64(0) // negative if an index was not above the last
	for i < len(idxA) && j < len(idxB) {
		ia := idxA[i]
		ib := idxB[j]
		va := 0 + float32(valA[i]*scale)
		vb := float32(valB[j] * scale)
		// As bits: conditional moves exist for integers only.
		value := math.Float32bits(va)
		second := math.Float32bits(0 + vb)
		sum := math.Float32bits(va + vb)
		if ib < ia {
			value = second
		}
		if ia == ib {
			value = sum
		}
		next := min(ia, ib)
		idx[count] = next
		val[count] = math.Float32frombits(value)
		count++
		falls |= int64(next) - last - 1
		last = int64(next)
		i += oneIf(ia <= ib)
		j += oneIf(ib <= ia)
	}
	for _, tail := range [2]entries{{idxA[i:], valA[i:]}, {idxB[j:], valB[j:]}} {
		for k, next := range tail.idx {
			idx[count] = next
			val[count] = 0 + float32(tail.val[k]*scale)
			count++
			falls |= int64(next) - last - 1
			last = int64(next)
		}
	}
	return count, falls >= 0 && last < int64(n)
}

// keepAbove moves the entries of at least that key to the front, and returns how many
// there are.
func (e entries) keepAbove(key uint32) (count int) {
	val := e.val[:len(e.idx)]
	for j, i := range e.idx {
		v := val[j]
		e.idx[count] = i
		val[count] = v
		count += oneIf(f32.Key(v) >= key)
	}
	return count
}

func oneIf(condition bool) int {
	if condition {
		return 1
	}
	return 0
}

// union writes the union of s.lists to dst, tile by tile. A tile starts at the
// least index that is left, so empty ones cost nothing; in the tile, sums are
// formed by position, and marks tell which positions were met.
func (s *scratch) union(dst entries, n int, scale float32) (count int, outside int32) {
	if len(s.lists) == 2 && len(s.lists[0].idx)+len(s.lists[1].idx) <= len(dst.idx) {
		if count, ok := unionOfTwo(s.lists[0], s.lists[1], dst, n, scale); ok {
			clear(s.lists)
			return count, 0
		}
	}
	for {
		from := n
		for _, l := range s.lists {
			if len(l.idx) > 0 {
				from = min(from, int(l.idx[0]))
			}
		}
		if from >= n {
			return count, outside + s.drain(n)
		}
		from = max(from, 0)
		tile := s.sums[:min(chunk, n-from)]
		var words uint64 // which marks are not zero
		for j := range s.lists {
			met, negative := s.lists[j].addMarked(tile, &s.marks, from, scale)
			words |= met
			outside += negative
		}
		count += s.take(words, tile, from, dst.from(count))
	}
}

// take moves the marked entries of a tile to dst, and clears their marks. How
// many marks a word has is as good as random, so the loop does not branch on
// it: the next word is there before it is needed.
func (s *scratch) take(words uint64, tile []float32, from int, dst entries) (count int) {
	idx := dst.idx
	val := dst.val[:len(dst.idx)]
	marks := s.marks[bits.TrailingZeros64(words)%len(s.marks)]
	for words != 0 {
		word := bits.TrailingZeros64(words)
		remaining := words & (words - 1)
		next := s.marks[bits.TrailingZeros64(remaining)%len(s.marks)]
		i := word*64 + bits.TrailingZeros64(marks)
		idx[count] = int32(from + i)
		val[count] = tile[i]
		tile[i] = 0
		count++
		marks &= marks - 1
		last := ^uint64(int64(marks|-marks) >> 63) // all ones if there is no mark left
		words ^= (words ^ remaining) & last
		marks |= next & last
	}
	clear(s.marks[:])
	return count
}

// addMarked is addTo that marks which positions of the tile it met, and returns
// which words of marks that touched.
func (e *entries) addMarked(tile []float32, marks *[chunk / 64]uint64, from int,
	scale float32) (words uint64, negative int32) {
	idx := e.idx
	val := e.val[:len(e.idx)]
	j := 0
	for ; j < len(idx); j++ {
		i := uint(int(idx[j]) - from)
		if i >= uint(len(tile)) {
			if int(i) >= 0 {
				break
			}
			negative += int32(uint32(idx[j]) >> 31)
			continue
		}
		tile[i] += float32(val[j] * scale)
		marks[i/64%uint(len(marks))] |= 1 << (i % 64)
		words |= 1 << (i / 64)
	}
	e.idx = idx[j:]
	e.val = val[j:]
	return words, negative
}

// countAbove counts block by block, for as many thresholds as there are: those
// values that are above some and below others are copied together first.
func (s *scratch) countAbove(x, thresholds []float32, counts []int32) {
	clear(counts)
	if len(counts) == 0 {
		return
	}
	lowest := uint32(f32.MaxKey)
	highest := uint32(0)
	for _, t := range thresholds {
		lowest = min(lowest, thresholdKey(t))
		highest = max(highest, thresholdKey(t))
	}
	if lowest == highest {
		found := int32(f32.CountRange(x, lowest, f32.MaxKey))
		for j := range counts {
			counts[j] = found
		}
		return
	}
	const block = 4 * chunk
	s.candidates.resize(block + blockSlack)
	for len(x) > 0 {
		part := x[:min(len(x), block)]
		passed := f32.CountRange(part, highest, f32.MaxKey)
		found := f32.SelectRange(part, 0, lowest, highest-1, s.candidates.idx, s.candidates.val)
		between := s.candidates.val[:found]
		for j, t := range thresholds {
			counts[j] += int32(passed + f32.CountRange(between, thresholdKey(t), highest-1))
		}
		x = x[len(part):]
	}
}

// narrowBracket does a round of the search for a threshold, see
// [kernel.Kernels]. counts are nil in the first one.
func narrowBracket(bracket *[2]uint32, first bool, counts []int32, k int, thresholds []uint32) {
	width := func() uint32 {
		return (bracket[1] - bracket[0]) / uint32(len(thresholds)+1)
	}
	if first {
		*bracket = [2]uint32{1, 1 << 31}
	} else {
		passed := 0
		for passed < len(counts) && int(counts[passed]) >= k {
			passed++
		}
		w := width()
		if passed < len(counts) {
			bracket[1] = bracket[0] + w*uint32(passed+1)
		}
		bracket[0] += w * uint32(passed)
	}
	for j := range thresholds {
		thresholds[j] = bracket[0] + width()*uint32(j+1)
	}
}

func lowerBounds(idx, bounds, positions, lengths []int32) {
	for j, bound := range bounds {
		position, _ := slices.BinarySearch(idx, bound)
		positions[j] = int32(position)
	}
	for j := range lengths {
		lengths[j] = positions[j+1] - positions[j]
	}
}

func sample(dst, idx []int32, quantiles []float64, n int) {
	for j, q := range quantiles {
		if len(idx) == 0 {
			dst[j] = int32(float64(n) * q)
		} else {
			dst[j] = idx[int(float64(len(idx))*q)]
		}
	}
}

func balance(bounds, samples []int32, n int) {
	slices.Sort(samples)
	parts := len(bounds) - 1
	for r := range bounds {
		position := min(r*len(samples)/parts, len(samples)-1)
		bounds[r] = min(max(samples[position], 0), int32(n))
	}
	bounds[0] = 0
	bounds[parts] = int32(n)
}

// isFinite tells whether x is a number.
func isFinite(x float32) bool {
	return math.Abs(float64(x)) <= math.MaxFloat32
}
