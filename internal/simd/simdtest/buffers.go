package simdtest

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// Seed seeds NewRand.
const Seed = 20240613

// NewRand returns the same random numbers every time.
func NewRand() *rand.Rand {
	return rand.New(rand.NewPCG(Seed, Seed))
}

// Special returns the bit patterns with special arithmetic.
func Special(k dtype.DType) []uint64 {
	top := uint64(1) << (8*k.Size() - 1)
	patterns := []uint64{0, 1, top, top - 1, top | 1, 2*top - 1}
	if !k.IsFloat() {
		return patterns
	}
	nan := QuietNaN(k)
	infinity := nan &^ (nan & -nan)
	return append(patterns, nan, nan|top, nan|5, infinity|1, infinity, infinity|top, infinity-1,
		Encode(k, 1), Encode(k, -1), Encode(k, 1.5))
}

// specials are the special values of all types.
var specials = sync.OnceValue(func() map[dtype.DType][]uint64 {
	all := map[dtype.DType][]uint64{}
	for _, k := range dtype.All() {
		all[k] = Special(k)
	}
	return all
})

// Element returns random bits of one element. Half of the floats are of moderate size, so that not all results
// overflow.
func Element(r *rand.Rand, k dtype.DType) uint64 {
	switch choice := r.IntN(8); {
	case choice == 0:
		special := specials()[k]
		return special[r.IntN(len(special))]
	case choice < 6 && k.IsFloat():
		return Encode(k, math.Round(r.NormFloat64()*4096)/1024)
	}
	return r.Uint64() >> (64 - 8*k.Size())
}

// Guarded is a buffer of elements between bytes that must not be written.
type Guarded struct {
	memory []byte
	Bytes  []byte // the elements
	start  int
}

const guardByte, guardLen = 0xa5, 64

// NewGuarded makes a buffer of bytes that starts shift bytes past a multiple of 64.
func NewGuarded(bytes, shift int) Guarded {
	memory := make([]byte, 2*guardLen+64+bytes)
	for i := range memory {
		memory[i] = guardByte
	}
	start := guardLen + int(-hostmem.Addr(memory[guardLen:])%64) + shift
	return Guarded{
		memory: memory,
		Bytes:  memory[start : start+bytes : start+bytes],
		start:  start,
	}
}

// Addr is the address of the elements.
func (g Guarded) Addr() uintptr {
	return hostmem.Addr(g.memory) + uintptr(g.start)
}

// RequireIntact fails the test if anything outside the elements was written.
func (g Guarded) RequireIntact(t *testing.T, msg ...any) {
	t.Helper()
	outside := append(slices.Clone(g.memory[:g.start]), g.memory[g.start+len(g.Bytes):]...)
	for _, b := range outside {
		if b != guardByte {
			require.Fail(t, "wrote outside of the buffer", msg...)
		}
	}
}
