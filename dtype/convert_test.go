package dtype_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/x448/float16"

	"github.com/tutti-go/tutti/dtype"
)

// format describes a narrow float independently of the code under test.
type format struct {
	dt        dtype.DType
	exp, man  int
	infinity  bool // the top exponent is infinity and NaN; else NaN is all ones
	saturates bool
}

var formats = []format{
	{dt: dtype.F16, exp: 5, man: 10, infinity: true},
	{dt: dtype.BF16, exp: 8, man: 7, infinity: true},
	{dt: dtype.FP8E4M3, exp: 4, man: 3, saturates: true},
	{dt: dtype.FP8E5M2, exp: 5, man: 2, infinity: true, saturates: true},
}

func (f format) bits() int { return 1 + f.exp + f.man }

// value decodes by the definition: (-1)^s * 1.m * 2^(e-bias), or 0.m * 2^(1-bias).
func (f format) value(bits int) float64 {
	m := bits & (1<<f.man - 1)
	e := bits >> f.man & (1<<f.exp - 1)
	sign := 1.0
	if bits>>(f.exp+f.man) != 0 {
		sign = -1
	}
	bias := 1<<(f.exp-1) - 1
	top := 1<<f.exp - 1
	switch {
	case e == top && f.infinity && m == 0:
		return math.Inf(int(sign))
	case e == top && (f.infinity || m == 1<<f.man-1):
		return math.NaN()
	case e == 0:
		return math.Copysign(math.Ldexp(float64(m), 1-bias-f.man), sign)
	}
	return sign * math.Ldexp(1+float64(m)/float64(int(1)<<f.man), e-bias)
}

// toFloat32 runs the bulk conversion on one element. It and what else is called
// for every pattern do without require and Helper, which would take most of the
// time.
func toFloat32(t *testing.T, d dtype.DType, bits uint64) float32 {
	var dst [1]float32
	var src [8]byte
	binary.NativeEndian.PutUint64(src[:], bits)
	if err := dtype.ToFloat32(dst[:], src[:d.Size()], d); err != nil {
		t.Fatal(err)
	}
	return dst[0]
}

func fromFloat32(t *testing.T, d dtype.DType, v float32) uint64 {
	var dst [8]byte
	if err := dtype.FromFloat32(dst[:d.Size()], d, []float32{v}); err != nil {
		t.Fatal(err)
	}
	return binary.NativeEndian.Uint64(dst[:])
}

// sameFloat reports equality of bits, where all NaNs are one.
func sameFloat(a, b float64) bool {
	return math.Float64bits(a) == math.Float64bits(b) || a != a && b != b
}

// Every bit pattern decodes to what the format's definition says, by the
// element and in bulk, and encodes back to itself.
func TestEveryPatternDecodes(t *testing.T) {
	for _, f := range formats {
		t.Run(f.dt.String(), func(t *testing.T) {
			for bits := range 1 << f.bits() {
				want := f.value(bits)
				got, err := dtype.ToFloat64(f.dt, uint64(bits))
				if err != nil {
					t.Fatal(err)
				}
				if !sameFloat(want, got) {
					t.Fatalf("%#x: got %v, want %v", bits, got, want)
				}
				if bulk := toFloat32(t, f.dt, uint64(bits)); !sameFloat(want, float64(bulk)) {
					t.Fatalf("%#x in bulk: got %v, want %v", bits, bulk, want)
				}
				f.checkEncodes(t, float32(want), bits)
			}
		})
	}
}

// checkEncodes checks that v, which the pattern bits decodes to, encodes to it.
func (f format) checkEncodes(t *testing.T, v float32, bits int) {
	encoded := int(fromFloat32(t, f.dt, v))
	switch {
	case v != v:
		if f.value(encoded) == f.value(encoded) {
			t.Fatalf("%#x: NaN became %v", bits, f.value(encoded))
		}
	case math.IsInf(float64(v), 0) && f.saturates:
		if want := math.Copysign(limitsOf[f.dt].max, float64(v)); f.value(encoded) != want {
			t.Fatalf("%#x: infinity became %v, not %v", bits, f.value(encoded), want)
		}
	case encoded != bits:
		t.Fatalf("%#x = %v encodes to %#x", bits, v, encoded)
	}
}

