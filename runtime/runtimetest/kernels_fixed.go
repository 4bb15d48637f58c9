package runtimetest

import (
	"bytes"
	"math"
	"math/big"
	"math/bits"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// fixedInputs returns the number of random inputs of a type that sums in fixed point are tried on.
func fixedInputs() int {
	switch {
	case testing.Short():
		return 40
	case extended:
		return 1000
	}
	return 240
}

// testFixed compares sums in fixed point with sums of big integers.
func testFixed(d *device) {
	inputs := fixedInputs()
	for _, dt := range gradientTypes {
		for i := range inputs {
			d.checkFixed(dt, i)
		}
	}
}

// fixedTerms draws terms of n elements, in their type: of any size, and with magnitudes that differ from block to block
// and from term to term. Some cancel out but for a little, where they are largest.
func (d *device) fixedTerms(n, terms int, dt dtype.DType) (values [][]float32, ptrs []uintptr) {
	special := d.rng.IntN(8) == 0
	cancels := d.coin()
	for range terms {
		x := make([]float32, n)
		scale := 0.0
		for i := range x {
			if i%d.blockAbout() == 0 {
				scale = draw(d, 1, math.Ldexp(1, d.rng.IntN(200)-100), 0, 1e-42, 1e38, largestOf(dt)/4)
			}
			x[i] = float32(d.rng.NormFloat64() * scale)
			if special && d.rng.IntN(60) == 0 {
				x[i] = draw(d, specialValues...)
			}
		}
		if len(values)%2 == 1 && cancels {
			for i, v := range values[len(values)-1] {
				x[i] = -v * float32(1+d.rng.IntN(2)*d.rng.IntN(2)*d.rng.IntN(2))
			}
		}
		v, ptr := d.narrow(x, dt)
		values = append(values, v)
		ptrs = append(ptrs, ptr)
	}
	return values, ptrs
}

// largestOf is the largest number of a type.
func largestOf(dt dtype.DType) float64 {
	switch dt {
	case dtype.F16:
		return 65504
	case dtype.BF16:
		return 0x1.fep127
	}
	return math.MaxFloat32
}

// blockAbout is the length of a run of elements of one magnitude.
func (d *device) blockAbout() int { return 1 + d.rng.IntN(2*kernel.FixedBlock) }

func (d *device) checkFixed(dt dtype.DType, input int) {
	n := 1 + d.rng.IntN(160)
	if input%40 == 0 {
		n = 5000
	}
	terms := 1 + d.rng.IntN(5)
	f := kernel.Fixed{N: n, Skip: d.rng.IntN(2) * d.rng.IntN(kernel.FixedBlock)}
	f.Bits = 31 - bits.Len(uint(terms)) - d.rng.IntN(8)
	values, ptrs := d.fixedTerms(n, terms, dt)

	exponents := make([]uint8, f.Blocks())
	for i := range n {
		for _, x := range values {
			e := &exponents[(f.Skip+i)/kernel.FixedBlock]
			*e = max(*e, uint8(math.Float32bits(x[i])>>23))
		}
	}
	f.Exponents = place(d, bytes.Repeat([]uint8{1 << 7}, f.Blocks()))
	f.Sums = place(d, make([]int32, n))
	k := d.kernels()
	for _, i := range d.rng.Perm(terms) {
		require.NoError(d, k.RaiseExponents(f, ptrs[i], dt))
	}
	for b, got := range read[uint8](d, f.Exponents, len(exponents)) {
		require.Equal(d, int(exponents[b])-128, int(int8(got)), "exponent of block %d, seed %d", b, Seed)
	}
	for turn, i := range d.rng.Perm(terms) {
		require.NoError(d, k.StoreFixed(f, ptrs[i], dt, turn > 0))
	}
	sums := read[int32](d, f.Sums, n)
	for i := range n {
		e := exponents[(f.Skip+i)/kernel.FixedBlock]
		want := new(big.Int)
		for _, x := range values {
			want.Add(want, fixedTerm(x[i], f.Bits+126-int(e)))
		}
		if e < 255 && want.Cmp(big.NewInt(int64(sums[i]))) != 0 {
			d.fail("%v, input %d: element %d of %d is %d, want %v (seed %d)", dt, input, i, n, sums[i], want, Seed)
		}
	}
	d.checkLoads(f, sums, exponents, dt)
	d.checkSquares(f, sums, exponents)
}

// fixedTerm returns x*2^power, rounded to an even integer. It is 0 for what is not finite.
func fixedTerm(x float32, power int) *big.Int {
	if math.IsNaN(float64(x)) || math.IsInf(float64(x), 0) {
		return new(big.Int)
	}
	fraction, exponent := math.Frexp(float64(x))
	mantissa := big.NewInt(int64(math.Ldexp(fraction, 24)))
	shift := exponent - 24 + power
	if shift >= 0 {
		return mantissa.Lsh(mantissa, uint(shift))
	}
	unit := new(big.Int).Lsh(big.NewInt(1), uint(-shift))
	quotient, remainder := new(big.Int).DivMod(mantissa, unit, new(big.Int))
	half := new(big.Int).Rsh(unit, 1)
	if c := remainder.Cmp(half); c > 0 || c == 0 && quotient.Bit(0) == 1 {
		quotient.Add(quotient, big.NewInt(1))
	}
	return quotient
}

// checkLoads compares the values of sums with numbers of 53 bits.
func (d *device) checkLoads(f kernel.Fixed, sums []int32, exponents []uint8, dt dtype.DType) {
	divisor := draw(d, 1, 3, 8, 12, 1000)
	multiple := new(big.Float).SetPrec(53).Quo(big.NewFloat(1), big.NewFloat(float64(divisor)))
	factor := float32(1)
	address := uintptr(0)
	if d.rng.IntN(3) == 0 {
		factor = d.rng.Float32() * draw[float32](d, 1, 1e-38)
		address = d.number(factor)
		multiple.Mul(multiple, big.NewFloat(float64(factor)))
	}
	want := make([]float32, f.N)
	limit := largestOf(dt)
	for i, sum := range sums {
		e := int(exponents[(f.Skip+i)/kernel.FixedBlock])
		if e == 255 {
			want[i] = nan
			continue
		}
		product := new(big.Float).SetPrec(53).Mul(multiple, new(big.Float).SetInt64(int64(sum)))
		v, _ := product.SetMantExp(product, e-126-f.Bits).Float64()
		want[i] = float32(max(-limit, min(v, limit)))
	}
	want, dst := d.narrow(want, dt)
	require.NoError(d, d.kernels().LoadFixed(dst, dt, f, divisor, address))
	d.equalFloats(want, d.readNarrow(dst, dt, f.N), "%v, sums divided by %d times %v", dt, divisor, factor)
}

// checkSquares compares the sum of squares with one of big integers, bit for bit, and with the exact one.
func (d *device) checkSquares(f kernel.Fixed, sums []int32, exponents []uint8) {
	const divisor = 3
	const precision = 56
	place := place(d, []float64{-1})
	require.NoError(d, d.kernels().SquareFixed(f, divisor, place))
	got := readOne[float64](d, place)
	if slices.Contains(exponents, 255) {
		require.True(d, math.IsNaN(got), "got %v", got)
		return
	}
	exponent := func(i int) int {
		return int(exponents[(f.Skip+i)/kernel.FixedBlock])
	}
	square := func(i int) *big.Int {
		return new(big.Int).Exp(big.NewInt(int64(sums[i])), big.NewInt(2), nil)
	}
	top := 0 // of the leading bits
	exact := new(big.Float).SetPrec(1000)
	for i, sum := range sums {
		if sum != 0 {
			top = max(top, exponent(i)+big.NewInt(int64(sum)).BitLen())
		}
		term := new(big.Float).SetInt(square(i))
		exact.Add(exact, term.SetMantExp(term, 2*(exponent(i)-126-f.Bits)))
	}
	low := new(big.Int) // words of 32 bits, of the sums of blocks
	high := new(big.Int)
	for b := range exponents {
		block := new(big.Int)
		for i := max(b*kernel.FixedBlock-f.Skip, 0); i < min((b+1)*kernel.FixedBlock-f.Skip, f.N); i++ {
			if shift := precision - 2*(top-exponent(i)); shift < 0 {
				block.Add(block, new(big.Int).Rsh(square(i), uint(-shift)))
			} else {
				block.Add(block, new(big.Int).Lsh(square(i), uint(shift)))
			}
		}
		high.Add(high, new(big.Int).Rsh(block, 32))
		low.Add(low, new(big.Int).And(block, big.NewInt(math.MaxUint32)))
	}
	total := float64(float64(high.Uint64())*(1<<32)) + float64(low.Uint64())
	unit := math.Ldexp(1/float64(divisor), top-126-f.Bits)
	require.Equal(d, math.Ldexp(total, -precision)*float64(unit*unit), got, "seed %d", Seed)
	near, _ := exact.Float64()
	require.InDelta(d, near/(divisor*divisor), got, 1e-9*got, "seed %d", Seed)
}
