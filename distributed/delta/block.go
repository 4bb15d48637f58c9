package delta

import (
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sync"
	"unsafe"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/gaps"
)

// blockLen is the number of elements of a block.
const blockLen = 1 << 20

// The forms of a block.
const (
	formXor    = iota // new XOR old
	formList          // positions, and a value for each
	formOnes          // positions, signs, and values of differences beyond one
	formDense         // a value for each element
	formSorted        // as formList, positions among the elements in the order of their magnitudes
)

// order maps the bits of an element, shifted up to the sign of an int64, to integers in the order
// of the elements, and back: adjacent floats are adjacent integers.
type order struct {
	shift uint  // 64 less the bits of an element
	flip  int64 // what the sign of a float inverts
}

func orderOf(d dtype.DType) order {
	o := order{shift: 64 - 8*uint(d.Size())}
	if d.IsFloat() {
		o.flip = math.MaxInt64 << o.shift & math.MaxInt64
	}
	return o
}

func (o order) of(shifted int64) int64 { return shifted ^ shifted>>63&o.flip }

// coder has the memory to code a block.
type coder struct {
	idx, second []int32
	diffs       []int64
	values      []uint64
	words       []uint16
	signs       []byte
	gaps        gaps.Gaps
	counts      [symbolCount]int
	freq        frequencies
	slots       [1 << tableBits]slot
	differ      [4096]uint16 // words that differ
	classes     []uint8      // leading bits of the elements' magnitudes
	starts      [256]int32   // of each class, in the order of classes
	old, new    []byte       // what is read of memory that is elsewhere
	list, dense []byte
	sorted      []byte
	xor, marks  []byte // parts of a block that was read, memory of its message
}

var coders = sync.Pool{New: func() any { return new(coder) }}

// compare lists the elements of which two blocks differ, and their differences.
func (c *coder) compare(old, new []byte, d dtype.DType) {
	c.idx, c.diffs = c.idx[:0], c.diffs[:0]
	whole := len(new) &^ 7
	c.compareWords(old[:whole], new[:whole], d)
	if whole < len(new) {
		var a, b [8]byte
		copy(a[:], old[whole:])
		copy(b[:], new[whole:])
		before := len(c.idx)
		c.compareWords(a[:], b[:], d)
		for i := range c.idx[before:] {
			c.idx[before+i] += int32(whole / d.Size())
		}
	}
}

// compareWords is compare of blocks of whole words: it looks which words of some differ, without a branch,
// and then at their elements.
func (c *coder) compareWords(old, new []byte, d dtype.DType) {
	a, b := view[uint64](old), view[uint64](new)
	o, size := orderOf(d), bits.TrailingZeros8(uint8(d.Size()))
	shift, lane := o.shift&63, uint64(math.MaxUint64)>>(o.shift&63)
	for from := 0; from < len(a); from += len(c.differ) {
		x, y := a[from:min(from+len(c.differ), len(a))], b[from:]
		y = y[:len(x)]
		n := 0
		for i, w := range x {
			c.differ[n&(len(c.differ)-1)] = uint16(i)
			w ^= y[i]
			n += int((w | -w) >> 63)
		}
		m := len(c.idx)
		idx, diffs := slices.Grow(c.idx, n<<3>>size)[:m+n<<3>>size], slices.Grow(c.diffs, n<<3>>size)[:m+n<<3>>size]
		for _, i := range c.differ[:n] {
			was, is := x[i], y[i]
			for w := was ^ is; w != 0; {
				element := bits.TrailingZeros64(w) >> 3 >> size
				up := uint(8<<size*element) & 63
				w &^= lane << up
				idx[m] = int32((from+int(i))<<3>>size + element)
				diffs[m] = (o.of(int64(is>>up<<shift)) - o.of(int64(was>>up<<shift))) >> shift
				m++
			}
		}
		c.idx, c.diffs = idx[:m], diffs[:m]
	}
}

