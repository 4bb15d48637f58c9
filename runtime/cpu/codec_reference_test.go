package cpu_test

import (
	"encoding/binary"
	"errors"
	"math"
	mathbits "math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// reference writes what kernel.Codec describes, with bits as a slice and numbers as float64.
type reference struct{}

// bitString are bits in their order.
type bitString []bool

func (b *bitString) number(v uint64, n int) {
	for i := range n {
		*b = append(*b, v>>i&1 != 0)
	}
}

func (b *bitString) zerosAndOne(n int) { *b = append(append(*b, make([]bool, n)...), true) }

// bytes returns the bits in bytes, at least up to a multiple of that many.
func (b bitString) bytes(multiple int) []byte {
	n := (len(b) + 8*multiple - 1) / (8 * multiple) * multiple
	out := make([]byte, n)
	for i, bit := range b {
		if bit {
			out[i/8] |= 1 << (i % 8)
		}
	}
	return out
}

// blockOf codes gaps with parameter k, which is in order if ok.
func blockOf(gaps []uint64, k int) (low, high bitString, capped, ok bool) {
	var plain, short, large bitString
	most := uint64(0)
	for _, g := range gaps {
		low.number(g, k)
		q := g >> k
		most = max(most, q)
		if q > 1<<14 || len(plain) > 1<<14 {
			plain = make(bitString, 1<<15) // too long
		} else {
			plain.zerosAndOne(int(q))
		}
		short.zerosAndOne(int(min(q, 8)))
		if q >= 8 {
			n := mathbits.Len64(q-7) - 1
			large.zerosAndOne(n)
			large.number(q-7, n)
		}
	}
	short = append(short, large...)
	high = plain
	if most >= 32 && len(short) < len(plain) {
		high, capped = short, true
	}
	return low, high, capped, len(high) <= 8*1023
}

// encodedBlock returns the shortest code of gaps that the description of the search finds.
func encodedBlock(gaps []uint64) (header uint16, code []byte) {
	sum, widest := uint64(0), 0
	for _, g := range gaps {
		sum, widest = sum+g, max(widest, mathbits.Len64(g))
	}
	length := func(k int) int {
		low, high, _, ok := blockOf(gaps, k)
		if !ok || k > 30 {
			return math.MaxInt
		}
		return len(low) + len(high)
	}
	first := kernel.RiceParameter(len(gaps), sum)
	k := first
	for k > 0 && length(k-1) < length(k) {
		k--
	}
	if k == first {
		for length(k+1) < length(k) {
			k++
		}
	}
	low, high, capped, _ := blockOf(gaps, k)
	code = append(low.bytes(1), high.bytes(1)...)
	header = uint16(k) | uint16(len(high.bytes(1)))<<6
	if capped {
		header |= 32
	}
	if widest*len(gaps) <= 8*len(code) {
		var fixed bitString
		for _, g := range gaps {
			fixed.number(g, widest)
		}
		return uint16(widest), fixed.bytes(1)
	}
	return header, code
}

func (reference) List(idx []int32, val []float32, c kernel.Codec) []byte {
	le := binary.LittleEndian
	m := len(idx)
	var directory, headers, blocks []byte
	_, _, start := c.Layout(m)
	for i := 0; i < m; i += kernel.IndexBlock {
		var gaps []uint64
		for j := i; j < min(i+kernel.IndexBlock, m); j++ {
			if j%kernel.CodecGroup == 0 {
				gaps = append(gaps, 0)
				directory = le.AppendUint32(directory, uint32(idx[j]))
				directory = le.AppendUint32(directory, uint32(start+len(blocks)))
			} else {
				gaps = append(gaps, uint64(int64(idx[j])-int64(idx[j-1])-1))
			}
		}
		header, code := encodedBlock(gaps)
		headers, blocks = le.AppendUint16(headers, header), append(blocks, code...)
	}
	if len(headers)%4 != 0 {
		headers = append(headers, 0, 0)
	}
	var values []byte
	if c != kernel.CodecPositions {
		values, _ = reference{}.values(val, c, halves)
	}
	message := le.AppendUint32(nil, uint32(m))
	message = le.AppendUint32(message, uint32(8+len(directory)+len(headers)+len(values)+len(blocks)))
	return slices.Concat(message, directory, headers, values, blocks)
}

// toType rounds as dtype does, saturating finite numbers at most.
func toType(v float32, dt dtype.DType, most float32) (pattern uint64, value float32) {
	if isFinite(v) {
		v = min(max(v, -most), most)
	}
	var b [8]byte
	var back [1]float32
	if err := errors.Join(dtype.FromFloat32(b[:dt.Size()], dt, []float32{v}), dtype.ToFloat32(back[:], b[:dt.Size()], dt)); err != nil {
		panic(err)
	}
	return binary.LittleEndian.Uint64(b[:]), back[0]
}

const (
	largestF32  = math.MaxFloat32
	largestBF16 = 255 * (1 << 120)
)

// scaled16 rounds a scale.
func scaled16(v float32) (pattern uint64, value float32) {
	pattern, value = toType(v, dtype.BF16, largestBF16)
	if value < 0x1p-126 {
		return 0, 0
	}
	return pattern, value
}

func (r reference) Array(x []float32, c kernel.Codec) (code []byte, decoded []float32) {
	return r.values(x, c, bins)
}

func (r reference) ListValues(x []float32, c kernel.Codec) (decoded []float32) {
	_, decoded = r.values(x, c, halves)
	return decoded
}

// values codes an array, or with halves the values of a list.
func (reference) values(
	x []float32, c kernel.Codec, tableOf func(group []float32) (table [4]float32, codes []int),
) (code []byte, decoded []float32) {
	var scales, codes bitString
	size := kernel.CodecBlock
	if c == kernel.CodecI2 {
		size = kernel.CodecGroup
	}
	for i := 0; i < len(x); i += size {
		block := x[i:min(i+size, len(x))]
		switch c {
		case kernel.CodecF32, kernel.CodecBF16, kernel.CodecF16:
			dt, most := dtype.F32, float32(largestF32)
			if c == kernel.CodecBF16 {
				dt, most = dtype.BF16, largestBF16
			} else if c == kernel.CodecF16 {
				dt, most = dtype.F16, 65504
			}
			for _, v := range block {
				pattern, value := toType(v, dt, most)
				codes.number(pattern, 8*dt.Size())
				decoded = append(decoded, value)
			}
		case kernel.CodecI2:
			table, bins := tableOf(block)
			for _, v := range table {
				scales.number(uint64(math.Float32bits(v)), 32)
			}
			for _, b := range bins {
				codes.number(uint64(b), 2)
				decoded = append(decoded, table[b])
			}
		case kernel.CodecSign:
			pattern, value := signMagnitude(block)
			scales.number(pattern, 16)
			for _, v := range block {
				sign := math.Signbit(float64(v))
				codes = append(codes, sign)
				if sign {
					v = -value
				} else {
					v = value
				}
				decoded = append(decoded, v)
			}
		default:
			pattern, values := rounded(block, c)
			scales.number(pattern, 16)
			for _, v := range values {
				codes.number(uint64(v.code), c.Bits())
				decoded = append(decoded, v.value)
			}
		}
	}
	return append(scales.bytes(4), codes.bytes(4)...), decoded
}

type codedValue struct {
	code  int
	value float32
}

// rounded codes a block with one scale.
func rounded(block []float32, c kernel.Codec) (scale uint64, values []codedValue) {
	most := map[kernel.Codec]float32{kernel.CodecI8: 127, kernel.CodecI4: 7, kernel.CodecFP8: 448}[c]
	top := float32(0)
	for _, v := range block {
		if isFinite(v) {
			top = max(top, float32(math.Abs(float64(v))))
		}
	}
	pattern, s := scaled16(float32(float64(top) / float64(most)))
	if float64(s)*float64(most) > largestF32 {
		pattern--
		s = math.Float32frombits(uint32(pattern) << 16)
	}
	for _, v := range block {
		q := product(v, 0)
		if s > 0 {
			q = product(v, float32(1/float64(s)))
		}
		one := codedValue{value: nan}
		switch {
		case !isFinite(v) && c == kernel.CodecFP8:
			one.code = 0x7f
		case !isFinite(v):
			one.code = -int(most) - 1
		case c == kernel.CodecFP8:
			code, value := toType(q, dtype.FP8E4M3, 448)
			one = codedValue{int(code), product(value, s)}
		default:
			n := min(max(math.RoundToEven(float64(q)), -float64(most)), float64(most))
			one = codedValue{int(n), product(float32(int(n)), s)}
		}
		values = append(values, one)
	}
	return pattern, values
}

// signMagnitude is the magnitude of a block of signs.
func signMagnitude(block []float32) (pattern uint64, value float32) {
	var mean func(from, step int) float32 // of the elements from, from+step, …
	mean = func(from, step int) float32 {
		if step == kernel.CodecBlock {
			if from >= len(block) {
				return 0
			}
			return float32(math.Abs(float64(block[from])) / kernel.CodecBlock)
		}
		return sum(mean(from, 2*step), mean(from+step, 2*step))
	}
	for _, v := range block {
		if !isFinite(v) {
			return toType(nan, dtype.BF16, 0)
		}
	}
	return scaled16(product(mean(0, 1), float32(kernel.CodecBlock/float64(len(block)))))
}

// total sums terms as the partial sums of the format do.
func total(n int, term func(i int) float64) float64 {
	var from func(at, step int) float64
	from = func(at, step int) (s float64) {
		if step < 256 {
			return from(at, 2*step) + from(at+step, 2*step)
		}
		for i := at; i < n; i += 256 {
			s += term(i)
		}
		return s
	}
	return from(0, 1)
}

// means returns the means of values by their codes.
func means(values []float32, codes []int) (table [4]float32) {
	for b := range table {
		count := 0
		for _, c := range codes {
			if c == b {
				count++
			}
		}
		if count > 0 {
			table[b] = float32(total(len(values), func(i int) float64 {
				if codes[i] == b {
					return float64(values[i])
				}
				return 0
			}) / float64(count))
		}
	}
	return table
}

// halves is the quantiser of lists: two magnitudes a sign.
func halves(group []float32) (table [4]float32, codes []int) {
	codes = make([]int, len(group))
	if slices.ContainsFunc(group, func(v float32) bool { return !isFinite(v) }) {
		return [4]float32{nan, nan, nan, nan}, codes
	}
	bits := func(v float32) int { return int(math.Float32bits(v) & (1<<31 - 1)) }
	octave := 0 // the first one that is told apart
	for _, v := range group {
		octave = max(octave, bits(v)>>23)
	}
	octave -= 7
	bar := func(v float32) int { return max(bits(v)>>19-16*octave, 0) }
	for _, negative := range []bool{false, true} {
		// The score of each bar as the first of the larger half.
		var counts, sums [129]int // below each bar
		for _, v := range group {
			if math.Signbit(float64(v)) == negative {
				b := bar(v)
				for at := b + 1; at <= 128; at++ {
					counts[at]++
					sums[at] += (33 + 2*(b%16)) << (b / 16)
				}
			}
		}
		first, best := 0, 0.0
		square := func(n int) float64 { return float64(uint64(n) * uint64(n)) }
		for b := range 128 {
			if low, high := counts[b], counts[128]-counts[b]; low > 0 && high > 0 {
				if s := square(sums[b])/float64(low) + square(sums[128]-sums[b])/float64(high); s > best {
					first, best = b, s
				}
			}
		}
		for i, v := range group {
			switch larger := bar(v) >= first; {
			case math.Signbit(float64(v)) != negative:
			case negative && larger:
				codes[i] = 0
			case negative:
				codes[i] = 1
			case larger:
				codes[i] = 3
			default:
				codes[i] = 2
			}
		}
	}
	return means(group, codes), codes
}

// bins is SparseLoCo's quantiser.
func bins(group []float32) (table [4]float32, codes []int) {
	n, codes := float64(len(group)), make([]int, len(group))
	if slices.ContainsFunc(group, func(v float32) bool { return !isFinite(v) }) {
		return [4]float32{nan, nan, nan, nan}, codes
	}
	shift := float32(total(len(group), func(i int) float64 { return float64(group[i]) }) / n)
	centered := make([]float32, len(group))
	for i, v := range group {
		centered[i] = sum(v, -shift)
	}
	std := float32(math.Sqrt(total(len(group), func(i int) float64 { return math.Pow(float64(centered[i]), 2) }) / (n - 1)))
	scale := product(6, std) / 4
	if !(scale > 0) || !isFinite(scale) {
		scale = 1
	}
	for i, c := range centered {
		codes[i] = int(min(max(math.RoundToEven(float64(sum(float32(float64(c)/float64(scale)), 2))), 0), 3))
	}
	table = means(centered, codes)
	for b := range table {
		table[b] = min(max(sum(table[b], shift), -largestF32), largestF32)
	}
	return table, codes
}

var nan = float32(math.NaN())

func isFinite(v float32) bool { return math.Abs(float64(v)) <= largestF32 }

func sum(a, b float32) float32     { return float32(float64(a) + float64(b)) }
func product(a, b float32) float32 { return float32(float64(a) * float64(b)) }

// TestListLoss: what two bits lose of the squares of the largest entries, of distributions with ever heavier tails, and
// that each table keeps their sum.
func TestListLoss(t *testing.T) {
	const seed = 51
	r := rand.New(rand.NewPCG(seed, 0))
	laplace := func() float64 { return r.ExpFloat64() * float64(1-2*r.IntN(2)) }
	student := func() float64 {
		squares := 0.0
		for range 3 {
			squares += math.Pow(r.NormFloat64(), 2)
		}
		return r.NormFloat64() / math.Sqrt(squares/3)
	}
	for _, c := range []struct {
		name    string
		draw    func() float64
		density float64
		most    float64 // share of the squares
	}{
		{"normal", r.NormFloat64, 0.01, 0.0036},
		{"normal", r.NormFloat64, 0.05, 0.0071},
		{"Laplace", laplace, 0.05, 0.021},
		{"Student t3", student, 0.05, 0.135},
	} {
		values := make([]float32, 500_000)
		keys := make([]uint32, len(values)) // ascend as magnitudes fall
		for i := range values {
			bits := math.Float32bits(float32(c.draw()))
			keys[i] = ^mathbits.RotateLeft32(bits, 1)
		}
		slices.Sort(keys)
		for i, key := range keys {
			values[i] = math.Float32frombits(mathbits.RotateLeft32(^key, -1))
		}
		list := values[:int(c.density*float64(len(values)))/kernel.CodecGroup*kernel.CodecGroup]
		r.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		lost, all := 0.0, 0.0
		for from := 0; from < len(list); from += kernel.CodecGroup {
			group := list[from : from+kernel.CodecGroup]
			decoded := reference{}.ListValues(group, kernel.CodecI2)
			sum, kept, magnitudes := 0.0, 0.0, 0.0
			for i, v := range group {
				lost += math.Pow(float64(v)-float64(decoded[i]), 2)
				all += math.Pow(float64(v), 2)
				sum += float64(v)
				kept += float64(decoded[i])
				magnitudes += math.Abs(float64(v))
			}
			assert.InDelta(t, sum, kept, 1e-7*magnitudes, "%s, seed %d", c.name, seed)
		}
		t.Logf("%s, %v: %.4f", c.name, c.density, lost/all)
		assert.Less(t, lost/all, c.most, "%s, %v, seed %d", c.name, c.density, seed)
	}
}
