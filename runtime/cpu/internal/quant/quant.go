// Package quant encodes and decodes arrays of float32 with the codecs of package runtime.
package quant

import (
	"encoding/binary"
	"math"
	"math/bits"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/convert"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cpu/internal/f32"
	"github.com/tutti-go/tutti/runtime/kernel"
)

const (
	block = kernel.CodecBlock
	group = kernel.CodecGroup

	infinity = 0x7f800000 // the smallest magnitude that is not finite
	signBit  = 1 << 31
	largest  = math.MaxFloat32
)

var le = binary.LittleEndian

// scaleAt returns the offset of the scale of value i.
func scaleAt(c kernel.Codec, i int) int {
	switch c {
	case kernel.CodecI2:
		return i / group * 16
	case kernel.CodecF32, kernel.CodecBF16, kernel.CodecF16:
		return 0
	}
	return i / block * 2
}

// Encode writes src in codec c to dst, of c.Size(len(src)) bytes. lost, if it is as long as src, receives the rounding
// errors; it may be src.
func Encode(c kernel.Codec, dst []byte, src, lost []float32) {
	encode(c, dst, src, lost, false)
}

// EncodeList is Encode for the values of a list, which CodecI2 encodes differently from those of an array.
func EncodeList(c kernel.Codec, dst []byte, src, lost []float32) {
	encode(c, dst, src, lost, true)
}

func encode(c kernel.Codec, dst []byte, src, lost []float32, list bool) {
	scales := dst[:c.ScaleBytes(len(src))]
	codes := dst[c.ScaleBytes(len(src)):]
	// The last codes and scales are written only partly.
	clear(codes[max(len(codes)-4, 0):])
	clear(scales[max(len(scales)-4, 0):])
	size := sizeOf(c)
	if c == kernel.CodecF32 {
		copy(codes, hostmem.Bytes(src))
		clear(lost)
		return
	}
	var decoded [group]float32
	for i := 0; i < len(src); {
		scale := scales[scaleAt(c, i):]
		code := codes[i*c.Bits()/8:]
		losses := lost[min(i, len(lost)):]
		if done := encodeBlocks(c, code, scale, src[i:], losses); done > 0 {
			i += done
			continue
		}
		x := src[i:min(i+size, len(src))]
		i += len(x)
		d := decoded[:len(x)]
		switch c {
		case kernel.CodecBF16, kernel.CodecF16:
			narrow(c, code, x, d, len(losses) > 0)
		case kernel.CodecI2:
			if list {
				encodeHalves(scale, code, x, d)
			} else {
				encodeBins(scale, code, x, d)
			}
		case kernel.CodecSign:
			encodeSigns(scale, code, x, d)
		case kernel.CodecFP8:
			encodeFP8(scale, code, x, d)
		case kernel.CodecI8:
			encodeIntegers(scale, code, x, d, 127)
		case kernel.CodecI4:
			encodeIntegers(scale, code, x, d, 7)
		}
		if len(losses) > 0 {
			lose(losses[:len(x)], x, d)
		}
	}
}

// lose stores rounding errors: the differences from the decoded values, 0 if these are not finite.
func lose(losses, x, decoded []float32) {
	for j, v := range x {
		losses[j] = 0
		if finite(decoded[j]) {
			losses[j] = v - decoded[j]
		}
	}
}

// Decode reads the first of n values in codec c from src, of c.Size(n) bytes, and stores or adds them.
func Decode(c kernel.Codec, dst []float32, src []byte, n int, add bool) {
	scales := src[:c.ScaleBytes(n)]
	codes := src[c.ScaleBytes(n):]
	var values [group]float32
	size := sizeOf(c)
	for i := 0; i < len(dst); {
		scale := scales[scaleAt(c, i):]
		code := codes[i*c.Bits()/8:]
		if done := decodeBlocks(c, dst[i:], code, scale, add); done > 0 {
			i += done
			continue
		}
		y := dst[i:min(i+size, len(dst))]
		i += len(y)
		v := y
		if add {
			v = values[:len(y)]
		}
		decodeBlock(c, v, code, scale)
		if add {
			for j := range y {
				y[j] += v[j]
			}
		}
	}
}

// sizeOf returns the number of values that are encoded and decoded at a time: those with a common scale, or many.
func sizeOf(c kernel.Codec) int {
	if c >= kernel.CodecFP8 && c != kernel.CodecI2 {
		return block
	}
	return group
}

// halves returns n codes of two bytes.
func halves(code []byte, n int) []uint16 {
	return hostmem.Slice[uint16](hostmem.Addr(code), n)
}

