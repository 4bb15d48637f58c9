package cpu

import (
	"math"
	"math/bits"

	"github.com/tutti-go/tutti/internal/simd"
)

// Exact top-k by magnitude key (the bits of |x|, see simd.Key).
//
// A sample of x gives a bracket of keys that almost surely holds the key of
// the k-th entry. One pass over x copies the candidates, all entries from the
// lower end of the bracket on; what remains happens on these few. This is the
// idea of Floyd and Rivest ("Expected Time Bounds for Selection", 1975) with a
// sample of fixed size.
//
// The sample only ever costs time: kth counts before it believes the bracket,
// and narrows what is left by counting keys digit by digit (a radix selection),
// three times at most. So the work is linear in len(x) whatever x holds.

const (
	// sampleFrom is the length from which on sampling pays.
	sampleFrom = 1 << 13
	// sampleMax is the size of the sample of a long array. At a density of 1 %
	// the bracket then holds about 0.4 % of the array.
	sampleMax = 1 << 15
	// sampleSpacing is the number of elements of x per sampled one, at least.
	sampleSpacing = 64
	// sampleDeviations is half the width of the bracket in standard deviations
	// of the rank of the k-th entry in the sample. Normally distributed, it
	// falls outside once in 16,000 times.
	sampleDeviations = 4

	// candidatesMax bounds the candidates, and so the scratch memory: 32 MiB.
	candidatesMax = 1 << 22
	// candidatesShare is the part of x, 1/candidatesShare, up to which copying
	// the candidates is cheaper than to read x again.
	candidatesShare = 8
	// compactedMax and compactedShare are the same for the entries that kth
	// still has to look at.
	compactedMax   = 1 << 20
	compactedShare = 4

	// histBits is the number of bits by which narrow shortens a range.
	histBits = 11
	histBins = 1 << histBits
)

// keyRange is a range of magnitude keys, both ends included.
type keyRange struct{ lo, hi uint32 }

var allKeys = keyRange{0, simd.MaxKey}

// topK writes the len(idx) entries of x of largest magnitude to idx and val and
// returns the smallest magnitude among them. 0 < len(idx) = len(val) <= len(x).
func topK(x []float32, idx []int32, val []float32) (threshold float32) {
	s := scratches.get()
	defer scratches.put(s)
	k := len(idx)
	bracket, expected := s.guess(x, k)
	if expected <= min(len(x)/candidatesShare, candidatesMax) {
		// Room for a quarter more than expected: the sample may be off.
		s.candidates.resize(expected + expected/4 + blockSlack)
		found := simd.SelectRange(x, 0, bracket.lo, simd.MaxKey, s.candidates.idx, s.candidates.val)
		if k <= found && found <= len(s.candidates.idx) {
			candidates := s.candidates.val[:found]
			key, ties := s.kth(candidates, k, bracket)
			emit(candidates, key, ties, idx, val)
			for i, position := range idx {
				idx[i] = s.candidates.idx[position]
			}
			return math.Float32frombits(key)
		}
	}
	key, ties := s.kth(x, k, bracket)
	emit(x, key, ties, idx, val)
	return math.Float32frombits(key)
}

// blockSlack is free room that keeps the block kernel of simd.SelectRange going
// to the end.
const blockSlack = 64

// emit writes the entries above key, and the first ties of those equal to it,
// to idx and val, which have room for just these.
func emit(x []float32, key uint32, ties int, idx []int32, val []float32) {
	end := afterTies(x, key, ties)
	n := simd.SelectRange(x[:end], 0, key, simd.MaxKey, idx, val)
	simd.SelectRange(x[end:], int32(end), key+1, simd.MaxKey, idx[n:], val[n:])
}

// afterTies returns the position behind the ties-th element equal to key.
func afterTies(x []float32, key uint32, ties int) int {
	start := 0
	for start+chunk < len(x) {
		found := simd.CountRange(x[start:start+chunk], key, key)
		if found >= ties {
			break
		}
		ties -= found
		start += chunk
	}
	for i, v := range x[start:] {
		if simd.Key(v) == key {
			if ties--; ties == 0 {
				return start + i + 1
			}
		}
	}
	return len(x)
}

