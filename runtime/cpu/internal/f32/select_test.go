package f32

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/simd/simdtest"
)

// selectInputs returns arrays of many lengths and kinds.
func selectInputs(rng *rand.Rand) map[string][]float32 {
	special := []float32{0, float32(math.Copysign(0, -1)), 1, -1, 1e-45, -1e-45, math.MaxFloat32,
		float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN()),
		math.Float32frombits(0xffffffff), math.Float32frombits(0x7f800001)}
	inputs := map[string][]float32{}
	for _, n := range []int{0, 1, 7, 15, 16, 31, 32, 33, 63, 64, 100, 255, 256, 257, 1000, 5000} {
		normal, mixed, equal := make([]float32, n), make([]float32, n), make([]float32, n)
		for i := range n {
			normal[i] = float32(rng.NormFloat64())
			mixed[i] = special[rng.IntN(len(special))]
			equal[i] = -2
		}
		inputs[fmt.Sprintf("normal %d", n)] = normal
		inputs[fmt.Sprintf("special %d", n)] = mixed
		inputs[fmt.Sprintf("equal %d", n)] = equal
	}
	return inputs
}

// keyRanges returns ranges [lo, hi] around the kinds of selectInputs.
func keyRanges() [][2]uint32 {
	one, two, inf := Key(1), Key(2), Key(float32(math.Inf(1)))
	return [][2]uint32{
		{0, MaxKey}, {0, 0}, {1, MaxKey}, {one, two}, {two, MaxKey}, {two, two},
		{two, one}, {inf, MaxKey}, {inf + 1, MaxKey}, {0, inf - 1}, {MaxKey, MaxKey}, {MaxKey + 1, MaxKey},
	}
}

func naiveSelect(x []float32, base int32, lo, hi uint32) (idx []int32, val []uint32) {
	for i, v := range x {
		if key := math.Float32bits(v) & 0x7fffffff; lo <= key && key <= hi {
			idx = append(idx, base+int32(i))
			val = append(val, math.Float32bits(v))
		}
	}
	return idx, val
}

func bitsOf(x []float32) (bits []uint32) {
	for _, v := range x {
		bits = append(bits, math.Float32bits(v))
	}
	return bits
}

func TestSelectRange(t *testing.T) { simdtest.EachPath(t, testSelectRange) }

func testSelectRange(t *testing.T) {
	const seed, base = 1, 1000
	for name, x := range selectInputs(rand.New(rand.NewPCG(seed, 0))) {
		for _, r := range keyRanges() {
			wantIdx, wantVal := naiveSelect(x, base, r[0], r[1])
			for _, room := range []int{0, 1, 31, 32, 33, len(wantIdx) - 1, len(wantIdx), len(wantIdx) + 40} {
				if room < 0 {
					continue
				}
				what := fmt.Sprintf("%s, keys %#x, room %d, seed %d", name, r, room, seed)
				idx, val := make([]int32, room), make([]float32, room)
				require.Equal(t, len(wantIdx), SelectRange(x, base, r[0], r[1], idx, val), what)
				n := min(room, len(wantIdx))
				require.True(t, slices.Equal(wantIdx[:n], idx[:n]), what)
				require.True(t, slices.Equal(wantVal[:n], bitsOf(val[:n])), what)

				left, want := slices.Clone(x), slices.Clone(x)
				for _, i := range wantIdx[:n] {
					want[i-base] = 0
				}
				clear(idx)
				clear(val)
				require.Equal(t, len(wantIdx), TakeRange(left, base, r[0], r[1], idx, val), what)
				require.True(t, slices.Equal(wantIdx[:n], idx[:n]), what)
				require.True(t, slices.Equal(wantVal[:n], bitsOf(val[:n])), what)
				require.True(t, slices.Equal(bitsOf(want), bitsOf(left)), what)
			}
		}
	}
}

// TestAddSelectRange expects what adding and SelectRange or TakeRange give, wherever
// the room ends.
func TestAddSelectRange(t *testing.T) { simdtest.EachPath(t, testAddSelectRange) }

