package cpu

import (
	"math"
	"math/bits"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/simd"
	"github.com/tutti-go/tutti/runtime/cpu/internal/f32"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Exact top-k by magnitude key (the bits of |x|, see f32.Key).
//
// A guess or a sample of x gives a bracket of keys that probably holds the key
// of the k-th entry. One pass over x copies the candidates, all entries from the
// lower end of the bracket on; what remains happens on these few. This is the
// idea of Floyd and Rivest ("Expected Time Bounds for Selection", 1975) with a
// sample of fixed size, or, from one step of a training to the next, none.
//
// The bracket only ever costs time: kth counts before it believes it,
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
	// compactedMax is the same bound for the entries that kth still has to look at.
	compactedMax = 1 << 20

	// histBits is the number of bits by which narrow shortens a range, and shortHistBits that for arrays of at
	// most shortArray elements, where clearing and reading the counters would take longer than counting.
	histBits      = 11
	histBins      = 1 << histBits
	shortHistBits = 7
	shortArray    = 1 << 10
	// fewKeys is how many keys kth sorts.
	fewKeys = 16
)

// keyRange is a range of magnitude keys, both ends included.
type keyRange struct {
	lo uint32 // lowest key
	hi uint32 // highest key
}

var allKeys = keyRange{0, f32.MaxKey}

// pick accumulates src and writes the entries with a key of at least lo to dst,
// as far as there is room, in one pass. It returns how many there are in all.
func (s *scratch) pick(src *source, lo uint32, dst entries) (total int) {
	switch {
	case src.grad == 0 && src.take:
		return f32.TakeRange(src.x, 0, lo, f32.MaxKey, dst.idx, dst.val)
	case src.grad == 0:
		return f32.SelectRange(src.x, 0, lo, f32.MaxKey, dst.idx, dst.val)
	}
	// In place, what is written was just read, and is in the cache.
	step := len(src.x)
	access := src.access
	if len(src.x) >= streamFrom && &src.x[0] != &src.from[0] {
		access = f32.Streaming
	}
	if src.dt != dtype.F32 || !simd.AVX2 { // then what is done twice is done in the cache
		step = chunk
		access = src.access
	}
	for from := 0; from < len(src.x); from += step {
		block := src.x[from:min(len(src.x), from+step)]
		src.keepPart(from, from+len(block))
		terms := s.widen(src.grad+uintptr(from*src.dt.Size()), src.dt, len(block))
		found := f32.AddSelectRange(block, src.from[from:from+len(block)], terms, src.factor,
			int32(from), lo, f32.MaxKey, dst.idx, dst.val, src.take, access)
		dst = dst.from(found)
		total += found
	}
	return total
}

// topK accumulates src and writes its min(k, n) entries of largest magnitude to
// dst, with or without those that are zero. It returns how many it wrote, and
// the least key among those with zeros (1 without them).
func (s *scratch) topK(src *source, k int, dst entries, g guess, zeros bool) (count int, key uint32) {
	x := src.x
	k = min(k, len(x))
	if k == 0 {
		s.accumulate(src, 0, len(x))
		return 0, 0
	}
	// Candidates are worth their copying if they are few.
	room := min(len(x)/candidatesShare, candidatesMax)
	bracket := allKeys
	found := 0
	if k <= room && g.usable() {
		bracket.lo = f32.Key(g.threshold * (1 - g.margin))
		bracket.hi = f32.Key(g.threshold * (1 + g.margin))
		found = s.findCandidates(src, bracket.lo, room)
	} else {
		s.accumulate(src, 0, len(x))
	}
	if found < k || found > room {
		s.putBack(src, found)
		var expected int
		bracket, expected = s.bracket(x, k)
		if expected <= room {
			// Room for a quarter more than expected: the sample may be off.
			room = expected + expected/4
			found = s.findCandidates(&source{x: x, take: src.take}, bracket.lo, room)
		}
	}
	if k <= found && found <= room {
		return s.topKOfCandidates(src, found, k, bracket, dst, zeros)
	}
	s.putBack(src, found)
	b := s.border(x, k, bracket, zeros)
	count = b.copyLarger(x, dst)
	if src.take {
		scatterZero(x, dst.idx[:count])
	}
	return count, b.key
}

// topKOfCandidates is topK of src.x where s.candidates has as many entries as were found, and the k largest
// among them.
func (s *scratch) topKOfCandidates(src *source, found, k int, bracket keyRange, dst entries,
	zeros bool) (count int, key uint32) {
	candidates := s.candidates.cut(found)
	b := s.border(candidates.val, k, bracket, zeros)
	count = b.copyLarger(candidates.val, dst)
	translate(dst.idx[:count], candidates.idx)
	if src.take { // what was not chosen goes back: it is less than what was
		s.compacted.resize(found + blockSlack)
		left := s.compacted.cut(b.copySmaller(candidates.val, s.compacted))
		translate(left.idx, candidates.idx)
		scatterSet(src.x, left)
	}
	return count, b.key
}