// guess returns a range of keys that probably holds the k-th largest of x, and
// about how many elements of x lie in or above it.
func (s *scratch) guess(x []float32, k int) (bracket keyRange, expected int) {
	if len(x) < sampleFrom {
		return allKeys, len(x)
	}
	size := min(sampleMax, len(x)/sampleSpacing)
	s.takeSample(x, size)

	share := float64(k) / float64(len(x))
	rank := share * float64(size)
	margin := sampleDeviations*math.Sqrt(rank*(1-share)) + sampleDeviations
	bracket = allKeys
	last := size
	if r := int(math.Ceil(rank + margin)); r < size {
		last = r
		bracket.lo, _ = s.kth(s.sample, r, allKeys)
	}
	if r := int(rank - margin); r > 0 {
		bracket.hi, _ = s.kth(s.sample, r, keyRange{bracket.lo, simd.MaxKey})
	}
	return bracket, int(float64(last) / float64(size) * float64(len(x)))
}

// takeSample copies one element out of each of size equal parts of x to
// s.sample, at a position inside the part that looks random, so that no
// regular pattern in x is met, but is the same every time.
func (s *scratch) takeSample(x []float32, size int) {
	if cap(s.sample) < size {
		s.sample = make([]float32, sampleMax)
	}
	s.sample = s.sample[:size]
	part := len(x) / size
	var state uint32
	for i := range s.sample {
		state += 0x9e3779b9 // a Weyl sequence: 2^32 over the golden ratio
		mixed := (state ^ state>>15) * 0x85ebca6b
		offset := uint64(mixed^mixed>>13) * uint64(part) >> 32
		s.sample[i] = x[i*part+int(offset)]
	}
}

// kth returns the key of the k-th largest element of x by key, and how many of
// the elements equal to it are among the k largest. The key is probably in the
// range probable; if not, finding it takes longer.
func (s *scratch) kth(x []float32, k int, probable keyRange) (key uint32, ties int) {
	r, inside := allKeys, len(x)
	if probable != allKeys {
		above := simd.CountRange(x, probable.hi+1, simd.MaxKey)
		within := simd.CountRange(x, probable.lo, probable.hi)
		switch {
		case k <= above:
			r.lo, inside = probable.hi+1, above
		case k <= above+within:
			r, inside = probable, within
			k -= above
		default:
			r.hi, inside = probable.lo-1, len(x)-above-within
			k -= above + within
		}
	}
	for r.lo < r.hi {
		if inside <= min(len(x)/compactedShare, compactedMax) {
			// In place the second time: x is s.compacted.val then.
			s.compacted.resize(inside + blockSlack)
			simd.SelectRange(x, 0, r.lo, r.hi, s.compacted.idx, s.compacted.val)
			x = s.compacted.val[:inside]
		}
		r, inside, k = s.narrow(x, r, k)
	}
	return r.lo, k
}

// narrow splits the range r into up to histBins equal parts and returns the
// one that holds the k-th largest key of those in r, how many there are in it,
// and the rank of the sought one among these.
func (s *scratch) narrow(x []float32, r keyRange, k int) (part keyRange, inside, rank int) {
	width := r.hi - r.lo
	shift := max(bits.Len32(width)-histBits, 0) & 31
	clear(s.hist[:])
	for _, v := range x {
		offset := simd.Key(v) - r.lo
		bin := offset >> shift
		if offset > width {
			bin = histBins // not in r
		}
		s.hist[bin]++
	}
	bin := width >> shift
	for ; int(s.hist[bin]) < k; bin-- {
		k -= int(s.hist[bin])
	}
	lo := r.lo + bin<<shift
	return keyRange{lo, min(lo+(1<<shift-1), r.hi)}, int(s.hist[bin]), k
}
