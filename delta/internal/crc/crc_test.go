package crc

import (
	"hash/crc32"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/simd/simdtest"
)

// TestChange compares with the checksums of whole blocks, of all lengths around the windows, where the first, the last,
// some or many elements change.
func TestChange(t *testing.T) {
	table := crc32.MakeTable(crc32.Castagnoli)
	rng := simdtest.NewRand()
	known := 0
	for _, size := range []int{1, 2, 4, 8} {
		for _, elements := range []int{1, 2, 3, 31, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049, 4100, 9000, 70001} {
			for _, share := range []float64{0, 1e-4, 0.003, 0.02, 0.5} {
				old := make([]byte, elements*size)
				for i := range old {
					old[i] = byte(rng.Uint32())
				}
				now := slices.Clone(old)
				var idx []int32
				var bits []byte
				for i := range elements {
					ends := share == 1e-4 && (i == 0 || i == elements-1)
					if !ends && rng.Float64() >= share {
						continue
					}
					idx = append(idx, int32(i))
					for k := range size {
						flipped := byte(rng.Uint32())
						bits = append(bits, flipped)
						now[i*size+k] ^= flipped
					}
				}
				for _, outside := range []int32{int32(elements), math.MaxInt32, -1} {
					idx = append(idx, outside)
					bits = append(bits, make([]byte, size)...)
				}
				difference, ok := Change(idx, bits, size, len(old))
				if !ok {
					continue
				}
				known++
				require.Equal(t, crc32.Checksum(now, table), crc32.Checksum(old, table)^difference,
					"%d elements of %d bytes, %d changes, seed %d", elements, size, len(idx), simdtest.Seed)
			}
		}
	}
	if _, ok := change([]int32{0}, []byte{1}, 1, 1); ok {
		assert.Greater(t, known, 150)
	}
}

// TestPowers: dividing by x reverses multiplying by it.
func TestPowers(t *testing.T) {
	rng := simdtest.NewRand()
	for range 1000 {
		a := rng.Uint32()
		require.Equal(t, a, overX(timesX(a)))
		require.Equal(t, a, timesX(overX(a)))
	}
}

func BenchmarkChange(b *testing.B) {
	const bytes = 2 << 20
	var idx []int32
	rng := simdtest.NewRand()
	for i := range int32(bytes / 2) {
		if rng.Float64() < 0.01 {
			idx = append(idx, i)
		}
	}
	bits := make([]byte, 2*len(idx))
	for b.Loop() {
		if _, ok := Change(idx, bits, 2, bytes); !ok {
			b.Skip("no instructions")
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(idx)), "ns/changed")
}