// view reads bytes as elements, in place. Both processors that this module supports load and store
// elements at any address.
func view[T any](b []byte) []T {
	var zero T
	if n := len(b) / int(unsafe.Sizeof(zero)); n > 0 {
		return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), n)
	}
	return nil
}

func zigzag(d int64) uint64 { return uint64(d<<1 ^ d>>63) }

func unzigzag(z uint64) int64 { return int64(z>>1) ^ -int64(z&1) }

func magnitude(d int64) uint64 { return uint64(d^d>>63) - uint64(d>>63) }

// encode appends the shortest code of the compared block to dst, or, unless small is set, of those that are made fast and can be
// taken back.
func (c *coder) encode(dst, old, new []byte, d dtype.DType, small bool) []byte {
	changed, elements := len(c.idx), len(new)/d.Size()
	best := []byte(nil)
	if changed <= elements/4*3 {
		best = c.encodeList()
	}
	if changed > elements/8 {
		if dense := c.encodeDense(elements); best == nil || len(dense) < len(best) {
			best = dense
		}
	}
	if small && d.IsFloat() && changed <= elements/4*3 {
		if sorted := c.encodeSorted(old, d); len(sorted) < len(best) {
			best = sorted
		}
	}
	if len(best) >= len(new) {
		return appendXor(dst, changed, old, new)
	}
	return append(dst, best...)
}

// appendXor appends the code of a block whose code is its length.
func appendXor(dst []byte, changed int, old, new []byte) []byte {
	dst = binary.AppendUvarint(append(dst, formXor), uint64(changed))
	at := len(dst)
	dst = append(dst, new...)
	subtle.XORBytes(dst[at:], dst[at:], old)
	return dst
}

func (c *coder) encodeList() []byte {
	m, form := len(c.idx), byte(formOnes)
	negative := 0
	c.second, c.values = c.second[:0], c.values[:0]
	c.signs = slices.Grow(c.signs[:0], (m+7)/8)[:(m+7)/8]
	clear(c.signs)
	for i, diff := range c.diffs {
		c.signs[i/8] |= byte(diff>>63&1) << (i % 8)
		negative -= int(diff >> 63)
		if uint64(diff+1) > 2 {
			c.second, c.values = append(c.second, int32(i)), append(c.values, magnitude(diff)-2)
		}
	}
	// Signs take a bit each, which is near their entropy only if both are about as frequent.
	if 4*len(c.second) > m || 5*negative < 2*m || 5*negative > 3*m {
		form, c.values = formList, c.values[:0]
		for _, diff := range c.diffs {
			c.values = append(c.values, zigzag(diff)-1)
		}
	}
	dst := binary.AppendUvarint(append(c.list[:0], form), uint64(m))
	dst = c.appendPositions(dst, c.idx)
	if form == formOnes {
		dst = binary.AppendUvarint(append(dst, c.signs...), uint64(len(c.second)))
		dst = c.appendPositions(dst, c.second)
	}
	c.list = c.appendValues(dst, c.values)
	return c.list
}

func (c *coder) encodeDense(elements int) []byte {
	c.values = slices.Grow(c.values[:0], elements)[:elements]
	clear(c.values)
	for i, at := range c.idx {
		c.values[at] = zigzag(c.diffs[i])
	}
	dst := binary.AppendUvarint(append(c.dense[:0], formDense), uint64(len(c.idx)))
	c.dense = c.appendValues(dst, c.values)
	return c.dense
}

// classify sets the classes of elements, and where each begins if they are sorted by class.
func (c *coder) classify(data []byte, d dtype.DType) {
	c.classes = grown(c.classes, len(data)/d.Size())
	switch d.Size() {
	case 1:
		for i, v := range data {
			c.classes[i] = v << 1
		}
	case 2:
		for i, v := range view[uint16](data) {
			c.classes[i] = uint8(v >> 7)
		}
	case 4:
		for i, v := range view[uint32](data) {
			c.classes[i] = uint8(v >> 23)
		}
	default:
		for i, v := range view[uint64](data) {
			c.classes[i] = uint8(v >> 55)
		}
	}
	var counts [256]int32
	for _, k := range c.classes {
		counts[k]++
	}
	sum := int32(0)
	for k, n := range counts {
		c.starts[k] = sum
		sum += n
	}
}