// Between each pair of neighbouring numbers, everything below the middle
// rounds down, everything above it up, and the middle to the even pattern.
// This proves rounding for every input, because rounding is monotonic there.
func TestRoundsToNearestEven(t *testing.T) {
	for _, f := range formats {
		t.Run(f.dt.String(), func(t *testing.T) {
			for bits := 0; ; bits++ {
				low, high := f.value(bits), f.value(bits+1)
				if high != high || math.IsInf(high, 0) {
					f.checkOverflow(t, bits)
					break
				}
				middle := (low + high) / 2
				even := bits + bits&1
				f.checkRounds(t, middle, even)
				f.checkRounds(t, math.Nextafter(middle, 0), bits)
				f.checkRounds(t, math.Nextafter(middle, math.Inf(1)), bits+1)
				f.checkRounds(t, math.Nextafter(low, math.Inf(1)), bits)
				f.checkRounds(t, math.Nextafter(high, 0), bits+1)
				// The neighbours of the middle in float32 go through bulk too.
				f.checkRounds(t, float64(math.Nextafter32(float32(middle), 0)), bits)
				f.checkRounds(t, float64(math.Nextafter32(float32(middle), float32(math.Inf(1)))), bits+1)
			}
		})
	}
}

// checkRounds checks the rounding of v and -v, directly and, if v is a
// float32, in bulk.
func (f format) checkRounds(t *testing.T, v float64, want int) {
	sign := 1 << (f.bits() - 1)
	for _, c := range []struct {
		v    float64
		want int
	}{{v, want}, {-v, want | sign}} {
		got, err := dtype.FromFloat64(f.dt, c.v)
		if err != nil {
			t.Fatal(err)
		}
		if int(got) != c.want {
			t.Fatalf("%v rounds to %#x = %v, want %#x = %v", c.v, got, f.value(int(got)), c.want, f.value(c.want))
		}
		if narrow := float32(c.v); float64(narrow) == c.v {
			if got := int(fromFloat32(t, f.dt, narrow)); got != c.want {
				t.Fatalf("%v rounds to %#x in bulk, want %#x", c.v, got, c.want)
			}
		}
	}
}

// checkOverflow checks numbers around and beyond the largest one: the middle
// between it and the next power-of-two step that the format would have.
func (f format) checkOverflow(t *testing.T, largest int) {
	t.Helper()
	max, before := f.value(largest), f.value(largest-1)
	middle := max + (max-before)/2
	beyond := largest
	if !f.saturates {
		beyond = largest + 1
		require.True(t, math.IsInf(f.value(beyond), 1))
	}
	f.checkRounds(t, math.Nextafter(middle, 0), largest)
	for _, v := range []float64{middle, math.Nextafter(middle, math.Inf(1)), 2 * max, math.MaxFloat64, math.Inf(1)} {
		f.checkRounds(t, v, beyond)
	}
}

func TestScalarTypes(t *testing.T) {
	for bits := range 1 << 16 {
		if got, want := dtype.BFloat16(bits).Float32(), formats[1].value(bits); !sameFloat(float64(got), want) {
			t.Fatalf("BFloat16 %#x: got %v, want %v", bits, got, want)
		}
	}
	for bits := range 1 << 8 {
		if got, want := dtype.Float8E4M3(bits).Float32(), formats[2].value(bits); !sameFloat(float64(got), want) {
			t.Fatalf("Float8E4M3 %#x: got %v, want %v", bits, got, want)
		}
		if got, want := dtype.Float8E5M2(bits).Float32(), formats[3].value(bits); !sameFloat(float64(got), want) {
			t.Fatalf("Float8E5M2 %#x: got %v, want %v", bits, got, want)
		}
	}
	assert.Equal(t, dtype.BFloat16(0x3f80), dtype.Round[dtype.BFloat16](1))
	assert.Equal(t, dtype.Float8E4M3(0x7e), dtype.Round[dtype.Float8E4M3](1000))
	assert.Equal(t, dtype.Float8E5M2(0xfb), dtype.Round[dtype.Float8E5M2](float32(math.Inf(-1))))
}

// The independent implementation of x448/float16 agrees on all it decodes and
// on a large sample of what it encodes.
func TestFloat16AgreesWithX448(t *testing.T) {
	for bits := range 1 << 16 {
		want := float16.Frombits(uint16(bits)).Float32()
		if got := toFloat32(t, dtype.F16, uint64(bits)); !sameFloat(float64(got), float64(want)) {
			t.Fatalf("%#x: got %v, want %v", bits, got, want)
		}
	}
	const seed = 1
	rng := rand.New(rand.NewPCG(seed, 0))
	src := make([]float32, 1<<20)
	for i := range src {
		src[i] = math.Float32frombits(rng.Uint32())
		if i%2 == 0 { // most random patterns over- or underflow; aim half of them
			src[i] = float32(rng.NormFloat64() * math.Exp2(float64(rng.IntN(40)-24)))
		}
	}
	dst := make([]byte, 2*len(src))
	require.NoError(t, dtype.FromFloat32(dst, dtype.F16, src))
	for i, v := range src {
		got := float16.Frombits(binary.NativeEndian.Uint16(dst[2*i:]))
		if want := float16.Fromfloat32(v); got != want && !(got.IsNaN() && want.IsNaN()) {
			t.Fatalf("seed %d: %v: got %#x, want %#x", seed, v, got, want)
		}
	}
}