// guess is what an earlier call found, in memory: candidates are what is not smaller by
// more than a share of it, the margin.
//
// Thresholds of trainings move from step to step by shares that are alike for a while: by 1
// to 4 % where the learning rate falls within a few hundred steps, hardly where it does
// not. So the margin follows what was needed. In eight such trainings a fixed one of 3 %
// was too narrow in 0 to 54 % of the steps, this one in 0 to 22 % and 1 % in the middle,
// at less width.
type guess struct {
	threshold float32 // 0 or not finite: there is no guess
	margin    float32 // share of threshold by which candidates may be smaller
}

// How margins move, see [kernel.Kernels].TopK; and the margin of a threshold of SelectNear, which
// is looked for again after many steps: it was exact long ago, and is corrected since.
const (
	minMargin   = 1. / 512
	firstMargin = 1. / 32
	maxMargin   = 1. / 8
	nearMargin  = 1. / 16
)

func (g guess) usable() bool { return g.threshold > 0 && isFinite(g.threshold) }

// checked returns the guess with a margin within the bounds.
func (g guess) checked() guess {
	if minMargin <= g.margin && g.margin <= maxMargin {
		return g
	}
	g.margin = firstMargin // also of a NaN
	return g
}

// next returns the guess after a checked one, of which the threshold t came.
func (g guess) next(t float32) guess {
	if g.usable() {
		need := (g.threshold - t) / g.threshold * 1.5
		g.margin = max(g.margin*(31./32), minMargin)
		if need > g.margin {
			g.margin = min(need, maxMargin)
		}
	}
	g.threshold = t
	return g
}

// findCandidates accumulates src and makes s.candidates the entries with a key
// of at least lo, as far as there is room. It returns how many there are in
// all.
func (s *scratch) findCandidates(src *source, lo uint32, room int) (found int) {
	s.candidates.resize(room + blockSlack)
	return s.pick(src, lo, s.candidates)
}

// putBack puts candidates back that were taken; found is how many.
func (s *scratch) putBack(src *source, found int) {
	if src.take {
		scatterSet(src.x, s.candidates.cut(found))
	}
}

// blockSlack is free room that keeps the block kernel of f32.SelectRange going
// to the end.
const blockSlack = 64

// border is where the largest elements of an array end: they are those of a larger
// key, and those of this key that lie before end.
type border struct {
	key uint32 // of the smallest of them
	end int    // elements of key before this place belong to them
}

// border returns the border of the k largest elements of x, with or without those that are
// zero. Its key is probably in bracket.
func (s *scratch) border(x []float32, k int, bracket keyRange, zeros bool) border {
	key, ties, equal := s.kth(x, k, bracket)
	switch {
	case key == 0 && !zeros:
		return border{1, len(x)}
	case ties < equal:
		return border{key, afterTies(x, key, ties)}
	}
	return border{key, len(x)}
}

// copyLarger writes the elements of x on this side of its border to dst.
func (b border) copyLarger(x []float32, dst entries) (count int) {
	return b.split(x, keyRange{b.key, f32.MaxKey}, keyRange{b.key + 1, f32.MaxKey}, dst)
}

// copySmaller writes the others to dst.
func (b border) copySmaller(x []float32, dst entries) (count int) {
	if b.key == 0 {
		return b.split(x, keyRange{1, 0}, keyRange{0, 0}, dst)
	}
	return b.split(x, keyRange{0, b.key - 1}, keyRange{0, b.key}, dst)
}

// split writes what is in the first range before the end of the ties, and in the second
// one behind that.
func (b border) split(x []float32, first, second keyRange, dst entries) (count int) {
	count = f32.SelectRange(x[:b.end], 0, first.lo, first.hi, dst.idx, dst.val)
	dst = dst.from(count)
	return count + f32.SelectRange(x[b.end:], int32(b.end), second.lo, second.hi, dst.idx, dst.val)
}

// afterTies returns the position behind the ties-th element equal to key.
func afterTies(x []float32, key uint32, ties int) int {
	start := 0
	for start+chunk < len(x) {
		found := f32.CountRange(x[start:start+chunk], key, key)
		if found >= ties {
			break
		}
		ties -= found
		start += chunk
	}
	for i, v := range x[start:] {
		if f32.Key(v) != key {
			continue
		}
		ties--
		if ties == 0 {
			return start + i + 1
		}
	}
	return len(x)
}