// encodeSorted lets positions profit from that an optimizer changes small elements more often than large ones.
func (c *coder) encodeSorted(old []byte, d dtype.DType) []byte {
	c.classify(old, d)
	m := len(c.idx)
	c.second, c.values = grown(c.second, m), grown(c.values, m)
	var slots [257]int32 // where the entries of each class begin
	for _, at := range c.idx {
		slots[int(c.classes[at])+1]++
	}
	for k := range 256 {
		slots[k+1] += slots[k]
	}
	next, j := c.starts, 0
	for i, k := range c.classes {
		if j < m && int(c.idx[j]) == i {
			c.second[slots[k]], c.values[slots[k]] = next[k], zigzag(c.diffs[j])-1
			slots[k]++
			j++
		}
		next[k]++
	}
	dst := binary.AppendUvarint(append(c.sorted[:0], formSorted), uint64(m))
	c.sorted = c.appendValues(c.appendPositions(dst, c.second), c.values)
	return c.sorted
}

// unsort makes positions in the order of classes those in data.
func (c *coder) unsort(data []byte, d dtype.DType) {
	c.classify(data, d)
	c.second = grown(c.second, len(c.idx))
	var slots [256]int
	for k, start := range c.starts {
		slots[k], _ = slices.BinarySearch(c.idx, start)
	}
	next := c.starts
	for i, k := range c.classes {
		if j := slots[k]; j < len(c.idx) && c.idx[j] == next[k] {
			c.second[j] = int32(i)
			slots[k]++
		}
		next[k]++
	}
	c.idx, c.second = c.second, c.idx
}

// appendPositions appends the section of ascending positions.
func (c *coder) appendPositions(dst []byte, idx []int32) []byte {
	headers := len(dst)
	dst = append(dst, make([]byte, 2*ceilDiv(len(idx), gaps.Block))...)
	before := int32(-1)
	for part := range slices.Chunk(idx, gaps.Block) {
		c.gaps.Set(part, before)
		h := c.gaps.Choose()
		binary.LittleEndian.PutUint16(dst[headers:], uint16(h))
		from, n := len(dst), h.Bytes(len(part))
		dst = slices.Grow(dst, n+8)[:from+n] // Encode is faster with room for a word
		clear(dst[from:])
		c.gaps.Encode(dst[from:], h)
		before, headers = part[len(part)-1], headers+2
	}
	return dst
}

// readPositions reads the section of len(idx) positions below limit.
func readPositions(src *cursor, idx []int32, limit int) error {
	headers := src.take(2 * uint64(ceilDiv(len(idx), gaps.Block)))
	next, before, descends := int32(0), int32(-1), int32(0)
	for i := 0; i < len(headers); i += 2 {
		part := idx[i/2*gaps.Block : min((i/2+1)*gaps.Block, len(idx))]
		h := gaps.Header(binary.LittleEndian.Uint16(headers[i:]))
		all := src.rest
		if src.take(uint64(h.Bytes(len(part)))); src.bad {
			break
		}
		gaps.Decode(part, len(part), all, h, next)
		for _, at := range part {
			descends |= at | (at - before - 1)
			before = at
		}
		next = before + 1
	}
	if src.bad || descends < 0 || int(before) >= limit {
		return errDamaged
	}
	return nil
}