// Integers: every limit, tie and special number, against arbitrary precision.
func TestIntegersRoundAndSaturate(t *testing.T) {
	for _, d := range dtype.All() {
		if d.IsFloat() || d == dtype.Bool {
			continue
		}
		values := []float64{0, math.Copysign(0, -1), .5, 1.5, 2.5, -.5, -1.5, 126.5, 127.5, 255.5, 0x1p31 - .5, 0x1p53 - 1,
			0x1p63, 0x1p64, math.Inf(1), math.NaN(), math.SmallestNonzeroFloat64}
		for exp := range 66 {
			p := math.Ldexp(1, exp)
			values = append(values, p, p-1, p-.5, p+.5, math.Nextafter(p, 0), math.Nextafter(p, math.Inf(1)))
		}
		for _, v := range values {
			for _, v := range []float64{v, -v} {
				got, err := dtype.FromFloat64(d, v)
				require.NoError(t, err)
				want := wantInt(d, v)
				require.Equal(t, want, got, "%v of %v", d, v)
				narrow := float32(v)
				require.Equal(t, wantInt(d, float64(narrow)), fromFloat32(t, d, narrow), "%v of float32 %v", d, narrow)
			}
		}
	}
}

// wantInt is the reference conversion, in arbitrary precision.
func wantInt(d dtype.DType, v float64) uint64 {
	if v != v {
		return 0
	}
	bits := uint(8 * d.Size())
	lowest, highest := big.NewInt(0), new(big.Int).Lsh(big.NewInt(1), bits)
	if d.IsSigned() {
		highest.Rsh(highest, 1)
		lowest.Neg(highest)
	}
	highest.Sub(highest, big.NewInt(1))
	var n *big.Int
	switch {
	case math.IsInf(v, 1):
		n = highest
	case math.IsInf(v, -1):
		n = lowest
	default:
		n = roundBig(v)
		if n.Cmp(highest) > 0 {
			n = highest
		}
		if n.Cmp(lowest) < 0 {
			n = lowest
		}
	}
	mask := new(big.Int).Sub(new(big.Int).Lsh(big.NewInt(1), bits), big.NewInt(1))
	return new(big.Int).And(n, mask).Uint64()
}

// roundBig rounds to nearest, ties to even: floor(v), and one more if what is
// left is above a half, or is a half and the floor is odd.
func roundBig(v float64) *big.Int {
	r := new(big.Rat).SetFloat64(v)
	floor := new(big.Int).Div(r.Num(), r.Denom()) // Euclidean, and Denom > 0
	rest := new(big.Rat).Sub(r, new(big.Rat).SetInt(floor))
	if c := rest.Cmp(big.NewRat(1, 2)); c > 0 || c == 0 && floor.Bit(0) == 1 {
		floor.Add(floor, big.NewInt(1))
	}
	return floor
}

// Wide integers and F64 reach float32 with a single rounding.
func TestWideToFloat32(t *testing.T) {
	const seed = 2
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 20000 {
		bits := rng.Uint64() >> rng.IntN(64)
		for _, d := range []dtype.DType{dtype.I64, dtype.U64, dtype.I32, dtype.U32, dtype.I16, dtype.U16, dtype.I8, dtype.U8} {
			n := new(big.Int).SetUint64(bits & (1<<(8*d.Size()-1)<<1 - 1))
			if top := 8*d.Size() - 1; d.IsSigned() && n.Bit(top) == 1 {
				n.Sub(n, new(big.Int).Lsh(big.NewInt(1), uint(top)+1))
			}
			want, _ := new(big.Float).SetInt(n).Float32()
			if got := toFloat32(t, d, bits); got != want {
				t.Fatalf("seed %d: %v of %v: got %v, want %v", seed, d, n, got, want)
			}
		}
		v := math.Float64frombits(rng.Uint64())
		if got, want := toFloat32(t, dtype.F64, math.Float64bits(v)), float32(v); !sameFloat(float64(got), float64(want)) {
			t.Fatalf("seed %d: f64 %v: got %v, want %v", seed, v, got, want)
		}
	}
}

