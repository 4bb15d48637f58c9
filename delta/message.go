package delta

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"math/bits"
	"slices"

	"github.com/tutti-go/tutti/dtype"
)

// ErrDelta means that a delta is damaged, or does not apply to these tensors.
var ErrDelta = errors.New("invalid delta")

// errDamaged means that no encoder wrote this delta.
var errDamaged = fmt.Errorf("%w: not in the format of deltas", ErrDelta)

// VersionError means that a delta applies to tensors of another version. A full copy, or a delta from version Have,
// would apply.
type VersionError struct {
	Have, Need uint64 // 0: none
	// Differ means that the versions are the same, but the tensors are not.
	Differ bool
}

// Error implements error.
func (e *VersionError) Error() string {
	if e.Differ {
		return fmt.Sprintf("delta: these tensors are not those of version %d that the delta was made of", e.Need)
	}
	return fmt.Sprintf("delta: these tensors are of version %d, the delta is for version %d", e.Have, e.Need)
}

// A delta begins with the format and its version.
const (
	format  = "tdl"
	version = 4
	magic   = format + string(rune(version))
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A Delta converts the tensors of one version to those of another.
type Delta struct {
	Base   uint64 // the version that it applies to; 0: a full copy, which applies to any
	Target uint64 // the resulting version

	digest  uint32   // of the base
	weights uint64   // elements of all tensors
	layout  []Tensor // of the target, without memory; nil: the base's, unless it is packed
	packed  *packed  // layout and origins, made by Diff; nil: layout has them
	text    *packed  // nil: programs store none
	tensors []change // tensors of the target that change, ascending
}

// packed is data compressed with the corresponding data of the base as a dictionary.
type packed struct {
	sum    uint32 // checksum of the base's data
	length uint64 // uncompressed bytes
	frame  []byte // the result of pack
}

// newPacked packs data.
func newPacked(base, target []byte) (*packed, error) {
	frame, err := pack(base, target)
	return &packed{
		sum:    crc32.Checksum(base, castagnoli),
		length: uint64(len(target)),
		frame:  frame,
	}, err
}

// unpack returns the data, given the corresponding data of the base.
func (p *packed) unpack(base []byte) ([]byte, error) {
	if crc32.Checksum(base, castagnoli) != p.sum {
		return nil, &VersionError{Differ: true}
	}
	return unpack(base, p.frame, p.length)
}

// SetText stores a text that a program keeps with the tensors, such as the headers of their files. d carries the
// changes from the base's text to the target's.
func (d *Delta) SetText(base, target []byte) (err error) {
	d.text, err = newPacked(base, target)
	return err
}

// Text returns the text of the target, given the text of the base. Another text is a [VersionError]. A delta without
// texts returns it unchanged.
func (d *Delta) Text(base []byte) ([]byte, error) {
	if d.text == nil {
		return base, nil
	}
	text, err := d.text.unpack(base)
	return text, d.describe(err)
}

// describe adds the version to a [VersionError].
func (d *Delta) describe(err error) error {
	if mismatch := new(VersionError); errors.As(err, &mismatch) {
		mismatch.Have = d.Base
		mismatch.Need = d.Base
	}
	return err
}

// change is the change of one tensor.
type change struct {
	tensor int     // its index in the target
	sum    uint32  // over the checksums of all its blocks, after the change
	blocks []block // blocks that change, ascending
}

type block struct {
	index int    // of the tensor
	code  []byte // made by a coder
}

// Stat has the statistics of a delta.
type Stat struct {
	Weights uint64 `json:"weights"` // elements of all tensors
	Changed uint64 `json:"changed"` // elements that it changes
	Bytes   uint64 `json:"bytes"`   // its length
}

// Stat returns the statistics of d.
func (d *Delta) Stat() Stat {
	s := Stat{Weights: d.weights, Bytes: 4}
	for _, c := range d.tensors {
		for _, b := range c.blocks {
			s.Changed += changedIn(b.code)
		}
	}
	for _, p := range d.parts() {
		s.Bytes += uint64(len(p))
	}
	return s
}

// blocks returns the number of blocks of each tensor that change.
func (d *Delta) blocks() (counts []int) {
	for _, c := range d.tensors {
		counts = append(counts, len(c.blocks))
	}
	return counts
}

// WriteTo writes d, in the format that docs/delta-format.md describes.
func (d *Delta) WriteTo(w io.Writer) (written int64, err error) {
	parts := d.parts()
	sum := uint32(0)
	for _, p := range parts[1:] {
		sum = crc32.Update(sum, castagnoli, p)
	}
	for _, p := range append(parts, binary.LittleEndian.AppendUint32(nil, sum)) {
		n, err := w.Write(p)
		if written += int64(n); err != nil {
			return written, fmt.Errorf("delta: write: %w", err)
		}
	}
	return written, nil
}

// parts returns the written form of d, without the checksum. The checksum covers the parts from the second one on.
func (d *Delta) parts() (parts [][]byte) {
	b := binary.AppendUvarint(nil, d.Base)
	if d.Base != 0 {
		b = binary.LittleEndian.AppendUint32(b, d.digest)
	}
	b = binary.AppendUvarint(binary.AppendUvarint(b, d.Target), d.weights)
	switch {
	case d.packed != nil:
		b = appendPacked(append(b, layoutPacked), d.packed)
	case d.layout != nil:
		b = appendLayout(append(b, layoutListed), d.layout)
	default:
		b = append(b, layoutSame)
	}
	if d.text == nil {
		b = append(b, 0)
	} else {
		b = appendPacked(append(b, 1), d.text)
	}
	b = binary.AppendUvarint(b, uint64(len(d.tensors)))
	parts = [][]byte{nil}
	before := -1
	for _, c := range d.tensors {
		b = binary.AppendUvarint(b, uint64(c.tensor-before-1))
		b = binary.LittleEndian.AppendUint32(b, c.sum)
		b = binary.AppendUvarint(b, uint64(len(c.blocks)))
		before = c.tensor
		next := 0
		for _, k := range c.blocks {
			b = binary.AppendUvarint(
				binary.AppendUvarint(b, uint64(k.index-next)),
				uint64(len(k.code)),
			)
			parts = append(parts, b, k.code)
			b = nil
			next = k.index + 1
		}
	}
	parts = append(parts, b)
	length := uint64(4)
	for _, p := range parts {
		length += uint64(len(p))
	}
	parts[0] = binary.AppendUvarint([]byte(magic), length)
	return parts
}

// Read reads exactly one delta. It allocates only as much memory as there are bytes to read.
// If there are none, its error also wraps [io.EOF].
func Read(r io.Reader) (*Delta, error) {
	var head [len(magic)]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, unread(err)
	}
	if string(head[:len(format)]) != format {
		return nil, fmt.Errorf("%w: it begins with %q, and deltas with %q", ErrDelta, head, magic)
	}
	if got := head[len(format)]; got != version {
		return nil, fmt.Errorf("%w: it has version %d of the format, and this program reads version %d",
			ErrDelta, got, version)
	}
	var body []byte
	length, err := binary.ReadUvarint(byteReader{r})
	if err == nil {
		body, err = io.ReadAll(io.LimitReader(r, int64(min(length, math.MaxInt64))))
	}
	if errors.Is(err, io.EOF) || err == nil && uint64(len(body)) < length {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, unread(err)
	}
	return parse(body)
}

