// Package state encodes and decodes the states that packages save: a name and a version, fields, and a checksum.
//
// A state comes from a file or from another rank. A [Decoder] therefore checks each length against the remaining bytes
// before it uses it, and never copies or allocates: its results are parts of the state. Its first error sticks, as in
// a bufio.Reader; after it all fields are zero.
package state

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/tutti-go/tutti/comm"
)

// Kind identifies states.
type Kind struct {
	Name    string // beginning of the state, such as "tutti-sparse"
	Version uint8  // follows the name; states of other versions are refused
	Owner   string // for errors, such as "a Reducer"
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checksumBytes is the length of the CRC-32C at the end.
const checksumBytes = 4

// Encoder builds a state.
type Encoder struct {
	state []byte // encoded so far
}

// NewEncoder begins a state with capacity for the bytes of its fields.
func NewEncoder(k Kind, room int) *Encoder {
	state := make([]byte, 0, len(k.Name)+1+room+checksumBytes)
	state = append(state, k.Name...)
	return &Encoder{state: append(state, k.Version)}
}

// Uint8 appends a number.
func (e *Encoder) Uint8(x uint8) {
	e.state = append(e.state, x)
}

// Uint32 appends a number.
func (e *Encoder) Uint32(x uint32) {
	e.state = binary.LittleEndian.AppendUint32(e.state, x)
}

// Uint64 appends a number.
func (e *Encoder) Uint64(x uint64) {
	e.state = binary.LittleEndian.AppendUint64(e.state, x)
}

// Int appends a number that is not negative.
func (e *Encoder) Int(x int) {
	e.Uint64(uint64(x))
}

// Bool appends a truth value.
func (e *Encoder) Bool(x bool) {
	var bit uint8
	if x {
		bit = 1
	}
	e.Uint8(bit)
}

// Float32 appends the bits of a number.
func (e *Encoder) Float32(x float32) {
	e.Uint32(math.Float32bits(x))
}

// Float64 appends the bits of a number.
func (e *Encoder) Float64(x float64) {
	e.Uint64(math.Float64bits(x))
}

// Bytes appends a length and these bytes.
func (e *Encoder) Bytes(x []byte) {
	e.Int(len(x))
	e.state = append(e.state, x...)
}

// Extend appends a length and n bytes, which the caller writes before it appends anything else.
func (e *Encoder) Extend(n int) []byte {
	e.Int(n)
	end := len(e.state)
	e.state = append(e.state, make([]byte, n)...)
	return e.state[end:]
}

// Seal returns the state.
func (e *Encoder) Seal() []byte {
	return binary.LittleEndian.AppendUint32(e.state, crc32.Checksum(e.state, castagnoli))
}

// Decoder reads the fields of a state in their order.
type Decoder struct {
	fields []byte // that are not read
	err    error  // sticky
}

// NewDecoder checks that a state is whole, and of a kind and its version. If it is not, that is the Decoder's error.
func NewDecoder(k Kind, state []byte) *Decoder {
	start := len(k.Name) + 1
	end := len(state) - checksumBytes
	switch {
	case len(state) < start || string(state[:len(k.Name)]) != k.Name:
		return &Decoder{err: fmt.Errorf("%w: %d bytes that are no state of %s", comm.ErrArgument, len(state), k.Owner)}
	case state[start-1] != k.Version:
		return &Decoder{err: fmt.Errorf("%w: the state of %s has version %d, want %d",
			comm.ErrArgument, k.Owner, state[start-1], k.Version)}
	case end < start || crc32.Checksum(state[:end], castagnoli) != binary.LittleEndian.Uint32(state[end:]):
		return &Decoder{err: errDamaged}
	}
	return &Decoder{fields: state[start:end]}
}

var errDamaged = fmt.Errorf("%w: the state is damaged", comm.ErrArgument)

// take returns the next n bytes, and nil if there are fewer.
func (d *Decoder) take(n int) []byte {
	if d.err == nil && n > len(d.fields) {
		d.err = errDamaged
	}
	if d.err != nil {
		return nil
	}
	next := d.fields[:n:n]
	d.fields = d.fields[n:]
	return next
}

// Uint8 reads a number.
func (d *Decoder) Uint8() uint8 {
	next := d.take(1)
	if next == nil {
		return 0
	}
	return next[0]
}

// Uint32 reads a number.
func (d *Decoder) Uint32() uint32 {
	next := d.take(4)
	if next == nil {
		return 0
	}
	return binary.LittleEndian.Uint32(next)
}

// Uint64 reads a number.
func (d *Decoder) Uint64() uint64 {
	next := d.take(8)
	if next == nil {
		return 0
	}
	return binary.LittleEndian.Uint64(next)
}

// Int reads a number that is at most limit.
func (d *Decoder) Int(limit int) int {
	x := d.Uint64()
	if x > uint64(limit) {
		d.Damaged("%d is more than %d", x, limit)
		return 0
	}
	return int(x)
}

// Bool reads a truth value.
func (d *Decoder) Bool() bool {
	x := d.Uint8()
	if x > 1 {
		d.Damaged("%d is no truth value", x)
	}
	return x == 1
}

// Float32 reads the bits of a number.
func (d *Decoder) Float32() float32 {
	return math.Float32frombits(d.Uint32())
}

// Float64 reads the bits of a number.
func (d *Decoder) Float64() float64 {
	return math.Float64frombits(d.Uint64())
}

// Bytes reads what [Encoder.Bytes] or [Encoder.Extend] appended: a part of the state, not to be written.
func (d *Decoder) Bytes() []byte {
	return d.take(d.Int(len(d.fields)))
}

// Len returns how many bytes are not read.
func (d *Decoder) Len() int {
	return len(d.fields)
}

// Fail makes err the error, unless there was one.
func (d *Decoder) Fail(err error) {
	if d.err == nil {
		d.err = err
	}
}

// Damaged is Fail with [comm.ErrArgument] and a reason.
func (d *Decoder) Damaged(format string, args ...any) {
	d.Fail(fmt.Errorf("%w: %s", errDamaged, fmt.Sprintf(format, args...)))
}

// Err returns the error.
func (d *Decoder) Err() error { return d.err }

// End returns the error, which is one as well if not all fields were read.
func (d *Decoder) End() error {
	if len(d.fields) > 0 {
		d.Damaged("%d bytes are left", len(d.fields))
	}
	return d.err
}
