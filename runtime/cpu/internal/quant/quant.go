// Package quant writes arrays of float32 in the codecs of package runtime, and reads them.
package quant

import (
	"encoding/binary"
	"math"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/convert"
	"github.com/tutti-go/tutti/runtime"
)

const (
	block = runtime.CodecBlock
	group = runtime.CodecGroup

	infinity = 0x7f800000 // magnitudes from here on are not finite
	signBit  = 1 << 31
	largest  = math.MaxFloat32
)

// Encode writes src in codec c to dst, of c.Size(len(src)) bytes. lost, if it is as long as src, becomes
// what rounding loses; it may be src.
func Encode(c runtime.Codec, dst []byte, src, lost []float32) {
	scales, codes := dst[:c.ScaleBytes(len(src))], dst[c.ScaleBytes(len(src)):]
	step := block
	if c == runtime.CodecI2 {
		step = group
	}
	// The last codes and scales are not written whole.
	clear(codes[max(len(codes)-4, 0):])
	clear(scales[max(len(scales)-4, 0):])
	var decoded [group]float32
	for i := 0; i < len(src); i += step {
		x := src[i:min(i+step, len(src))]
		code := codes[i*c.Bits()/8:]
		d := decoded[:len(x)]
		switch c {
		case runtime.CodecF32:
			for j, v := range x {
				binary.LittleEndian.PutUint32(code[4*j:], math.Float32bits(v))
			}
			copy(d, x)
		case runtime.CodecBF16, runtime.CodecF16:
			narrow(c, code, x, d)
		case runtime.CodecI2:
			encodeTable(scales[i/group*16:], code, x, d)
		case runtime.CodecSign:
			encodeSigns(scales[i/block*2:], code, x, d)
		default:
			encodeBlock(c, scales[i/block*2:], code, x, d)
		}
		if len(lost) == 0 {
			continue
		}
		for j, v := range x {
			if lost[i+j] = 0; finite(d[j]) {
				lost[i+j] = v - d[j]
			}
		}
	}
}

// Decode reads the first of n values in codec c from src, of c.Size(n) bytes, and stores them or adds them.
func Decode(c runtime.Codec, dst []float32, src []byte, n int, add bool) {
	scales, codes := src[:c.ScaleBytes(n)], src[c.ScaleBytes(n):]
	for i := range dst {
		var v float32
		switch c {
		case runtime.CodecF32:
			v = math.Float32frombits(binary.LittleEndian.Uint32(codes[4*i:]))
		case runtime.CodecBF16:
			v = bf16(codes[2*i:])
		case runtime.CodecF16:
			v = half(binary.LittleEndian.Uint16(codes[2*i:]))
		case runtime.CodecI8:
			v = float32(int8(codes[i])) * bf16(scales[i/block*2:])
			if int8(codes[i]) == -128 {
				v = nan
			}
		case runtime.CodecFP8:
			v = fp8[codes[i]] * bf16(scales[i/block*2:])
		case runtime.CodecI4:
			q := int8(codes[i/2]<<(4-i%2*4)) >> 4
			if v = float32(q) * bf16(scales[i/block*2:]); q == -8 {
				v = nan
			}
		case runtime.CodecI2:
			q := codes[i/4] >> (i % 4 * 2) & 3
			v = math.Float32frombits(binary.LittleEndian.Uint32(scales[i/group*16+int(q)*4:]))
		case runtime.CodecSign:
			v = bf16(scales[i/block*2:])
			if codes[i/8]>>(i%8)&1 != 0 {
				v = -v
			}
		}
		if add {
			dst[i] += v
		} else {
			dst[i] = v
		}
	}
}

var nan = float32(math.NaN())

func finite(v float32) bool { return math.Float32bits(v)&^signBit < infinity }

func bf16(b []byte) float32 {
	return math.Float32frombits(uint32(binary.LittleEndian.Uint16(b)) << 16)
}

func half(bits uint16) float32 {
	var v [1]float32
	convert.F16ToF32(v[:], []uint16{bits})
	return v[0]
}

// fp8 are the values of the FP8E4M3 patterns.
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

// toBF16 rounds a number that is not negative to BF16: not beyond the largest, and 0 if it is subnormal.
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

// round returns the nearest integer, of two the even one, of a number below 2^22.
func round(v float32) int32 {
	return int32(math.Float32bits(v+1.5*(1<<23)) - 0x4b400000)
}

// scaleOf returns the scale of a block for codes up to most, as BF16 and as a number, and its inverse.
func scaleOf(x []float32, most float32) (bits uint16, scale, inverse float32) {
	top := uint32(0)
	for _, v := range x {
		if b := math.Float32bits(v) &^ signBit; b < infinity {
			top = max(top, b)
		}
	}
	bits = toBF16(math.Float32frombits(top) / most)
	if scale = math.Float32frombits(uint32(bits) << 16); float32(scale*most) > largest {
		bits--
		scale = math.Float32frombits(uint32(bits) << 16)
	}
	if scale > 0 {
		inverse = 1 / scale
	}
	return bits, scale, inverse
}

