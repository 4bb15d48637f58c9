package delta

import (
	"bytes"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/bits"
	goruntime "runtime"
	"slices"
	"sync"
	"unsafe"

	"github.com/tutti-go/tutti/delta/internal/classes"
	"github.com/tutti-go/tutti/delta/internal/crc"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/exponents"
	"github.com/tutti-go/tutti/internal/gaps"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// blockLen is the number of elements of a block.
const blockLen = 1 << 20

// The forms of a block.
const (
	formXor       = iota // new XOR old
	formList             // positions, and a value for each
	formOnes             // positions, signs, and values of differences beyond one
	formDense            // a value for each element
	formSorted           // like formList, with positions among the elements in the order of their magnitudes
	filling              // not a form: a padding byte before one
	formExponents        // like formXor, with coded exponents
)

// coder holds the memory for coding a block.
type coder struct {
	// idx are the positions of the elements that change, ascending. second are the positions of differences beyond
	// one, or the positions in the order of the elements' magnitudes.
	idx, second []int32
	entries     []int32              // indices of values, by position
	diffs       []int64              // differences, in the order of idx
	values      []uint64             // values to encode or decoded values, for the model of values.go
	words       []uint16             // of the encoded values
	signs       []byte               // of the differences, one bit each
	gaps        gaps.Gaps            // codes positions
	counts      [symbolCount]int     // occurrences of each symbol in the values
	freq        frequencies          // the table of the coder
	slots       [1 << tableBits]slot // the same table, for decoding
	classes     classes.Index        // of the elements
	old, new    []byte               // copies of memory that is elsewhere
	list, dense []byte               // the block encoded as a list, and as all elements
	sorted      []byte               // the block encoded as sorted elements
	xor, marks  []byte               // parts of a block that was read, in memory of its message or of elements
	elements    []byte               // new XOR old
	packed      []byte               // elements with coded exponents
	area        []byte               // memory for kernels
	room        int                  // capacity in changes
}

var coders = sync.Pool{New: func() any { return new(coder) }}

// place is the location of a block of elements, on the host or a GPU, for kernels.
type place struct {
	rt   runtime.Runtime // nil: kernels cannot access the memory
	gpu  *gpu            // nil: use the host's kernels
	addr uintptr         // 0: the elements are zeros
	keep any             // keeps the memory alive
}

// host is the runtime of all memory that the host can access.
var host runtime.Runtime = cpu.New()

func hostPlace(b []byte) place {
	return place{
		rt:   host,
		addr: hostmem.Addr(b),
		keep: b,
	}
}

// bytes returns n bytes of the place: in place if the host can access them, or a copy in buf.
func (p place) bytes(n int, buf *[]byte) ([]byte, error) {
	if p.rt == host {
		return hostmem.Slice[byte](p.addr, n), nil
	}
	*buf = grown(*buf, n)
	return *buf, p.rt.CopyOut(*buf, p.addr)
}

// fetch makes p a place of the host, by a copy in buf if it is not one.
func (p *place) fetch(n int, buf *[]byte) error {
	b, err := p.bytes(n, buf)
	*p = place{
		rt:   host,
		addr: hostmem.Addr(b),
		keep: [2]any{p.keep, b},
	}
	return err
}

// A coder's area holds the data of kernels, at the same offsets in host and GPU memory:
//
//   - zeros in which kernels of a GPU count,
//   - the head: the number of elements that change (I32), and at sumAt the checksum of the block (U32),
//   - their positions (I32),
//   - their differences, as integers of the elements' size, at diffsAt.
const (
	headBytes = 16
	sumAt     = 8
)

// diffsAt returns the offset of the differences in an area with this capacity.
func diffsAt(room int) int { return (scratchBytes + headBytes + 4*room + 7) &^ 7 }

// reserve makes room for a list in the area, and sets idx to its positions.
func (c *coder) reserve(d dtype.DType, room int) {
	c.area = grown(c.area, diffsAt(room)+room*d.Size())
	c.idx = view[int32](c.area[scratchBytes+headBytes:])[:room]
}

// compare lists the elements in which two blocks in one memory differ, and the differences. It returns the checksum of
// the second block, computed from the checksum of the first.
func (c *coder) compare(old, now place, d dtype.DType, elements int, sum uint32) (uint32, error) {
	for room := max(c.room, elements/64); ; room = c.room {
		c.reserve(d, room)
		changed, after, err := c.changes(old, now, d, elements, sum)
		if err != nil {
			return 0, err
		}
		c.room = changed + changed/4
		if changed <= room {
			c.idx = c.idx[:changed]
			c.widen(d, room)
			return after, nil
		}
	}
}

// changes is compare with as many changes as the area has room for. It returns the number of changes.
func (c *coder) changes(
	old, now place, d dtype.DType, elements int, sum uint32,
) (changed int, after uint32, err error) {
	defer goruntime.KeepAlive([2]any{old.keep, now.keep})
	if now.gpu != nil {
		head := c.area[scratchBytes:]
		binary.LittleEndian.PutUint32(head[sumAt:], sum)
		err := now.gpu.diff(c.area, len(c.idx), old.addr, now.addr, d, elements)
		return int(binary.LittleEndian.Uint32(head)), binary.LittleEndian.Uint32(head[sumAt:]), err
	}
	bytes := elements * d.Size()
	var was []byte
	if old.addr != 0 {
		was = hostmem.Slice[byte](old.addr, bytes)
	}
	is := hostmem.Slice[byte](now.addr, bytes)
	diffs := c.area[diffsAt(len(c.idx)):]
	switch d.Size() {
	case 1:
		changed, after = diffHost(was, is, d, c.idx, view[int8](diffs), sum)
	case 2:
		changed, after = diffHost(was, is, d, c.idx, view[int16](diffs), sum)
	case 4:
		changed, after = diffHost(was, is, d, c.idx, view[int32](diffs), sum)
	default:
		changed, after = diffHost(was, is, d, c.idx, view[int64](diffs), sum)
	}
	return changed, after, nil
}

// patch adds the first differences of the area to the elements of a block, or subtracts them. It returns the block's
// new checksum, computed from the old one. Positions outside the block are skipped. The differences are overwritten.
func (c *coder) patch(p place, d dtype.DType, elements, changed int, sum uint32, subtract bool) (uint32, error) {
	if changed == 0 {
		return sum, nil
	}
	defer goruntime.KeepAlive(p.keep)
	if p.gpu != nil {
		sumOf := c.area[scratchBytes+sumAt:]
		binary.LittleEndian.PutUint32(sumOf, sum)
		err := p.gpu.patch(c.area, len(c.idx), changed, p.addr, d, elements, subtract)
		return binary.LittleEndian.Uint32(sumOf), err
	}
	idx := c.idx[:changed]
	diffs := c.area[diffsAt(len(c.idx)):]
	data := hostmem.Slice[byte](p.addr, elements*d.Size())
	switch d.Size() {
	case 1:
		patchHost(view[int8](data), d, idx, view[int8](diffs), subtract)
	case 2:
		patchHost(view[int16](data), d, idx, view[int16](diffs), subtract)
	case 4:
		patchHost(view[int32](data), d, idx, view[int32](diffs), subtract)
	default:
		patchHost(view[int64](data), d, idx, view[int64](diffs), subtract)
	}
	if difference, ok := crc.Change(idx, diffs, d.Size(), len(data)); ok {
		return sum ^ difference, nil
	}
	return crc32.Checksum(data, castagnoli), nil
}

// widen sets c.diffs to the differences of an area with this capacity.
func (c *coder) widen(d dtype.DType, room int) {
	c.diffs = grown(c.diffs, len(c.idx))
	from := c.area[diffsAt(room):]
	switch d.Size() {
	case 1:
		widen(c.diffs, view[int8](from))
	case 2:
		widen(c.diffs, view[int16](from))
	case 4:
		widen(c.diffs, view[int32](from))
	default:
		widen(c.diffs, view[int64](from))
	}
}

func widen[T signed](to []int64, from []T) {
	for i, v := range from[:len(to)] {
		to[i] = int64(v)
	}
}

// view returns bytes as elements, in place. Both architectures that this module supports access elements at any
// address.
func view[T any](b []byte) []T {
	var zero T
	if n := len(b) / int(unsafe.Sizeof(zero)); n > 0 {
		return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), n)
	}
	return nil
}

