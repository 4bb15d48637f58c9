package convert_test

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/convert"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/simd/simdtest"
)

// halfFormat is a 16-bit float with its conversions and where its NaNs are.
type halfFormat struct {
	name   string
	kind   dtype.DType
	widen  func(dst []float32, src []uint16)
	narrow func(dst []uint16, src []float32)
	// shift is the number of mantissa bits that float32 has more.
	shift int
}

var halfFormats = []halfFormat{
	{"f16", dtype.F16, convert.F16ToF32, convert.F32ToF16, 13},
	{"bf16", dtype.BF16, convert.BF16ToF32, convert.F32ToBF16, 16},
}

func eachFormat(t *testing.T, test func(t *testing.T, f halfFormat)) {
	simdtest.EachPath(t, func(t *testing.T) {
		for _, f := range halfFormats {
			t.Run(f.name, func(t *testing.T) { test(t, f) })
		}
	})
}

// refWiden returns the bits of the float32 of a pattern. NaNs keep sign and
// payload; those of binary16 become quiet.
func (f halfFormat) refWiden(bits uint16) uint32 {
	if !simdtest.IsNaN(f.kind, uint64(bits)) {
		return math.Float32bits(float32(simdtest.Decode(f.kind, uint64(bits))))
	}
	wide := uint32(bits>>15)<<31 | 0xff<<23 | uint32(bits)<<f.shift&(1<<23-1)
	if f.kind == dtype.F16 {
		wide |= 1 << 22
	}
	return wide
}

// refNarrow returns the pattern of a float32.
func (f halfFormat) refNarrow(v float32) uint16 {
	if v == v {
		return uint16(simdtest.Nearest(f.kind, float64(v)))
	}
	wide := math.Float32bits(v) | 1<<22
	payload := uint16(wide & (1<<23 - 1) >> f.shift)
	return uint16(wide>>31)<<15 | uint16(simdtest.QuietNaN(f.kind)) | payload
}

func TestWidenEveryPattern(t *testing.T) {
	eachFormat(t, func(t *testing.T, f halfFormat) {
		src, dst := make([]uint16, 1<<16), make([]float32, 1<<16)
		for i := range src {
			src[i] = uint16(i)
		}
		f.widen(dst, src)
		for i, v := range dst {
			if want := f.refWiden(src[i]); math.Float32bits(v) != want {
				require.Failf(t, "wrong", "%#04x: got %#08x, want %#08x", src[i], math.Float32bits(v), want)
			}
		}
	})
}

// narrowCases returns float32 values at, halfway between and next to all
// values of the format, and random patterns.
func (f halfFormat) narrowCases() []float32 {
	var cases []float32
	for bits := range 1 << 16 {
		at := f.refWiden(uint16(bits))
		half := uint32(1) << (f.shift - 1)
		for _, near := range []uint32{at, at + 1, at - 1, at + half, at + half + 1, at + half - 1} {
			cases = append(cases, math.Float32frombits(near))
		}
		if bits&0x7fff < 1<<10 {
			// Among the subnormals, half a step is a change of value, not of bits.
			step := float32(simdtest.Decode(f.kind, 1))
			half := math.Float32frombits(at) + step/2
			cases = append(cases, half, math.Nextafter32(half, 0), math.Nextafter32(half, 1))
		}
	}
	r := simdtest.NewRand()
	for range 1 << 16 {
		cases = append(cases, math.Float32frombits(r.Uint32()))
	}
	return cases
}

func TestNarrowRoundsToNearestEven(t *testing.T) {
	eachFormat(t, func(t *testing.T, f halfFormat) {
		src := f.narrowCases()
		dst := make([]uint16, len(src))
		f.narrow(dst, src)
		for i, got := range dst {
			if want := f.refNarrow(src[i]); got != want {
				require.Failf(t, "wrong", "seed %d: %g (%#08x): got %#04x, want %#04x",
					simdtest.Seed, src[i], math.Float32bits(src[i]), got, want)
			}
		}
	})
}

func TestConversionOfEveryLength(t *testing.T) {
	eachFormat(t, func(t *testing.T, f halfFormat) {
		r := simdtest.NewRand()
		for n := range 131 {
			narrow, wide := simdtest.NewGuarded(2*n, 2*r.IntN(32)), simdtest.NewGuarded(4*n, 4*r.IntN(16))
			halves := hostmem.Slice[uint16](narrow.Addr(), n)
			floats := hostmem.Slice[float32](wide.Addr(), n)
			for i := range halves {
				halves[i] = uint16(simdtest.Element(r, f.kind))
			}
			f.widen(floats, halves)
			wide.RequireIntact(t, "widening", n)
			want := make([]uint16, n)
			for i, v := range floats {
				require.Equal(t, f.refWiden(halves[i]), math.Float32bits(v), "seed %d: n=%d", simdtest.Seed, n)
				want[i] = f.refNarrow(v)
			}
			clear(halves)
			f.narrow(halves, floats)
			narrow.RequireIntact(t, "narrowing", n)
			for i := range want {
				require.Equal(t, want[i], halves[i], "seed %d: n=%d", simdtest.Seed, n)
			}
		}
	})
}

func TestConversionHandlesTheShorterLength(t *testing.T) {
	eachFormat(t, func(t *testing.T, f halfFormat) {
		one, halves := []float32{1, 1, 1}, make([]uint16, 5)
		f.narrow(halves, one)
		require.Equal(t, []uint16{halves[0], halves[0], halves[0], 0, 0}, halves)
		floats := make([]float32, 2)
		f.widen(floats, halves)
		require.Equal(t, []float32{1, 1}, floats)
	})
}

// FP8E4M3 saturates, and its NaNs keep their signs.
func TestE4M3RoundsToNearestEven(t *testing.T) {
	reference := func(v float32) uint8 {
		if v != v {
			return uint8(math.Float32bits(v)>>31)<<7 | 0x7f
		}
		return uint8(simdtest.Nearest(dtype.FP8E4M3, float64(v)))
	}
	simdtest.EachPath(t, func(t *testing.T) {
		src := append(halfFormats[0].narrowCases(), float32(math.Inf(1)), float32(math.Inf(-1)), 464, 465, -1e30)
		dst := make([]uint8, len(src))
		convert.F32ToE4M3(dst, src)
		for i, got := range dst {
			if want := reference(src[i]); got != want {
				require.Failf(t, "wrong", "seed %d: %g (%#08x): got %#02x, want %#02x", simdtest.Seed, src[i], math.Float32bits(src[i]), got, want)
			}
		}
		for n := range 131 {
			narrow := simdtest.NewGuarded(n, n%32)
			convert.F32ToE4M3(hostmem.Slice[uint8](narrow.Addr(), n), src[n:])
			narrow.RequireIntact(t, "narrowing", n)
			require.True(t, slices.Equal(dst[n:2*n], hostmem.Slice[uint8](narrow.Addr(), n)), "n=%d", n)
		}
	})
}