// encodeBlock writes a block in a codec with one scale.
func encodeBlock(c runtime.Codec, scaleAt, codes []byte, x, decoded []float32) {
	most := map[runtime.Codec]float32{runtime.CodecI8: 127, runtime.CodecI4: 7, runtime.CodecFP8: 448}[c]
	bits, scale, inverse := scaleOf(x, most)
	binary.LittleEndian.PutUint16(scaleAt, bits)
	for i, v := range x {
		y := float32(v * inverse)
		if c == runtime.CodecFP8 {
			if convert.F32ToE4M3(codes[i:i+1], []float32{y}); !finite(v) {
				codes[i] = 0x7f
			}
			decoded[i] = float32(fp8[codes[i]] * scale)
			continue
		}
		q := int32(-most) - 1
		decoded[i] = nan
		if finite(v) {
			q = min(max(round(y), int32(-most)), int32(most))
			decoded[i] = float32(float32(q) * scale)
		}
		if c == runtime.CodecI8 {
			codes[i] = byte(q)
		} else if i%2 == 0 {
			codes[i/2] = byte(q) & 15
		} else {
			codes[i/2] |= byte(q) << 4
		}
	}
}

// narrow writes 16-bit floats.
func narrow(c runtime.Codec, codes []byte, x, decoded []float32) {
	for i, v := range x {
		most := float32(65504)
		if c == runtime.CodecBF16 {
			most = 0xff * (1 << 120)
		}
		if finite(v) {
			v = min(max(v, -most), most)
		}
		var h [1]uint16
		if c == runtime.CodecF16 {
			convert.F32ToF16(h[:], []float32{v})
			decoded[i] = half(h[0])
		} else {
			convert.F32ToBF16(h[:], []float32{v})
			decoded[i] = math.Float32frombits(uint32(h[0]) << 16)
		}
		binary.LittleEndian.PutUint16(codes[2*i:], h[0])
	}
}

// encodeSigns writes a block in CodecSign.
func encodeSigns(scaleAt, codes []byte, x, decoded []float32) {
	var terms [block]float32
	for i, v := range x {
		terms[i] = float32(math.Abs(float64(v))) / block
		if !finite(v) {
			terms[i] = nan
		}
	}
	for half := block / 2; half > 0; half /= 2 {
		for i := range half {
			terms[i] += terms[i+half]
		}
	}
	bits := toBF16(float32(terms[0] * (block / float32(len(x)))))
	binary.LittleEndian.PutUint16(scaleAt, bits)
	magnitude := math.Float32frombits(uint32(bits) << 16)
	for i, v := range x {
		sign := math.Float32bits(v) >> 31
		if i%8 == 0 {
			codes[i/8] = 0
		}
		codes[i/8] |= byte(sign << (i % 8))
		decoded[i] = math.Float32frombits(math.Float32bits(magnitude) ^ sign<<31)
	}
}

// encodeTable writes a group in CodecI2.
func encodeTable(tableAt, codes []byte, x, decoded []float32) {
	var centered [group]float32
	var bins [group]uint8
	var table [4]float32
	n := float64(len(x))
	shift := float32(sum(len(x), func(i int) float64 { return float64(x[i]) }) / n)
	for i, v := range x {
		centered[i] = v - shift
	}
	std := float32(math.Sqrt(sum(len(x), func(i int) float64 { return float64(centered[i]) * float64(centered[i]) }) / (n - 1)))
	scale := float32(6*std) / 4
	if scale == 0 || !finite(scale) {
		scale = 1
	}
	var counts [4]float64
	for i, c := range centered[:len(x)] {
		bins[i] = uint8(min(max(math.RoundToEven(float64(float32(c/scale)+2)), 0), 3))
		counts[bins[i]]++
	}
	for b := range table {
		if counts[b] > 0 {
			table[b] = float32(sum(len(x), func(i int) float64 {
				if bins[i] != uint8(b) {
					return 0
				}
				return float64(centered[i])
			}) / counts[b])
		}
		table[b] = min(max(table[b]+shift, -largest), largest)
	}
	for _, v := range x {
		if !finite(v) {
			table = [4]float32{nan, nan, nan, nan}
			clear(bins[:])
		}
	}
	for b, v := range table {
		binary.LittleEndian.PutUint32(tableAt[4*b:], math.Float32bits(v))
	}
	for i := range x {
		if i%4 == 0 {
			codes[i/4] = 0
		}
		codes[i/4] |= bins[i] << (i % 4 * 2)
		decoded[i] = table[bins[i]]
	}
}

// sum adds n terms in the order that the codec says.
func sum(n int, term func(i int) float64) float64 {
	var parts [256]float64
	for i := range n {
		parts[i%len(parts)] += term(i)
	}
	for half := len(parts) / 2; half > 0; half /= 2 {
		for i := range half {
			parts[i] += parts[i+half]
		}
	}
	return parts[0]
}