func zigzag(d int64) uint64 { return uint64(d<<1 ^ d>>63) }

func unzigzag(z uint64) int64 {
	return int64(z>>1) ^ -int64(z&1)
}

func magnitude(d int64) uint64 {
	return uint64(d^d>>63) - uint64(d>>63)
}

// encode appends the shortest code of the compared block to dst. Unless small is set, it only considers codes that are
// fast and can be subtracted again. A code shorter than minimum is padded.
func (c *coder) encode(
	dst []byte,
	old, now place,
	d dtype.DType,
	elements, minimum int,
	small bool,
) ([]byte, error) {
	changed := len(c.idx)
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
		data, err := old.bytes(elements*d.Size(), &c.old)
		if err != nil {
			return nil, err
		}
		if sorted := c.encodeSorted(data, d); len(sorted) < len(best) {
			best = sorted
		}
	}
	if changed > elements/8 || len(best) >= elements*d.Size() {
		if err := c.xorElements(old, now, elements*d.Size()); err != nil {
			return nil, err
		}
		if packed := c.encodeElements(c.elements, d, changed); best == nil || len(packed) < len(best) {
			best = packed
		}
	}
	missing := max(minimum-len(best), 0)
	dst = append(dst, bytes.Repeat([]byte{filling}, missing)...)
	return append(dst, best...), nil
}