func TestBool(t *testing.T) {
	for b := range 256 {
		want := min(1, float64(b))
		assert.Equal(t, float32(want), toFloat32(t, dtype.Bool, uint64(b)))
		got, err := dtype.ToFloat64(dtype.Bool, uint64(b))
		require.NoError(t, err)
		assert.Equal(t, want, got)
	}
	for v, want := range map[float32]uint64{0: 0, 1: 1, -.25: 1, 300: 1, math.SmallestNonzeroFloat32: 1, float32(math.Inf(1)): 1} {
		assert.Equal(t, want, fromFloat32(t, dtype.Bool, v), v)
	}
	assert.Equal(t, uint64(0), fromFloat32(t, dtype.Bool, float32(math.Copysign(0, -1))))
	assert.Equal(t, uint64(1), fromFloat32(t, dtype.Bool, float32(math.NaN())))
}

// The bulk conversions agree with the conversions of single elements at every
// length and at addresses of any alignment.
func TestBulkAgreesWithScalar(t *testing.T) {
	const seed = 3
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, d := range dtype.All() {
		for n := range 70 {
			for offset := range 3 {
				name := fmt.Sprintf("seed %d: %d of %v at offset %d", seed, n, d, offset)
				bytes := make([]byte, offset+n*d.Size()+1)[offset : offset+n*d.Size()]
				values := make([]float32, n)
				for i := range values {
					values[i] = float32(rng.NormFloat64() * math.Exp2(float64(rng.IntN(40)-20)))
				}
				require.NoError(t, dtype.FromFloat32(bytes, d, values))
				back := make([]float32, n)
				require.NoError(t, dtype.ToFloat32(back, bytes, d))
				for i, v := range values {
					want := roundTrip(t, d, float64(v))
					require.Equal(t, float32(want), back[i], "%s: element %d = %v", name, i, v)
				}
			}
		}
	}
}

func TestConvertChecksLengths(t *testing.T) {
	for _, d := range dtype.All() {
		size := d.Size()
		for _, bytes := range []int{0, size, 3*size + 1, 4 * size} {
			assert.Error(t, dtype.ToFloat32(make([]float32, 3), make([]byte, bytes), d), "%v %d", d, bytes)
			assert.Error(t, dtype.FromFloat32(make([]byte, bytes), d, make([]float32, 3)), "%v %d", d, bytes)
		}
		assert.NoError(t, dtype.ToFloat32(nil, nil, d))
		assert.NoError(t, dtype.FromFloat32(nil, d, nil))
	}
}

// Converting to a narrow float and back must end at a nearest number: no other
// pattern of the format may be closer.
func FuzzConvert(f *testing.F) {
	for _, v := range []float64{0, 1, -464, 65519.99, 1e-8, math.MaxFloat32, math.Inf(1), math.NaN()} {
		for _, d := range dtype.All() {
			f.Add(uint8(d), v)
		}
	}
	f.Fuzz(func(t *testing.T, kind uint8, v float64) {
		d := dtype.DType(kind)
		bits, err := dtype.FromFloat64(d, v)
		if (err == nil) != d.Valid() {
			t.Fatalf("FromFloat64(%v, %v): %v", d, v, err)
		}
		if err != nil || !d.IsFloat() {
			return
		}
		got, err := dtype.ToFloat64(d, bits)
		require.NoError(t, err)
		if v != v {
			require.True(t, got != got, "%v: NaN became %v", d, got)
			return
		}
		if math.IsInf(got, 0) || math.Abs(v) > limitsOf[d].max {
			require.GreaterOrEqual(t, math.Abs(v), limitsOf[d].max, "%v: %v became %v", d, v, got)
			return
		}
		for _, neighbour := range []uint64{bits - 1, bits + 1} {
			other, err := dtype.ToFloat64(d, neighbour&(1<<(8*d.Size()-1)<<1-1))
			require.NoError(t, err)
			if math.Abs(other-v) < math.Abs(got-v) {
				t.Fatalf("%v: %v became %v although %v is nearer", d, v, got, other)
			}
		}
	})
}

func BenchmarkConvert(b *testing.B) {
	const n = 1 << 16
	wide := make([]float32, n)
	rng := rand.New(rand.NewPCG(4, 0))
	for i := range wide {
		wide[i] = float32(rng.NormFloat64())
	}
	for _, d := range dtype.All() {
		narrow := make([]byte, n*d.Size())
		b.Run("from_f32/"+d.String(), func(b *testing.B) {
			b.SetBytes(4 * n)
			b.ReportAllocs()
			for b.Loop() {
				_ = dtype.FromFloat32(narrow, d, wide)
			}
		})
		b.Run("to_f32/"+d.String(), func(b *testing.B) {
			b.SetBytes(4 * n)
			b.ReportAllocs()
			for b.Loop() {
				_ = dtype.ToFloat32(wide, narrow, d)
			}
		})
	}
}