// decodeBlock decodes values with a common scale.
func decodeBlock(c kernel.Codec, y []float32, code, scale []byte) {
	switch c {
	case kernel.CodecF32:
		copy(hostmem.Bytes(y), code)
	case kernel.CodecBF16:
		convert.BF16ToF32(y, halves(code, len(y)))
	case kernel.CodecF16:
		convert.F16ToF32(y, halves(code, len(y)))
	case kernel.CodecFP8:
		s := bf16(scale)
		for i, q := range code[:len(y)] {
			y[i] = float32(fp8[q] * s)
		}
	case kernel.CodecI8:
		s := bf16(scale)
		for i, q := range code[:len(y)] {
			y[i] = float32(float32(int8(q)) * s)
			if q == 0x80 {
				y[i] = nan
			}
		}
	case kernel.CodecI4:
		s := bf16(scale)
		for i := range y {
			q := int8(code[i/2]<<(4-i%2*4)) >> 4
			y[i] = float32(float32(q) * s)
			if q == -8 {
				y[i] = nan
			}
		}
	case kernel.CodecI2:
		for i := range y {
			y[i] = math.Float32frombits(le.Uint32(scale[code[i/4]>>(i%4*2)&3*4:]))
		}
	case kernel.CodecSign:
		s := uint32(le.Uint16(scale)) << 16
		for i := range y {
			y[i] = math.Float32frombits(s ^ uint32(code[i/8]>>(i%8))<<31)
		}
	}
}

var nan = float32(math.NaN())

func finite(v float32) bool { return math.Float32bits(v)&^signBit < infinity }

func bf16(b []byte) float32 {
	return math.Float32frombits(uint32(le.Uint16(b)) << 16)
}

// fp8 has the value of each FP8E4M3 pattern.
var fp8 = func() (values [256]float32) {
	var patterns [256]byte
	for i := range patterns {
		patterns[i] = byte(i)
	}
	if err := dtype.ToFloat32(values[:], patterns[:], dtype.FP8E4M3); err != nil {
		panic(err)
	}
	return values
}()

// toBF16 rounds a number that is not negative to BF16: at most the largest finite one, and 0 if it is subnormal.
func toBF16(v float32) uint16 {
	b := math.Float32bits(v)
	if v != v {
		return 0x7fc0
	}
	b = min((b+0x7fff+b>>16&1)>>16, 0x7f7f)
	if b < 0x80 {
		return 0
	}
	return uint16(b)
}

// round returns the integer nearest to a number below 2^22, with ties to even.
func round(v float32) int32 {
	return int32(math.Float32bits(v+1.5*(1<<23)) - 0x4b400000)
}

// putScale writes the scale of a block for codes up to limit, and returns it and its inverse.
func putScale(dst []byte, x []float32, limit float32) (scale, inverse float32) {
	top := uint32(0)
	for _, v := range x {
		if b := math.Float32bits(v) &^ signBit; b < infinity {
			top = max(top, b)
		}
	}
	b16 := toBF16(math.Float32frombits(top) / limit)
	scale = math.Float32frombits(uint32(b16) << 16)
	if float32(scale*limit) > largest {
		b16--
		scale = math.Float32frombits(uint32(b16) << 16)
	}
	if scale > 0 {
		inverse = 1 / scale
	}
	le.PutUint16(dst, b16)
	return scale, inverse
}

// encodeIntegers writes a block in CodecI8 or CodecI4.
func encodeIntegers(scaleAt, codes []byte, x, decoded []float32, limit int32) {
	scale, inverse := putScale(scaleAt, x, float32(limit))
	for i, v := range x {
		q := -limit - 1
		decoded[i] = nan
		if finite(v) {
			q = min(max(round(float32(v*inverse)), -limit), limit)
			decoded[i] = float32(float32(q) * scale)
		}
		switch {
		case limit == 127:
			codes[i] = byte(q)
		case i%2 == 0:
			codes[i/2] = byte(q) & 15
		default:
			codes[i/2] |= byte(q) << 4
		}
	}
}

// encodeFP8 writes a block in CodecFP8.
func encodeFP8(scaleAt, codes []byte, x, decoded []float32) {
	scale, inverse := putScale(scaleAt, x, 448)
	for i, v := range x {
		decoded[i] = float32(v * inverse)
	}
	convert.F32ToE4M3(codes[:len(x)], decoded)
	for i, v := range x {
		if !finite(v) {
			codes[i] = 0x7f
		}
		decoded[i] = float32(fp8[codes[i]] * scale)
	}
}