func unread(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: it ends before its length: %w", ErrDelta, err)
	}
	return fmt.Errorf("delta: read: %w", err)
}

// byteReader reads single bytes.
type byteReader struct{ io.Reader }

func (r byteReader) ReadByte() (byte, error) {
	var b [1]byte
	_, err := io.ReadFull(r, b[:])
	return b[0], err
}

// parse reads the part after the length.
func parse(body []byte) (*Delta, error) {
	end := len(body) - 4
	if end < 0 || crc32.Checksum(body[:end], castagnoli) != binary.LittleEndian.Uint32(body[end:]) {
		return nil, fmt.Errorf("%w: its checksum is another", ErrDelta)
	}
	src := cursor{data: body[:end]}
	d := &Delta{Base: src.uvarint()}
	if d.Base != 0 {
		d.digest = src.uint32()
	}
	d.Target = src.uvarint()
	d.weights = src.uvarint()
	switch src.byte() {
	case layoutSame:
	case layoutListed:
		var err error
		if d.layout, err = readLayout(&src); err != nil {
			return nil, err
		}
	case layoutPacked:
		d.packed = readPacked(&src)
	default:
		return nil, errDamaged
	}
	if src.byte() != 0 {
		d.text = readPacked(&src)
	}
	next := 0
	for n := src.uvarint(); n > 0 && !src.bad; n-- {
		gap := src.uvarint()
		c := change{sum: src.uint32()}
		c.tensor = next + int(gap&math.MaxInt32)
		next = c.tensor + 1
		index := 0
		for m := src.uvarint(); m > 0 && !src.bad; m-- {
			index += int(src.uvarint() & math.MaxInt32)
			c.blocks = append(c.blocks, block{index, src.text()})
			index++
		}
		d.tensors = append(d.tensors, c)
	}
	if src.bad || len(src.data) > 0 || d.Target == 0 || d.Base == 0 && d.layout == nil {
		return nil, errDamaged
	}
	return d, nil
}