// xorElements sets c.elements to the XOR of old and new elements.
func (c *coder) xorElements(old, now place, bytes int) error {
	data, err := now.bytes(bytes, &c.new)
	if err != nil {
		return err
	}
	c.elements = append(c.elements[:0], data...)
	if old.addr == 0 {
		return nil
	}
	data, err = old.bytes(bytes, &c.old)
	subtle.XORBytes(c.elements, c.elements, data)
	return err
}

// encodeElements returns the code of the elements' changes, with coded exponents if that is shorter.
func (c *coder) encodeElements(data []byte, d dtype.DType, changed int) []byte {
	if hasExponents(d) {
		packed := binary.AppendUvarint(append(c.packed[:0], formExponents), uint64(changed))
		start := len(packed)
		c.packed = exponents.Append(packed, data, d.Size())
		if len(c.packed)-start < len(data) {
			return c.packed
		}
	}
	packed := binary.AppendUvarint(append(c.packed[:0], formXor), uint64(changed))
	c.packed = append(packed, data...)
	return c.packed
}

// hasExponents reports whether elements are floats whose exponents can be coded.
func hasExponents(d dtype.DType) bool {
	return d.IsFloat() && exponents.Supports(d.Size())
}

// encodeFull returns the code of a block of a full copy, and its checksum. The code is nil if the elements have no
// exponents, or if a quarter of them are zeros: then compare finds the others.
func (c *coder) encodeFull(now place, d dtype.DType, elements int) (code []byte, sum uint32, err error) {
	if !hasExponents(d) {
		return nil, 0, nil
	}
	data, err := now.bytes(elements*d.Size(), &c.new)
	if err != nil {
		return nil, 0, err
	}
	changed := elements - countZeros(data, d.Size())
	if changed <= elements/4*3 {
		return nil, 0, nil
	}
	return slices.Clone(c.encodeElements(data, d, changed)), crc32.Checksum(data, castagnoli), nil
}

// countZeros counts the elements of two or four bytes that are zero.
func countZeros(data []byte, size int) (zeros int) {
	top := uint64(0x8000_0000_8000_0000) // the top bit of each element in a word
	if size == 2 {
		top = 0x8000_8000_8000_8000
	}
	for ; len(data) >= 8; data = data[8:] {
		word := binary.LittleEndian.Uint64(data)
		carry := word&^top + ^top // carry into the top bit of elements with a lower bit set
		zeros += bits.OnesCount64(top &^ (word | carry))
	}
	for element := range slices.Chunk(data, size) {
		if uint32(element[0])|uint32(element[1])|uint32(element[size-2])|uint32(element[size-1]) == 0 {
			zeros++
		}
	}
	return zeros
}