// bracket returns a range of keys that probably holds the k-th largest of x, and
// about how many elements of x lie in or above it.
func (s *scratch) bracket(x []float32, k int) (bracket keyRange, expected int) {
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
		bracket.lo, _, _ = s.kth(s.sample, r, allKeys)
	}
	if r := int(rank - margin); r > 0 {
		bracket.hi, _, _ = s.kth(s.sample, r, keyRange{bracket.lo, f32.MaxKey})
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

// kth returns the key of the k-th largest element of x by key, how many of the
// elements equal to it are among the k largest, and how many there are. The
// key is probably in the range probable; if not, finding it takes longer.
func (s *scratch) kth(x []float32, k int, probable keyRange) (key uint32, ties, equal int) {
	r := allKeys
	inside := len(x)
	if probable != allKeys {
		higher := f32.CountRange(x, probable.hi+1, f32.MaxKey)
		probably := f32.CountRange(x, probable.lo, probable.hi)
		switch {
		case k <= higher:
			r.lo = probable.hi + 1
			inside = higher
		case k <= higher+probably:
			r = probable
			inside = probably
			k -= higher
		default:
			r.hi = probable.lo - 1
			inside = len(x) - higher - probably
			k -= higher + probably
		}
	}
	for r.lo < r.hi {
		if inside < len(x) && inside <= compactedMax {
			// In place the second time: x is s.compacted.val then.
			s.compacted.resize(inside + blockSlack)
			f32.SelectRange(x, 0, r.lo, r.hi, s.compacted.idx, s.compacted.val)
			x = s.compacted.val[:inside]
		}
		if inside <= fewKeys && len(x) == inside {
			return kthOfFew(x, k)
		}
		r, inside, k = s.narrow(x, r, k)
	}
	return r.lo, k, inside
}

// kthOfFew is kth of at most fewKeys elements: it sorts them.
func kthOfFew(x []float32, k int) (key uint32, ties, equal int) {
	var memory [fewKeys]uint32
	keys := memory[:len(x)] // the largest first
	for i, v := range x {
		next := f32.Key(v)
		for ; i > 0 && keys[i-1] < next; i-- {
			keys[i] = keys[i-1]
		}
		keys[i] = next
	}
	key = keys[k-1]
	ties = k
	for _, sorted := range keys {
		ties -= oneIf(sorted > key)
		equal += oneIf(sorted == key)
	}
	return key, ties, equal
}

// narrow splits the range r into up to histBins equal parts and returns the
// one that holds the k-th largest key of those in r, how many there are in it,
// and the rank of the sought one among these.
func (s *scratch) narrow(x []float32, r keyRange, k int) (part keyRange, inside, rank int) {
	width := r.hi - r.lo
	digits := histBits
	if len(x) <= shortArray {
		digits = shortHistBits
	}
	shift := max(bits.Len32(width)-digits, 0) & 31
	outside := uint32(1) << digits
	clear(s.hist[:outside+1])
	for _, v := range x {
		offset := f32.Key(v) - r.lo
		bin := offset >> shift
		if offset > width {
			bin = outside
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

// nearState is the state of selectNear in memory.
type nearState struct {
	threshold float32 // of the next step; 0 or not finite: none
	age       int32   // steps since it was exact
}

// selectNear implements SelectNear, see [kernel.Kernels].
func (s *scratch) selectNear(src *source, k int, state *nearState, near kernel.Acceptance,
	dst entries) (count int, used float32) {
	t := state.threshold
	g := guess{t, nearMargin}
	if g.usable() && (near.Interval == 0 || int(state.age) < near.Interval-1) {
		passed := s.pick(src, f32.Key(t), dst)
		if near.Min <= passed && passed <= len(dst.idx) {
			state.age++
			state.threshold = corrected(t, passed, k, near.Step)
			return passed, t
		}
		// All that happened is rolled back, except that src is accumulated now.
		if src.take {
			scatterSet(src.x, dst.cut(passed))
		}
		src.grad = 0
		g = guess{}
	}
	count, key := s.topK(src, k, dst, g, false)
	*state = nearState{math.Float32frombits(key), 0}
	return count, state.threshold
}

// corrected moves a threshold that passed entries passed where k were wanted, if
// that is off by more than a third below or a quarter above.
func corrected(t float32, passed, k int, step float32) float32 {
	switch {
	case step == 0:
		return t
	case 3*passed < 2*k:
		t /= step
	case 4*passed > 5*k:
		t *= step
	}
	return max(t, tiny)
}

// refine implements Refine, see [kernel.Kernels], by bisection. Once few
// entries pass a threshold, only these are looked at for those above it.
func (s *scratch) refine(x []float32, t float32, k int, factors []float32) float32 {
	passed := f32.CountRange(x, thresholdKey(t), f32.MaxKey)
	accepted := 3*k <= 4*passed && 4*passed <= 5*k
	if len(factors) == 0 || !isFinite(t) || accepted {
		return t
	}
	room := min(len(x)/candidatesShare, candidatesMax)
	s.candidates.resize(room + blockSlack)
	low := 0
	high := len(factors) - 1 // the one sought is between them
	for low < high {
		middle := (low + high) / 2
		key := thresholdKey(t * factors[middle])
		passed := f32.CountRange(x, key, f32.MaxKey)
		if 4*passed <= 5*k {
			high = middle
			continue
		}
		low = middle + 1
		if passed <= room {
			f32.SelectRange(x, 0, key, f32.MaxKey, s.candidates.idx, s.candidates.val)
			x = s.candidates.val[:passed]
		}
	}
	return t * factors[low]
}