func testAddSelectRange(t *testing.T) {
	const seed, base = 8, 1000
	rng := rand.New(rand.NewPCG(seed, 0))
	inputs := selectInputs(rng)
	inputs["long"] = make([]float32, 200_003)
	for name, before := range inputs {
		grad := make([]float32, len(before))
		for i := range grad {
			grad[i] = float32(rng.NormFloat64())
		}
		for _, factor := range []float32{1, -0.3} {
			sum := make([]float32, len(before))
			for i, v := range before {
				sum[i] = float32(float64(v) + float64(float32(float64(grad[i])*float64(factor))))
			}
			for _, r := range keyRanges() {
				wantIdx, _ := naiveSelect(sum, base, r[0], r[1])
				for i, room := range []int{0, 1, 40, len(wantIdx) / 2, len(wantIdx), len(wantIdx) + 40} {
					take, access := (i+len(before))%2 == 0, Access(rng.IntN(3))
					what := fmt.Sprintf("%s, keys %#x, room %d, take %v, access %d, seed %d", name, r, room, take, access, seed)
					// Aligned, and not.
					x, from := append(make([]float32, i%2), before...)[i%2:], before
					if room%2 == 0 { // in place
						from = x
					} else {
						clear(x)
					}
					idx, val := make([]int32, room+40), make([]float32, room+40)
					require.Equal(t, len(wantIdx), AddSelectRange(x, from, grad, factor, base, r[0], r[1], idx[:room], val[:room], take, access), what)
					n := min(room, len(wantIdx))
					require.True(t, slices.Equal(wantIdx[:n], idx[:n]), what)
					for j, i := range idx[:n] {
						if take {
							if math.Float32bits(x[i-base]) != 0 {
								t.Fatalf("%s: element %d is not taken", what, i-base)
							}
							x[i-base] = val[j]
						}
						if math.Float32bits(x[i-base]) != math.Float32bits(val[j]) {
							t.Fatalf("%s: value %d is %v, want %v", what, j, val[j], x[i-base])
						}
					}
					for i := range x {
						if math.Float32bits(x[i]) != math.Float32bits(sum[i]) && sum[i] == sum[i] {
							t.Fatalf("%s: sum %d is %v, want %v", what, i, x[i], sum[i])
						}
					}
					for j := room; j < len(idx); j++ {
						require.Zero(t, idx[j], what)
						require.Zero(t, val[j], what)
					}
				}
			}
		}
	}
}

func TestSelectRangeInPlace(t *testing.T) { simdtest.EachPath(t, testSelectInPlace) }

func testSelectInPlace(t *testing.T) {
	const seed = 2
	for name, x := range selectInputs(rand.New(rand.NewPCG(seed, 0))) {
		for _, r := range keyRanges() {
			_, want := naiveSelect(x, 0, r[0], r[1])
			val := append([]float32(nil), x...)
			n := SelectRange(val, 0, r[0], r[1], make([]int32, len(x)), val)
			require.True(t, slices.Equal(want, bitsOf(val[:n])), "%s, keys %#x, seed %d", name, r, seed)
		}
	}
}

// TestSelectRangePastCapacity checks that nothing behind idx and val is written.
func TestSelectRangePastCapacity(t *testing.T) { simdtest.EachPath(t, testSelectPastCapacity) }

func testSelectPastCapacity(t *testing.T) {
	x := make([]float32, 1000)
	for room := range 100 {
		idx, val := make([]int32, room+64), make([]float32, room+64)
		for i := range idx {
			idx[i], val[i] = -1, -1
		}
		require.Equal(t, len(x), SelectRange(x, 0, 0, MaxKey, idx[:room], val[:room]))
		for i := room; i < len(idx); i++ {
			require.Equal(t, int32(-1), idx[i], "room %d, index %d", room, i)
			require.Equal(t, float32(-1), val[i], "room %d, value %d", room, i)
		}
	}
}

func TestCountRange(t *testing.T) { simdtest.EachPath(t, testCountRange) }

func testCountRange(t *testing.T) {
	const seed = 3
	for name, x := range selectInputs(rand.New(rand.NewPCG(seed, 0))) {
		for _, r := range keyRanges() {
			want, _ := naiveSelect(x, 0, r[0], r[1])
			require.Equal(t, len(want), CountRange(x, r[0], r[1]), "%s, keys %#x, seed %d", name, r, seed)
		}
	}
}