func (c *coder) encodeList() []byte {
	m := len(c.idx)
	form := byte(formOnes)
	negative := 0
	c.second = c.second[:0]
	c.values = c.values[:0]
	c.signs = slices.Grow(c.signs[:0], (m+7)/8)[:(m+7)/8]
	clear(c.signs)
	for i, diff := range c.diffs {
		c.signs[i/8] |= byte(diff>>63&1) << (i % 8)
		negative -= int(diff >> 63)
		if uint64(diff+1) > 2 {
			c.second, c.values = append(c.second, int32(i)), append(c.values, magnitude(diff)-2)
		}
	}
	// A sign takes one bit. That is near the entropy only if both signs are about equally frequent.
	if 4*len(c.second) > m || 5*negative < 2*m || 5*negative > 3*m {
		form = formList
		c.values = c.values[:0]
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
	for i, position := range c.idx {
		c.values[position] = zigzag(c.diffs[i])
	}
	dst := binary.AppendUvarint(append(c.dense[:0], formDense), uint64(len(c.idx)))
	c.dense = c.appendValues(dst, c.values)
	return c.dense
}

// encodeSorted makes positions shorter: an optimizer changes small elements more often than large ones.
func (c *coder) encodeSorted(old []byte, d dtype.DType) []byte {
	c.classes.Reset(old, d.Size())
	m := len(c.idx)
	c.second, c.values = grown(c.second, m), grown(c.values, m)
	var slots [257]int32 // the first entry of each class
	for _, position := range c.idx {
		slots[int(c.classes.Classes[position])+1]++
	}
	for k := range 256 {
		slots[k+1] += slots[k]
	}
	next := c.classes.Starts
	j := 0
	for i, k := range c.classes.Classes {
		if j < m && int(c.idx[j]) == i {
			slot := slots[k]
			c.second[slot] = next[k]
			c.values[slot] = zigzag(c.diffs[j]) - 1
			slots[k]++
			j++
		}
		next[k]++
	}
	dst := binary.AppendUvarint(append(c.sorted[:0], formSorted), uint64(m))
	c.sorted = c.appendValues(c.appendPositions(dst, c.second), c.values)
	return c.sorted
}

// unsort converts positions in the order of classes to ascending positions in data, and sets their differences.
func (c *coder) unsort(data []byte, d dtype.DType) {
	m := len(c.idx)
	c.second = grown(c.second, m)
	c.entries = grown(c.entries, m)
	c.diffs = grown(c.diffs, m)
	c.classes.Reset(data, d.Size())
	c.classes.Unsort(c.second, c.entries, c.idx)
	copy(c.idx, c.second)
	for i, entry := range c.entries {
		c.diffs[i] = unzigzag(c.values[entry] + 1)
	}
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
		from := len(dst)
		n := h.Bytes(len(part))
		dst = slices.Grow(dst, n+8)[:from+n] // Encode is faster with room for one more word
		clear(dst[from:])
		c.gaps.Encode(dst[from:], h)
		before = part[len(part)-1]
		headers = headers + 2
	}
	return dst
}

// readPositions reads the section of len(idx) positions below limit.
func readPositions(src *cursor, idx []int32, limit int) error {
	headers := src.take(2 * uint64(ceilDiv(len(idx), gaps.Block)))
	before := int32(-1)
	descends := int32(0)
	for i := 0; i < len(headers); i += 2 {
		part := idx[i/2*gaps.Block : min((i/2+1)*gaps.Block, len(idx))]
		h := gaps.Header(binary.LittleEndian.Uint16(headers[i:]))
		all := src.data
		if src.take(uint64(h.Bytes(len(part)))); src.bad {
			break
		}
		gaps.Decode(part, len(part), all, h, before+1)
		if !h.Ascends() {
			for _, position := range part {
				descends |= position | (position - before - 1)
				before = position
			}
		}
		before = part[len(part)-1]
		if descends < 0 || int(before) >= limit {
			return errDamaged
		}
	}
	if src.bad {
		return errDamaged
	}
	return nil
}