// The representations of the layout in a delta.
const (
	layoutSame = iota
	layoutListed
	layoutPacked
)

// readLayout reads the output of appendLayout.
func readLayout(src *cursor) ([]Tensor, error) {
	layout := []Tensor{}
	for n := src.uvarint(); n > 0 && !src.bad; n-- {
		t := Tensor{Name: string(src.text())}
		dt, err := dtype.Parse(string(src.text()))
		for range src.uvarint() {
			if src.bad {
				break
			}
			t.Shape = append(t.Shape, int(min(src.uvarint(), math.MaxInt)))
		}
		t.DType = dt
		last := len(layout) - 1
		if src.bad || err != nil || t.check() != nil || last >= 0 && layout[last].Name >= t.Name {
			return nil, errDamaged
		}
		layout = append(layout, t)
	}
	return layout, nil
}

// appendOrigins appends the origins of tensors without a counterpart: for each, the index of a tensor of the base with
// its bytes, as the distance from the index after the previous one.
func appendOrigins(b []byte, origins []int) []byte {
	next := 0
	for _, origin := range origins {
		b = binary.AppendVarint(b, int64(origin-next))
		next = origin + 1
	}
	return b
}

// readOrigins reads count origins, each -1 or below limit, up to the end of src.
func readOrigins(src *cursor, count, limit int) ([]int, error) {
	origins := make([]int, count)
	next := int64(0)
	for i := range origins {
		origin := next + unzigzag(src.uvarint())
		if src.bad || origin < -1 || origin >= int64(limit) {
			return nil, errDamaged
		}
		origins[i] = int(origin)
		next = origin + 1
	}
	if len(src.data) > 0 {
		return nil, errDamaged
	}
	return origins, nil
}

func appendPacked(b []byte, p *packed) []byte {
	b = binary.LittleEndian.AppendUint32(b, p.sum)
	b = binary.AppendUvarint(b, p.length)
	return append(binary.AppendUvarint(b, uint64(len(p.frame))), p.frame...)
}

func readPacked(src *cursor) *packed {
	p := &packed{sum: src.uint32()}
	p.length = src.uvarint()
	p.frame = src.text()
	return p
}

