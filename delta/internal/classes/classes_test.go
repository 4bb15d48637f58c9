package classes

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/simd/simdtest"
)

// contents are arrays of n elements of size bytes, of few classes, of many, and of one.
func contents(rng *rand.Rand, n, size int) map[string][]byte {
	all := map[string][]byte{}
	fill := func(name string, element func(i int) uint64) {
		var data []byte
		for i := range n {
			bits := element(i)
			for k := range size {
				data = append(data, byte(bits>>(8*k)))
			}
		}
		all[name] = data
	}
	fill("random", func(int) uint64 { return rng.Uint64() })
	fill("normal", func(int) uint64 { // the exponents are the upper bits of each size
		return uint64(math.Float32bits(float32(rng.NormFloat64()))) << 32 >> (64 - 8*size)
	})
	fill("same", func(int) uint64 { return math.MaxUint64 })
	fill("zeros between", func(i int) uint64 { return uint64(i%3) * rng.Uint64() })
	fill("33 classes", func(i int) uint64 { return uint64(i%33) << 56 >> (65 - 8*size) })
	return all
}

// class is the definition: the eight bits behind the sign, with a zero if there are seven.
func class(element []byte) uint8 {
	var word [8]byte
	copy(word[8-len(element):], element)
	return uint8(binary.LittleEndian.Uint64(word[:]) << 1 >> 56)
}

// TestUnsort sorts elements by class, and finds some of them by their places.
func TestUnsort(t *testing.T) {
	simdtest.EachPath(t, func(t *testing.T) {
		rng := simdtest.NewRand()
		var x Index
		for _, size := range []int{1, 2, 4, 8} {
			for _, n := range []int{0, 1, 7, 31, 32, 33, 255, 256, 257, 511, 512, 1000, 5001} {
				for name, data := range contents(rng, n, size) {
					where := fmt.Sprintf("%s, %d elements of %d bytes, seed %d", name, n, size, simdtest.Seed)
					x.Reset(data, size)
					sorted := make([]int32, n) // positions in the order of classes
					for i := range sorted {
						sorted[i] = int32(i)
						require.Equal(t, class(data[i*size:(i+1)*size]), x.Classes[i], where)
					}
					slices.SortStableFunc(sorted, func(a, b int32) int {
						return int(x.Classes[a]) - int(x.Classes[b])
					})
					for c, start := range x.Starts {
						lower := 0
						for _, k := range x.Classes {
							if int(k) < c {
								lower++
							}
						}
						require.EqualValues(t, lower, start, where)
					}
					for _, share := range []float64{0, 0.01, 0.3, 1} {
						var places []int32
						want := map[int32]int32{} // entries by position
						for place, position := range sorted {
							if rng.Float64() < share {
								want[position] = int32(len(places))
								places = append(places, int32(place))
							}
						}
						positions := make([]int32, len(places))
						entries := make([]int32, len(places))
						x.Unsort(positions, entries, places)
						require.True(t, slices.IsSorted(positions), where)
						got := map[int32]int32{}
						for i, position := range positions {
							got[position] = entries[i]
						}
						require.Equal(t, want, got, where)
					}
				}
			}
		}
	})
}

// BenchmarkUnsort finds 1 % of a block of bf16, of which small elements are likelier.
func BenchmarkUnsort(b *testing.B) {
	const n = 1 << 20
	rng := simdtest.NewRand()
	data := make([]byte, 2*n)
	for i := range n {
		binary.LittleEndian.PutUint16(data[2*i:], uint16(math.Float32bits(float32(rng.NormFloat64()))>>16))
	}
	var places []int32
	for place := range int32(n) {
		if rng.Float64() < 0.05*math.Exp(-5*float64(place)/n) {
			places = append(places, place)
		}
	}
	var x Index
	positions := make([]int32, len(places))
	entries := make([]int32, len(places))
	perPlace := func(b *testing.B) {
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(places)), "ns/place")
	}
	b.Run("reset", func(b *testing.B) {
		for b.Loop() {
			x.Reset(data, 2)
		}
		perPlace(b)
	})
	b.Run("unsort", func(b *testing.B) {
		x.Reset(data, 2)
		for b.Loop() {
			x.Unsort(positions, entries, places)
		}
		perPlace(b)
	})
}