// read decodes a block with this many elements: positions into the area, values, and for formOnes marks and second. It
// returns the form.
func (c *coder) read(code []byte, d dtype.DType, elements int) (form byte, err error) {
	form, src := formOf(code)
	changed := src.uvarint()
	if src.bad || changed > uint64(elements) {
		return 0, errDamaged
	}
	m := int(changed)
	switch form {
	case formXor:
		c.xor = src.data
		return form, nil
	case formExponents:
		if !hasExponents(d) {
			return 0, errDamaged
		}
		c.elements = grown(c.elements, elements*d.Size())
		c.xor = c.elements
		if exponents.Decode(c.xor, src.data, d.Size()) != nil {
			return 0, errDamaged
		}
		return form, nil
	case formDense:
		c.reserve(d, elements)
		c.values = grown(c.values, elements)
		err = c.readValues(&src, c.values)
	case formList, formOnes, formSorted:
		c.reserve(d, m)
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
	if err == nil && len(src.data) > 0 {
		err = errDamaged
	}
	return form, err
}

// apply adds the differences of a block's code to its elements, or subtracts them, which sorted blocks do not allow.
// It returns the block's new checksum, computed from the old one. If the code is invalid, the elements are unchanged.
func (c *coder) apply(
	code []byte,
	p place,
	d dtype.DType,
	elements int,
	sum uint32,
	subtract bool,
) (uint32, error) {
	form, err := c.decode(code, d, elements)
	if err != nil {
		return 0, err
	}
	return c.add(form, p, d, elements, sum, subtract)
}

// decode decodes the code of a block with this many elements, for add, and returns its form.
func (c *coder) decode(code []byte, d dtype.DType, elements int) (form byte, err error) {
	form, err = c.read(code, d, elements)
	if err != nil {
		return 0, err
	}
	if isFlat(form) && len(c.xor) != elements*d.Size() {
		return 0, errDamaged
	}
	return form, nil
}

// isFlat reports whether blocks of a form have all elements, as XORs.
func isFlat(form byte) bool { return form == formXor || form == formExponents }

// add is apply for the decoded code.
func (c *coder) add(form byte, p place, d dtype.DType, elements int, sum uint32, subtract bool) (uint32, error) {
	defer goruntime.KeepAlive(p.keep)
	if form == formSorted && subtract {
		return 0, fmt.Errorf("%w: sorted blocks cannot be taken back", ErrDelta)
	}
	if isFlat(form) || form == formSorted {
		data, err := p.bytes(elements*d.Size(), &c.old)
		if err != nil {
			return 0, err
		}
		if isFlat(form) {
			subtle.XORBytes(data, data, c.xor)
			if p.rt != host {
				err = p.rt.CopyIn(p.addr, data)
			}
			return crc32.Checksum(data, castagnoli), err
		}
		c.unsort(data, d)
	}
	changed := 0
	diffs := c.area[diffsAt(len(c.idx)):]
	switch d.Size() {
	case 1:
		changed = writeDiffs[int8](c, form, diffs)
	case 2:
		changed = writeDiffs[int16](c, form, diffs)
	case 4:
		changed = writeDiffs[int32](c, form, diffs)
	default:
		changed = writeDiffs[int64](c, form, diffs)
	}
	return c.patch(p, d, elements, changed, sum, subtract)
}

// writeDiffs writes the differences that read decoded and, for dense blocks, the positions. It returns the number of
// elements that change.
func writeDiffs[T signed](c *coder, form byte, diffs []byte) int {
	by := view[T](diffs)
	switch form {
	case formDense:
		m := 0
		for i, v := range c.values {
			c.idx[m] = int32(i)
			by[m] = T(unzigzag(v))
			m += int((v | -v) >> 63)
		}
		return m
	case formSorted:
		for i, diff := range c.diffs {
			by[i] = T(diff)
		}
	case formList:
		for i, v := range c.values {
			by[i] = T(unzigzag(v + 1))
		}
	case formOnes:
		var signs [256][8]T
		for marks := range signs {
			for j := range 8 {
				signs[marks][j] = 1 - 2*T(marks>>j&1)
			}
		}
		for i, marks := range c.marks {
			if octet := by[8*i:]; len(octet) >= 8 {
				*(*[8]T)(octet) = signs[marks]
			} else {
				copy(octet, signs[marks][:])
			}
		}
		for i, v := range c.values {
			by[c.second[i]] *= T(v + 2)
		}
	}
	return len(c.idx)
}

// formOf returns the form of a block's code, and the rest of the code.
func formOf(code []byte) (form byte, src cursor) {
	src.data = bytes.TrimLeft(code, string(rune(filling)))
	form = src.byte()
	return form, src
}

// changedIn returns the number of elements that a block's code changes.
func changedIn(code []byte) uint64 {
	_, src := formOf(code)
	return src.uvarint()
}

// grown returns a slice of n elements, in the memory of s if it is large enough.
func grown[T any](s []T, n int) []T {
	return slices.Grow(s[:0], n)[:n]
}

func ceilDiv(n, by int) int { return (n + by - 1) / by }