// narrow writes 16-bit floats, and stores their decoded values if wanted.
func narrow(c kernel.Codec, code []byte, x, decoded []float32, wanted bool) {
	h := halves(code, len(x))
	limit := uint32(0x477fe000)
	if c == kernel.CodecBF16 {
		limit = 0x7f7f0000
	}
	if f32.CountRange(x, limit+1, infinity-1) > 0 {
		for i, v := range x {
			b := math.Float32bits(v)
			magnitude := b &^ signBit
			if magnitude > limit && magnitude < infinity {
				v = math.Float32frombits(b&signBit | limit)
			}
			decoded[i] = v
		}
		x = decoded
	}
	if c == kernel.CodecF16 {
		convert.F32ToF16(h, x)
	} else {
		convert.F32ToBF16(h, x)
	}
	if !wanted {
		return
	}
	if c == kernel.CodecF16 {
		convert.F16ToF32(decoded, h)
	} else {
		convert.BF16ToF32(decoded, h)
	}
}

// encodeSigns writes a block in CodecSign.
func encodeSigns(scaleAt, codes []byte, x, decoded []float32) {
	var terms [block]float32
	odd := uint32(0)
	for i, v := range x {
		b := math.Float32bits(v) &^ signBit
		odd = max(odd, b)
		terms[i] = math.Float32frombits(b) / block
	}
	if odd >= infinity {
		terms[0] = nan
	}
	for half := block / 2; half > 0; half /= 2 {
		low := terms[:half]
		high := terms[half : 2*half]
		for i := range low {
			low[i] += high[i]
		}
	}
	bits := toBF16(float32(terms[0] * (block / float32(len(x)))))
	le.PutUint16(scaleAt, bits)
	clear(codes[:(len(x)+7)/8])
	for i, v := range x {
		sign := math.Float32bits(v) >> 31
		codes[i/8] |= byte(sign << (i % 8))
		decoded[i] = math.Float32frombits(uint32(bits)<<16 ^ sign<<31)
	}
}

// bins are the codes of a group's values, and the partial sums for each code.
type bins struct {
	codes [group]byte // of two bits
	parts [4]partial  // partial sums, by code
}

// encodeBins writes a group of an array in CodecI2.
func encodeBins(tableAt, codes []byte, x, decoded []float32) {
	var g bins
	centered := decoded
	n := float64(len(x))
	parts := &g.parts
	fast := sumGroup(x, &parts[0])
	if !fast {
		for i, v := range x {
			parts[0][i%len(parts[0])] += float64(v)
		}
	}
	shift := float32(total(&parts[0]) / n)
	if !finite(shift) { // some value is not finite
		spoil(tableAt, codes, decoded)
		return
	}
	if fast {
		centerGroup(centered, x, shift, &parts[0])
	} else {
		parts[0] = partial{}
		for i, v := range x {
			c := v - shift
			centered[i] = c
			parts[0][i%len(parts[0])] += float64(c) * float64(c)
		}
	}
	scale := float32(6*float32(math.Sqrt(total(&parts[0])/(n-1)))) / 4
	if scale == 0 || !finite(scale) {
		scale = 1
	}
	if fast {
		binGroup(&g.codes, centered, scale, parts)
	} else {
		parts[0] = partial{}
		for i, c := range centered {
			b := min(max(round(min(max(float32(c/scale)+2, -1), 4)), 0), 3)
			g.codes[i] = byte(b)
			parts[b&3][i%len(parts[0])] += float64(c)
		}
	}
	g.put(tableAt, codes, shift, decoded)
}

// The values of a list with one sign are divided into halves by their magnitudes, in a histogram with sixteen bars for
// each octave.
const (
	barShift   = 19 // shift from a magnitude's bits to its bar
	octaveBars = 16
	octaves    = 8 // octaves of the histogram, up to the octave of the largest magnitude
	barCount   = octaves * octaveBars
	allBars    = 1 << (32 - barShift)
	signBars   = allBars / 2
)

// encodeHalves writes a group of a list in CodecI2: for each sign, the smaller and the larger values.
func encodeHalves(tableAt, codes []byte, x, decoded []float32) {
	var g bins
	var bars [allBars]uint16
	for _, v := range x {
		bars[math.Float32bits(v)>>barShift]++
	}
	positive := bars[:signBars]
	negative := bars[signBars:]
	top := signBars - 1
	for top > 0 && positive[top]|negative[top] == 0 {
		top--
	}
	if top >= infinity>>barShift {
		spoil(tableAt, codes, decoded)
		return
	}
	lowest := (top/octaveBars - (octaves - 1)) * octaveBars // the first bar of the histogram
	thresholds := [2]uint32{
		threshold(positive, lowest),
		threshold(negative, lowest),
	}
	if !halveGroup(&g, x, thresholds) {
		for i, v := range x {
			b := math.Float32bits(v)
			sign := b >> 31
			code := uint32(2)
			if b&^signBit >= thresholds[sign] {
				code = 3
			}
			code ^= -sign & 3
			g.codes[i] = byte(code)
			g.parts[code&3][i%len(g.parts[0])] += float64(v)
		}
	}
	g.put(tableAt, codes, 0, decoded)
}

