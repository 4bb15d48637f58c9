package dtype_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/x448/float16"

	"github.com/tutti-go/tutti/dtype"
)

// The types of other libraries, and some that look like them.
type (
	theirHalf  uint16
	theirBrain uint16
	theirE4M3  uint8
	theirE5M2  uint8
	pointed    uint16 // its method has a pointer as receiver
	identifier uint16
	octet      uint8
	fixed      uint16 // 8.8 bits
)

func (f theirHalf) Float32() float32  { return float16.Frombits(uint16(f)).Float32() }
func (f theirBrain) Float32() float32 { return math.Float32frombits(uint32(f) << 16) }
func (f theirE4M3) Float32() float32  { return dtype.Float8E4M3(f).Float32() }
func (f theirE5M2) Float32() float32  { return dtype.Float8E5M2(f).Float32() }
func (f *pointed) Float32() float32   { return theirBrain(*f).Float32() }
func (f fixed) Float32() float32      { return float32(f) / 256 }

func TestFloatsOfOtherLibraries(t *testing.T) {
	assert.Equal(t, dtype.F16, dtype.Of[theirHalf]())
	assert.Equal(t, dtype.BF16, dtype.Of[theirBrain]())
	assert.Equal(t, dtype.BF16, dtype.Of[pointed]())
	assert.Equal(t, dtype.FP8E4M3, dtype.Of[theirE4M3]())
	assert.Equal(t, dtype.FP8E5M2, dtype.Of[theirE5M2]())
}

func TestIntegersAreNotTakenForFloats(t *testing.T) {
	assert.Equal(t, dtype.U16, dtype.Of[uint16]())
	assert.Equal(t, dtype.U8, dtype.Of[uint8]())
	for name, got := range map[string]dtype.DType{
		"named uint16":               dtype.Of[identifier](),
		"named uint8":                dtype.Of[octet](),
		"another reading of 16 bits": dtype.Of[fixed](),
	} {
		assert.Equal(t, dtype.Invalid, got, name)
	}
}