// TestSelectLong goes through more elements than one call of a kernel handles.
func TestSelectLong(t *testing.T) { simdtest.EachPath(t, testSelectLong) }

func testSelectLong(t *testing.T) {
	const n, seed, base = 300_001, 7, 5
	rng := rand.New(rand.NewPCG(seed, 0))
	x, scaled := make([]float32, n), make([]float32, n)
	for i := range x {
		x[i] = rng.Float32()
	}
	lo := Key(0.9)
	wantIdx, wantVal := naiveSelect(x, base, lo, MaxKey)
	for _, room := range []int{20, 10_000, n} {
		idx, val := make([]int32, room), make([]float32, room)
		require.Equal(t, len(wantIdx), SelectRange(x, base, lo, MaxKey, idx, val), "room %d, seed %d", room, seed)
		m := min(room, len(wantIdx))
		require.True(t, slices.Equal(wantIdx[:m], idx[:m]), "room %d, seed %d", room, seed)
		require.True(t, slices.Equal(wantVal[:m], bitsOf(val[:m])), "room %d, seed %d", room, seed)
	}
	require.Equal(t, len(wantIdx), CountRange(x, lo, MaxKey), "seed %d", seed)
	Scale(scaled, x, 3)
	for i, v := range x {
		if scaled[i] != v*3 {
			t.Fatalf("element %d is %v, want %v, seed %d", i, scaled[i], v*3, seed)
		}
	}
}

// TestSums expects the same bits as the order of additions that Sum and
// SquaredDeviations promise gives, and checks that against an exact sum.
func TestSums(t *testing.T) { simdtest.EachPath(t, testSums) }

func testSums(t *testing.T) {
	const seed = 4
	rng := rand.New(rand.NewPCG(seed, 0))
	for n := range 200 {
		x := make([]float32, n)
		var partial [2][16]float64
		var plain, size [2]float64
		const center = 0.7
		for i := range x {
			x[i] = float32(rng.NormFloat64() * math.Exp(5*rng.NormFloat64()))
			deviation := float64(x[i]) - center
			square := deviation * deviation
			for j, term := range [2]float64{float64(x[i]), square} {
				partial[j][i%16] += term
				plain[j] += term
				size[j] += math.Abs(term)
			}
		}
		for j, got := range [2]float64{Sum(x), SquaredDeviations(x, center)} {
			p := partial[j]
			for _, half := range []int{8, 4, 2, 1} {
				for i := range half {
					p[i] += p[i+half]
				}
			}
			assert.Equal(t, p[0], got, "n %d, sum %d, seed %d", n, j, seed)
			assert.InDelta(t, plain[j], got, 1e-13*size[j], "n %d, sum %d, seed %d", n, j, seed)
		}
	}
	inf := float32(math.Inf(1))
	assert.Equal(t, math.Inf(1), Sum(append(make([]float32, 40), inf)))
	assert.True(t, math.IsNaN(Sum(append(make([]float32, 40), inf, -inf))))
	assert.Equal(t, math.Inf(1), SquaredDeviations(append([]float32{-inf}, make([]float32, 40)...), 0))
}

func TestScale(t *testing.T) { simdtest.EachPath(t, testScale) }

func testScale(t *testing.T) {
	const seed = 5
	for name, x := range selectInputs(rand.New(rand.NewPCG(seed, 0))) {
		for _, s := range []float32{0, -1, 0.1, 3e38} {
			src, dst := append([]float32(nil), x...), make([]float32, len(x)+1)
			dst[len(x)] = 42
			Scale(dst[:len(x)], src, s)
			require.Equal(t, float32(42), dst[len(x)], name)
			Scale(src, src, s)
			for i, v := range x {
				want := v * s
				for _, got := range [2]float32{dst[i], src[i]} {
					if want != want {
						require.True(t, got != got, "%s[%d] * %v is %v, seed %d", name, i, s, got, seed)
						continue
					}
					require.Equal(t, math.Float32bits(want), math.Float32bits(got), "%s[%d] * %v, seed %d", name, i, s, seed)
				}
			}
		}
	}
}