// read decodes a block of that many elements of differences into idx, diffs and second: those
// of formOnes are ±1 in diffs, before second and values are added. It returns its form.
func (c *coder) read(code []byte, elements int) (form byte, err error) {
	src := cursor{rest: code}
	form, changed := src.byte(), src.uvarint()
	if src.bad || changed > uint64(elements) {
		return 0, errDamaged
	}
	m := int(changed)
	c.second, c.values = c.second[:0], c.values[:0]
	switch form {
	case formXor:
		c.xor = src.rest
		return form, nil
	case formDense:
		c.values = grown(c.values, elements)
		err = c.readValues(&src, c.values)
	case formList, formOnes, formSorted:
		c.idx = grown(c.idx, m)
		if err = readPositions(&src, c.idx, elements); err != nil {
			break
		}
		if form == formOnes {
			c.marks = src.take(uint64(m+7) / 8)
			beyond := src.uvarint()
			if src.bad || beyond > changed {
				return 0, errDamaged
			}
			c.second = grown(c.second, int(beyond))
			if err = readPositions(&src, c.second, m); err != nil {
				break
			}
			m = int(beyond)
		}
		c.values = grown(c.values, m)
		err = c.readValues(&src, c.values)
	default:
		err = errDamaged
	}
	if err == nil && len(src.rest) > 0 {
		err = errDamaged
	}
	return form, err
}

// apply adds the differences of a block's code to data, or subtracts them, which those that are sorted do not allow.
// After an error data is as it was.
func (c *coder) apply(code, data []byte, d dtype.DType, subtract bool) error {
	form, err := c.read(code, len(data)/d.Size())
	if err != nil {
		return err
	}
	if form == formXor {
		if len(c.xor) != len(data) {
			return errDamaged
		}
		subtle.XORBytes(data, data, c.xor)
		return nil
	}
	if form == formSorted {
		if subtract {
			return fmt.Errorf("%w: sorted blocks cannot be taken back", ErrDelta)
		}
		c.unsort(data, d)
		form = formList
	}
	switch d.Size() {
	case 1:
		add[int8](c, data, form, d.IsFloat(), subtract)
	case 2:
		add[int16](c, data, form, d.IsFloat(), subtract)
	case 4:
		add[int32](c, data, form, d.IsFloat(), subtract)
	default:
		add[int64](c, data, form, d.IsFloat(), subtract)
	}
	return nil
}

// add adds what read decoded to the elements, or subtracts it.
func add[T int8 | int16 | int32 | int64](c *coder, data []byte, form byte, float, subtract bool) {
	x, flip, factor := view[T](data), T(0), T(1)
	if float {
		flip = T(int64(math.MaxInt64) >> (64 - 8*unsafe.Sizeof(flip)))
	}
	if subtract {
		factor = -1
	}
	switch form {
	case formDense:
		for i, v := range c.values {
			x[i] = turn(turn(x[i], flip)+factor*T(unzigzag(v)), flip)
		}
	case formList:
		for i, v := range c.values {
			at := c.idx[i]
			x[at] = turn(turn(x[at], flip)+factor*T(unzigzag(v+1)), flip)
		}
	case formOnes:
		for i := 0; i < len(c.idx); i += 8 {
			signs := c.marks[i/8]
			for _, at := range c.idx[i:min(i+8, len(c.idx))] {
				minus := -T(signs & 1)
				signs >>= 1
				x[at] = turn(turn(x[at], flip)+(factor^minus)-minus, flip)
			}
		}
		for i, v := range c.values {
			nth := c.second[i]
			at, minus := c.idx[nth], -T(c.marks[nth/8]>>(nth%8)&1)
			x[at] = turn(turn(x[at], flip)+(factor*T(v+1)^minus)-minus, flip)
		}
	}
}

// turn maps a float to an integer in the order of floats, and back; see order.
func turn[T int8 | int16 | int32 | int64](x, flip T) T { return x ^ T(int64(x)>>63)&flip }

// changedIn returns how many elements a block's code changes.
func changedIn(code []byte) uint64 {
	src := cursor{rest: code}
	src.byte()
	return src.uvarint()
}

// grown returns a slice of n elements, in the memory of s if that is enough.
func grown[T any](s []T, n int) []T { return slices.Grow(s[:0], n)[:n] }

func ceilDiv(n, by int) int { return (n + by - 1) / by }