// threshold returns the lowest magnitude of the larger half of the values with one sign: the one for which the means,
// of the middles of bars, lose the fewest squares. It is 0 if one bar has all values. All numbers are integers, except
// the compared quotients.
func threshold(bars []uint16, lowest int) uint32 {
	var counts [barCount]uint64
	first := max(lowest, 0)
	smaller := uint64(0)
	for _, n := range bars[:first] {
		smaller += uint64(n)
	}
	for i, n := range bars[first : lowest+barCount] {
		counts[first-lowest+i] = uint64(n)
	}
	counts[0] += smaller
	all := uint64(0)
	sum := uint64(0)
	for bar, n := range counts {
		all += n
		sum += n * middle(bar)
	}
	best := 0.0
	cut := 0
	lower := uint64(0)
	lowerSum := uint64(0)
	for bar, n := range counts {
		if lower > 0 && lower < all {
			upper := all - lower
			upperSum := sum - lowerSum
			score := float64(lowerSum*lowerSum)/float64(lower) + float64(upperSum*upperSum)/float64(upper)
			if score > best {
				best = score
				cut = bar
			}
		}
		lower += n
		lowerSum += n * middle(bar)
	}
	if cut == 0 {
		return 0
	}
	return uint32(lowest+cut) << barShift
}

// middle returns the middle of a bar, in units of half a bar of the first octave. The square of the sum of a group has
// fewer than 53 bits.
func middle(bar int) uint64 {
	return uint64(33+2*(bar%octaveBars)) << (bar / octaveBars)
}

// put writes the codes of a group, and the table with the mean of the values for each, plus shift.
func (g *bins) put(tableAt, codes []byte, shift float32, decoded []float32) {
	n := len(decoded)
	for i := range codes[:(n+3)/4] {
		four := le.Uint32(g.codes[4*i:])
		codes[i] = byte(four | four>>6 | four>>12 | four>>18)
	}
	counts := countCodes(codes[:(n+3)/4], n)
	var table [4]float32
	for b := range table {
		if counts[b] > 0 {
			table[b] = float32(total(&g.parts[b]) / float64(counts[b]))
		}
		table[b] = min(max(table[b]+shift, -largest), largest)
	}
	putTable(tableAt, codes, table, decoded)
}

// spoil writes a group with a value that is not finite.
func spoil(tableAt, codes []byte, decoded []float32) {
	clear(codes[:(len(decoded)+3)/4])
	putTable(tableAt, codes, [4]float32{nan, nan, nan, nan}, decoded)
}

// countCodes counts the occurrences of each code among n values.
func countCodes(codes []byte, n int) (counts [4]int) {
	const lower = 0x5555555555555555
	for len(codes) > 0 {
		var word [8]byte
		codes = codes[copy(word[:], codes):]
		low := le.Uint64(word[:]) & lower
		high := le.Uint64(word[:]) >> 1 & lower
		counts[1] += bits.OnesCount64(low &^ high)
		counts[2] += bits.OnesCount64(high &^ low)
		counts[3] += bits.OnesCount64(low & high)
	}
	counts[0] = n - counts[1] - counts[2] - counts[3] // the padding of the last byte is 0
	return counts
}

// putTable writes the table of a group, and the values that its codes decode to.
func putTable(tableAt, codes []byte, table [4]float32, decoded []float32) {
	for b, v := range table {
		le.PutUint32(tableAt[4*b:], math.Float32bits(v))
	}
	done := decodeBlocks(kernel.CodecI2, decoded, codes, tableAt, false)
	decodeBlock(kernel.CodecI2, decoded[done:], codes[done/4:], tableAt)
}

// partial are the partial sums in the specification of CodecI2.
type partial = [256]float64

// total adds partial sums by repeated halving.
func total(p *partial) float64 {
	for half := len(p) / 2; half > 0; half /= 2 {
		low := p[:half]
		high := p[half : 2*half]
		for i := range low {
			low[i] += high[i]
		}
	}
	return p[0]
}
