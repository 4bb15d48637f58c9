package state

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
)

var kind = Kind{Name: "tutti-test", Version: 3, Owner: "a test"}

// whole is a state with a field of each type.
func whole() []byte {
	e := NewEncoder(kind, 64)
	e.Uint8(200)
	e.Uint32(math.MaxUint32)
	e.Uint64(math.MaxUint64)
	e.Int(math.MaxInt)
	e.Bool(true)
	e.Float32(float32(math.Inf(-1)))
	e.Float64(0.1)
	e.Bytes([]byte("bytes"))
	copy(e.Extend(4), "more")
	return e.Seal()
}

// fields reads those of whole.
func fields(d *Decoder) (all []any) {
	return []any{d.Uint8(), d.Uint32(), d.Uint64(), d.Int(math.MaxInt), d.Bool(), d.Float32(), d.Float64(), string(d.Bytes()), string(d.Bytes())}
}

func TestFields(t *testing.T) {
	d := NewDecoder(kind, whole())
	want := []any{uint8(200), uint32(math.MaxUint32), uint64(math.MaxUint64), math.MaxInt, true, float32(math.Inf(-1)), 0.1, "bytes", "more"}
	assert.Equal(t, want, fields(d))
	require.NoError(t, d.End())
	assert.Zero(t, d.Uint8(), "behind the end")
	assert.ErrorIs(t, d.Err(), comm.ErrArgument)
}

// TestDamage: a byte more, a byte less and another bit anywhere are errors, and so is another kind or version.
func TestDamage(t *testing.T) {
	state := whole()
	refused := func(state []byte) {
		t.Helper()
		d := NewDecoder(kind, state)
		assert.ErrorIs(t, d.Err(), comm.ErrArgument)
		assert.Zero(t, d.Uint64())
		assert.Nil(t, d.Bytes())
	}
	for n := range state {
		refused(state[:n])
	}
	refused(append(whole(), 0))
	for bit := range 8 * len(state) {
		damaged := whole()
		damaged[bit/8] ^= 1 << (bit % 8)
		refused(damaged)
	}
	later := kind
	later.Version++
	assert.ErrorContains(t, NewDecoder(later, state).Err(), "version 3, want 4")
	assert.ErrorContains(t, NewDecoder(Kind{Name: "tutti-another", Owner: "another"}, state).Err(), "no state of another")
}

// seal makes a state of any fields.
func seal(fields []byte) []byte {
	e := NewEncoder(kind, len(fields))
	e.state = append(e.state, fields...)
	return e.Seal()
}

// TestForgedLengths: a length that is more than there is takes no memory, and is an error.
func TestForgedLengths(t *testing.T) {
	for _, length := range []uint64{1, 1 << 31, 1 << 40, math.MaxInt64, 1 << 63, math.MaxUint64} {
		d := NewDecoder(kind, seal(binary.LittleEndian.AppendUint64(nil, length)))
		assert.Nil(t, d.Bytes(), "%d", length)
		assert.ErrorIs(t, d.Err(), comm.ErrArgument, "%d", length)
	}
	d := NewDecoder(kind, seal([]byte{2}))
	assert.False(t, d.Bool())
	assert.ErrorIs(t, d.Err(), comm.ErrArgument)
	d = NewDecoder(kind, seal([]byte{1, 0}))
	assert.True(t, d.Bool())
	assert.ErrorIs(t, d.End(), comm.ErrArgument, "a byte is left")
}

// TestFirstError: the first error stays.
func TestFirstError(t *testing.T) {
	mine := errors.New("of the caller")
	d := NewDecoder(kind, whole())
	d.Fail(mine)
	d.Damaged("nothing")
	assert.Equal(t, make([]any, 9), replaceZeros(fields(d)))
	assert.Equal(t, mine, d.End())
}

// replaceZeros makes zeros of any type nil.
func replaceZeros(all []any) []any {
	for i, x := range all {
		if assert.ObjectsAreEqual(x, zeroLike(x)) {
			all[i] = nil
		}
	}
	return all
}

func zeroLike(x any) any {
	switch x.(type) {
	case uint8:
		return uint8(0)
	case uint32:
		return uint32(0)
	case uint64:
		return uint64(0)
	case int:
		return 0
	case bool:
		return false
	case float32:
		return float32(0)
	case float64:
		return float64(0)
	}
	return ""
}

// FuzzDecoder reads fields of any bytes, in an order that other bytes say: it ends, and what it returns is what the bytes
// have, which encoded again are the same.
func FuzzDecoder(f *testing.F) {
	f.Add([]byte{}, []byte{0, 1, 2})
	f.Add([]byte{5, 0, 0, 0, 0, 0, 0, 0, 'b', 'y', 't', 'e', 's', 1}, []byte{6, 4})
	f.Fuzz(func(t *testing.T, bytes, order []byte) {
		state := seal(bytes)
		d := NewDecoder(kind, state)
		e := NewEncoder(kind, 0)
		for _, field := range order {
			switch field % 7 {
			case 0:
				e.Uint8(d.Uint8())
			case 1:
				e.Uint32(d.Uint32())
			case 2:
				e.Uint64(d.Uint64())
			case 3:
				e.Int(d.Int(1 << 40))
			case 4:
				e.Bool(d.Bool())
			case 5:
				e.Float64(math.Float64frombits(d.Uint64()))
			case 6:
				e.Bytes(d.Bytes())
			}
			if d.Err() != nil {
				assert.ErrorIs(t, d.Err(), comm.ErrArgument)
				return
			}
		}
		if d.End() == nil {
			assert.Equal(t, state, e.Seal())
		}
		foreign := NewDecoder(kind, bytes)
		if foreign.Err() == nil {
			sum := crc32.Checksum(bytes[:len(bytes)-checksumBytes], castagnoli)
			assert.Equal(t, sum, binary.LittleEndian.Uint32(bytes[len(bytes)-checksumBytes:]))
		}
	})
}