// appendLayout appends names, types and shapes.
func appendLayout(b []byte, tensors []Tensor) []byte {
	b = binary.AppendUvarint(b, uint64(len(tensors)))
	for _, t := range tensors {
		for _, text := range []string{t.Name, t.DType.String()} {
			b = append(binary.AppendUvarint(b, uint64(len(text))), text...)
		}
		b = binary.AppendUvarint(b, uint64(len(t.Shape)))
		for _, n := range t.Shape {
			b = binary.AppendUvarint(b, uint64(n))
		}
	}
	return b
}

// Elements returns the number of elements, or an error if no tensor in memory can have this type and shape.
func (t Tensor) Elements() (int, error) {
	err := t.check()
	return t.elements, err
}

// check checks type and shape, and counts the elements.
func (t *Tensor) check() error {
	if !t.DType.Valid() {
		return fmt.Errorf("delta: tensor %q has no element type", t.Name)
	}
	size := uint64(t.DType.Size())
	empty := false
	for _, n := range t.Shape {
		high, low := bits.Mul64(size, uint64(max(n, 1)))
		if n < 0 || high != 0 || low > math.MaxInt {
			return fmt.Errorf("delta: tensor %q of shape %v is larger than memory", t.Name, t.Shape)
		}
		size = low
		empty = empty || n == 0
	}
	t.elements = int(size) / t.DType.Size()
	if empty {
		t.elements = 0
	}
	return nil
}

// blocks returns the number of blocks of t.
func (t *Tensor) blocks() int { return ceilDiv(t.elements, blockLen) }

// bounds returns the range of a block's bytes.
func (t *Tensor) bounds(block int) (from, to int) {
	size := t.DType.Size()
	return block * blockLen * size, min((block+1)*blockLen, t.elements) * size
}

// length returns the bytes of a block.
func (t *Tensor) length(block int) int {
	from, to := t.bounds(block)
	return to - from
}

// like reports whether the tensors have the same name, type and shape.
func (t *Tensor) like(target *Tensor) bool {
	return t.Name == target.Name && t.DType == target.DType && slices.Equal(t.Shape, target.Shape)
}

// sumOf returns the checksum of a tensor whose blocks have these checksums.
func sumOf(blocks []uint32) uint32 {
	sum := uint32(0)
	for _, s := range blocks {
		sum = crc32.Update(sum, castagnoli, binary.LittleEndian.AppendUint32(nil, s))
	}
	return sum
}

// sumOfZeros returns the checksum of this number of zero bytes.
func sumOfZeros(bytes int) (sum uint32) {
	for ; bytes > 0; bytes -= min(bytes, len(zeros)) {
		sum = crc32.Update(sum, castagnoli, zeros[:min(bytes, len(zeros))])
	}
	return sum
}

var zeros [1 << 16]byte

// find returns the index of the tensor that is like t, -1 if there is none.
func find(tensors []Tensor, t *Tensor) int {
	i, ok := slices.BinarySearchFunc(tensors, t.Name, func(t Tensor, name string) int {
		return cmp.Compare(t.Name, name)
	})
	if !ok || !tensors[i].like(t) {
		return -1
	}
	return i
}

// cursor reads a message. After the end, or a number that is too long, it is bad.
type cursor struct {
	data []byte // remaining data
	bad  bool   // the data ended too early; later reads return zero
}

func (c *cursor) take(n uint64) []byte {
	if c.bad || n > uint64(len(c.data)) {
		c.bad = true
		return nil
	}
	part := c.data[:n:n]
	c.data = c.data[n:]
	return part
}

func (c *cursor) byte() byte {
	if b := c.take(1); !c.bad {
		return b[0]
	}
	return 0
}

func (c *cursor) uint32() uint32 {
	if b := c.take(4); !c.bad {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (c *cursor) uvarint() uint64 {
	v, n := binary.Uvarint(c.data)
	if n <= 0 {
		c.bad = true
		return 0
	}
	c.data = c.data[n:]
	return v
}

// text reads a number, and then this number of bytes.
func (c *cursor) text() []byte { return c.take(c.uvarint()) }
