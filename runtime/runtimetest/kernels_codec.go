package runtimetest

import (
	"encoding/binary"
	"errors"
	"math"
	mathbits "math/bits"
	"slices"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// The reference writes what runtime.Codec describes, with bits as a slice and numbers as float64.

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
	first := runtime.RiceParameter(len(gaps), sum)
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

// encodedList is the message of a list.
func encodedList(l entries, c runtime.Codec) []byte {
	le := binary.LittleEndian
	m := len(l.idx)
	var directory, headers, blocks []byte
	_, _, start := c.Layout(m)
	for i := 0; i < m; i += runtime.IndexBlock {
		var gaps []uint64
		for j := i; j < min(i+runtime.IndexBlock, m); j++ {
			if j%runtime.CodecGroup == 0 {
				gaps = append(gaps, 0)
				directory = le.AppendUint32(directory, uint32(l.idx[j]))
				directory = le.AppendUint32(directory, uint32(start+len(blocks)))
			} else {
				gaps = append(gaps, uint64(int64(l.idx[j])-int64(l.idx[j-1])-1))
			}
		}
		header, code := encodedBlock(gaps)
		headers, blocks = le.AppendUint16(headers, header), append(blocks, code...)
	}
	if len(headers)%4 != 0 {
		headers = append(headers, 0, 0)
	}
	var values []byte
	if c != runtime.CodecPositions {
		values, _ = encodedArray(l.val, c)
	}
	message := le.AppendUint32(nil, uint32(m))
	message = le.AppendUint32(message, uint32(8+len(directory)+len(headers)+len(values)+len(blocks)))
	return slices.Concat(message, directory, headers, values, blocks)
}

func isFinite(v float32) bool { return magnitude(v) < magnitude(inf) }

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

// encodedArray is an array in a codec, and what it decodes to.
func encodedArray(x []float32, c runtime.Codec) (code []byte, decoded []float32) {
	var scales, codes bitString
	size := runtime.CodecBlock
	if c == runtime.CodecI2 {
		size = runtime.CodecGroup
	}
	for i := 0; i < len(x); i += size {
		block := x[i:min(i+size, len(x))]
		switch c {
		case runtime.CodecF32, runtime.CodecBF16, runtime.CodecF16:
			dt, most := dtype.F32, float32(largestF32)
			if c == runtime.CodecBF16 {
				dt, most = dtype.BF16, largestBF16
			} else if c == runtime.CodecF16 {
				dt, most = dtype.F16, 65504
			}
			for _, v := range block {
				pattern, value := toType(v, dt, most)
				codes.number(pattern, 8*dt.Size())
				decoded = append(decoded, value)
			}
		case runtime.CodecI2:
			table, bins := bins(block)
			for _, v := range table {
				scales.number(uint64(math.Float32bits(v)), 32)
			}
			for _, b := range bins {
				codes.number(uint64(b), 2)
				decoded = append(decoded, table[b])
			}
		case runtime.CodecSign:
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
func rounded(block []float32, c runtime.Codec) (scale uint64, values []codedValue) {
	most := map[runtime.Codec]float32{runtime.CodecI8: 127, runtime.CodecI4: 7, runtime.CodecFP8: 448}[c]
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
		case !isFinite(v) && c == runtime.CodecFP8:
			one.code = 0x7f
		case !isFinite(v):
			one.code = -int(most) - 1
		case c == runtime.CodecFP8:
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
		if step == runtime.CodecBlock {
			if from >= len(block) {
				return 0
			}
			return float32(math.Abs(float64(block[from])) / runtime.CodecBlock)
		}
		return sum(mean(from, 2*step), mean(from+step, 2*step))
	}
	for _, v := range block {
		if !isFinite(v) {
			return toType(nan, dtype.BF16, 0)
		}
	}
	return scaled16(product(mean(0, 1), float32(runtime.CodecBlock/float64(len(block)))))
}

// bins is SparseLoCo's quantiser.
func bins(group []float32) (table [4]float32, codes []int) {
	total := func(term func(i int) float64) float64 {
		var from func(at, step int) float64
		from = func(at, step int) (s float64) {
			if step < 256 {
				return from(at, 2*step) + from(at+step, 2*step)
			}
			for i := at; i < len(group); i += 256 {
				s += term(i)
			}
			return s
		}
		return from(0, 1)
	}
	n, codes := float64(len(group)), make([]int, len(group))
	if slices.ContainsFunc(group, func(v float32) bool { return !isFinite(v) }) {
		return [4]float32{nan, nan, nan, nan}, codes
	}
	shift := float32(total(func(i int) float64 { return float64(group[i]) }) / n)
	centered := make([]float32, len(group))
	for i, v := range group {
		centered[i] = sum(v, -shift)
	}
	std := float32(math.Sqrt(total(func(i int) float64 { return math.Pow(float64(centered[i]), 2) }) / (n - 1)))
	scale := product(6, std) / 4
	if !(scale > 0) || !isFinite(scale) {
		scale = 1
	}
	for i, c := range centered {
		codes[i] = int(min(max(math.RoundToEven(float64(sum(float32(float64(c)/float64(scale)), 2))), 0), 3))
	}
	for b := range table {
		count := 0
		for _, c := range codes {
			if c == b {
				count++
			}
		}
		if count > 0 {
			table[b] = float32(total(func(i int) float64 {
				if codes[i] == b {
					return float64(centered[i])
				}
				return 0
			}) / float64(count))
		}
		table[b] = min(max(sum(table[b], shift), -largestF32), largestF32)
	}
	return table, codes
}

// codecsOf returns the codecs that code arrays, or lists too.
func (d *device) codecs(lists bool) (k runtime.Kernels, codecs []runtime.Codec) {
	k = d.kernels()
	if err := k.Dequantize(0, runtime.CodecI8, 0, 0, false); errors.Is(err, runtime.ErrUnsupported) {
		d.Skip("no codecs yet")
	}
	codecs = []runtime.Codec{runtime.CodecF32, runtime.CodecBF16, runtime.CodecF16, runtime.CodecFP8, runtime.CodecI8, runtime.CodecI4, runtime.CodecI2, runtime.CodecSign}
	if lists {
		codecs = append(codecs, runtime.CodecPositions)
	}
	return k, codecs
}

// room returns memory for a message of that many bytes, and a function that reads the first of them.
func (d *device) room(bytes int) (ptr uintptr, get func(n int) []byte) {
	d.Helper()
	words := slices.Repeat([]uint32{0xa5a5a5a5}, (bytes+3)/4)
	ptr = place(d, words)
	d.Cleanup(func() {
		if rest := len(words)*4 - bytes; rest > 0 && !d.Failed() {
			require.Equal(d, slices.Repeat([]byte{0xa5}, rest), d.download(ptr+uintptr(bytes), rest), "behind a message, seed %d", Seed)
		}
	})
	return ptr, func(n int) []byte {
		d.synchronize()
		return d.download(ptr, n)
	}
}

// spread are ways in which the indices of m entries may lie in n elements.
var spreads = []struct {
	name string
	of   func(d *device, m, n int) []int32
}{
	{"uniform", func(d *device, m, n int) []int32 { return d.random(m, n, "zero").idx }},
	{"one partition", func(d *device, m, n int) []int32 {
		idx, from := d.random(m, min(2*m, n), "zero").idx, d.rng.IntN(n-min(2*m, n)+1)
		for i := range idx {
			idx[i] += int32(from)
		}
		return idx
	}},
	{"runs", func(d *device, m, n int) (idx []int32) {
		for i := 0; len(idx) < m && i < n; i++ {
			if d.rng.IntN(40) == 0 {
				i += d.rng.IntN(max(1, min(n/4, (n-i)-(m-len(idx)))))
			}
			idx = append(idx, int32(i))
		}
		return idx
	}},
	{"two scales", func(d *device, m, n int) (idx []int32) {
		for i := 0; len(idx) < m && i < n; i += 1 + d.rng.IntN(1<<d.rng.IntN(12)) {
			idx = append(idx, int32(i))
		}
		return idx
	}},
	{"far", func(d *device, m, n int) []int32 {
		idx := make([]int32, 0, m)
		for range m {
			idx = append(idx, d.rng.Int32N(math.MaxInt32))
		}
		slices.Sort(idx)
		return slices.Compact(idx)
	}},
}

// eachCoded runs f on lists of all codecs, spreads and sizes. n is the range of their indices.
func (d *device) eachCoded(f func(d *device, c runtime.Codec, l entries, n int)) {
	_, codecs := d.codecs(true)
	for _, m := range []int{0, 1, 2, 63, 1000, 1025, 4096, 9001} {
		for _, s := range spreads {
			l := entries{idx: s.of(d, m, 1+m*(1+d.rng.IntN(200)))}
			n := 1
			if len(l.idx) > 0 {
				n = int(l.idx[len(l.idx)-1]) + 1
			}
			for _, c := range codecs {
				g := gradients[d.rng.IntN(len(gradients))].name
				l.val = d.gradient(g, len(l.idx))
				d.each(func(d *device) { f(d, c, l, n) }, "%v, %d %s, %s", c, m, g, s.name)
			}
		}
	}
}

// sameMessage compares messages up to what NaNs hold.
func (d *device) sameMessage(want, got []byte, what string) {
	d.Helper()
	for i := range want {
		if want[i] != got[i] {
			d.Fatalf("%s: byte %d of %d is %#x, want %#x (seed %d)", what, i, len(want), got[i], want[i], Seed)
		}
	}
}

// lose is what value adds to the residual when it is sent as decoded.
func lose(value, decoded float32) float32 {
	if !isFinite(decoded) {
		return 0
	}
	return sum(value, -decoded)
}

func testEncode(d *device) {
	d.eachCoded(func(d *device, c runtime.Codec, l entries, n int) {
		k := d.kernels()
		slices.Sort(l.idx)
		list := d.list(l)
		if c == runtime.CodecPositions {
			list.Val = 0
		}
		want := encodedList(l, c)
		bound := c.Bound(len(l.idx), n)
		require.LessOrEqual(d, len(want), bound, "length and bound, seed %d", Seed)
		require.Equal(d, len(l.idx), min(c.Fit(bound, n), len(l.idx)))
		ptr, get := d.room(bound)
		message := runtime.Message{Ptr: ptr, Bytes: bound, Len: place(d, []int32{-1})}
		// Some entries lose to an array that is too short.
		length := min(n, 300_000)
		residual := d.gradient("normal", length)
		lost := runtime.Array{Ptr: place(d, residual), N: length, Faults: place(d, []int32{3})}
		if d.rng.IntN(4) == 0 {
			lost.Ptr = 0
		}
		require.NoError(d, k.Encode(list, c, n, message, lost))
		require.EqualValues(d, len(want), readOne[int32](d, message.Len), "length, seed %d", Seed)
		d.sameMessage(want, get(len(want)), "message")
		decoded, faults := entries{idx: l.idx}, int32(3)
		if c != runtime.CodecPositions {
			_, decoded.val = encodedArray(l.val, c)
			for j, i := range l.idx {
				if int(i) < length {
					residual[i] = sum(residual[i], lose(l.val[j], decoded.val[j]))
				} else {
					faults++
				}
			}
		}
		if lost.Ptr != 0 {
			d.equalFloats(residual, read[float32](d, lost.Ptr, length), "what is lost")
			require.Equal(d, faults, readOne[int32](d, lost.Faults), "faults, seed %d", Seed)
		}
		for _, room := range []int{len(l.idx), len(l.idx) + 5, len(l.idx) / 2} {
			dst := d.target(room, true)
			if c == runtime.CodecPositions {
				dst.Val = 0
			}
			require.NoError(d, k.Decode(message, c, dst))
			if c != runtime.CodecPositions {
				d.equalEntries(decoded.first(room), min(room, len(l.idx)), dst, "decoded")
				continue
			}
			require.EqualValues(d, min(room, len(l.idx)), readOne[int32](d, dst.Len))
			require.Zero(d, slices.Compare(decoded.idx[:min(room, len(l.idx))], read[int32](d, dst.Idx, min(room, len(l.idx)))), "indices, seed %d", Seed)
		}
	})
}

// testEncodeRoom has messages with room for a part of a list.
func testEncodeRoom(d *device) {
	k, codecs := d.codecs(true)
	for _, c := range codecs {
		for _, bytes := range []int{8, 20, 100, 1001, 4003} {
			d.each(func(d *device) {
				const n = 100_000
				l := d.random(1+d.rng.IntN(6000), n, "normal")
				fit := min(c.Fit(bytes, n), len(l.idx))
				require.LessOrEqual(d, c.Bound(fit, n), max(bytes, 8))
				require.Greater(d, c.Bound(c.Fit(bytes, n)+1, n), bytes)
				residual := make([]float32, n)
				lost := runtime.Array{Ptr: place(d, residual), N: n}
				ptr, get := d.room(bytes)
				message := runtime.Message{Ptr: ptr, Bytes: bytes}
				require.NoError(d, k.Encode(d.list(l), c, n, message, lost))
				want := encodedList(l.first(fit), c)
				d.sameMessage(want, get(len(want)), "message")
				if c != runtime.CodecPositions {
					_, decoded := encodedArray(l.val[:fit], c)
					for j, i := range l.idx {
						if residual[i] = l.val[j]; j < fit {
							residual[i] = lose(l.val[j], decoded[j])
						}
					}
				}
				d.equalFloats(residual, read[float32](d, lost.Ptr, n), "what is lost")
			}, "%v, %d bytes", c, bytes)
		}
	}
}

// testHostileCodes encodes lists that do not ascend, and decodes messages of any content.
func testHostileCodes(d *device) {
	k, codecs := d.codecs(true)
	for round := range 40 {
		for _, c := range codecs {
			d.each(func(d *device) {
				const n = 50_000
				l := d.random(d.rng.IntN(5000), n, "special")
				bound := c.Bound(len(l.idx), n)
				for range d.rng.IntN(3) * len(l.idx) / 2 {
					l.idx[d.rng.IntN(len(l.idx))] = int32(d.rng.Uint32())
				}
				ptr, get := d.room(bound)
				message := runtime.Message{Ptr: ptr, Bytes: bound, Len: place(d, []int32{-1})}
				lost := runtime.Array{Ptr: place(d, make([]float32, n)), N: n, Faults: place(d, []int32{0})}
				require.NoError(d, k.Encode(d.list(l), c, n, message, lost))
				length := readOne[int32](d, message.Len)
				require.True(d, 8 <= length && int(length) <= bound, "%d bytes, seed %d", length, Seed)
				decode := func(message runtime.Message) {
					dst := d.target(d.rng.IntN(6000), true)
					require.NoError(d, k.Decode(message, c, dst))
					got := readOne[int32](d, dst.Len)
					require.True(d, 0 <= got && int(got) <= dst.N, "%d entries, seed %d", got, Seed)
				}
				decode(message)
				bytes := get(int(length))
				for range 1 + d.rng.IntN(8) {
					at := d.rng.IntN(len(bytes))
					if d.rng.IntN(2) == 0 {
						at = d.rng.IntN(min(len(bytes), 100))
					}
					bytes[at] ^= 1 << d.rng.IntN(8)
				}
				bytes = bytes[:d.rng.IntN(len(bytes)+1)]
				if d.rng.IntN(2) == 0 && len(bytes) >= 8 {
					binary.LittleEndian.PutUint32(bytes[4:], uint32(len(bytes)))
				}
				words := make([]uint32, (len(bytes)+3)/4)
				for i, b := range bytes {
					words[i/4] |= uint32(b) << (i % 4 * 8)
				}
				decode(runtime.Message{Ptr: place(d, words), Bytes: len(bytes)})
			}, "%d %v", round, c)
		}
	}
}

func testQuantize(d *device) {
	k, codecs := d.codecs(false)
	for _, n := range []int{0, 1, 2, 7, 63, 64, 65, 1000, 4097, 10_007} {
		for _, g := range gradients {
			for _, c := range codecs {
				d.each(func(d *device) {
					x := d.gradient(g.name, n)
					if d.rng.IntN(4) == 0 {
						for i := range x { // near the ends of the range
							x[i] = product(x[i], []float32{0x1p126, 0x1p-130}[d.rng.IntN(2)])
						}
					}
					code, decoded := encodedArray(x, c)
					require.Len(d, code, c.Size(n))
					src := place(d, x)
					ptr, get := d.room(len(code))
					lost := []uintptr{0, src, place(d, d.gradient("normal", n))}[d.rng.IntN(3)]
					require.NoError(d, k.Quantize(ptr, c, src, n, lost))
					d.sameMessage(code, get(len(code)), "array")
					if lost != 0 {
						want := make([]float32, n)
						for i := range want {
							want[i] = lose(x[i], decoded[i])
						}
						d.equalFloats(want, read[float32](d, lost, n), "what is lost")
					}
					if lost != src {
						d.equalFloats(x, read[float32](d, src, n), "the source")
					}
					y := d.gradient("special", n)
					dst := place(d, y)
					require.NoError(d, k.Dequantize(dst, c, ptr, n, true))
					for i := range y {
						y[i] = sum(y[i], decoded[i])
					}
					d.equalFloats(y, read[float32](d, dst, n), "sums")
					require.NoError(d, k.Dequantize(dst, c, ptr, n, false))
					d.equalFloats(decoded, read[float32](d, dst, n), "values")
					d.sameMessage(code, get(len(code)), "array afterwards")
				}, "%v, %d %s", c, n, g.name)
			}
		}
	}
}

func testTopKChunks(d *device) {
	k, _ := d.codecs(false)
	d.eachGradient(func(d *device, x []float32) {
		sizes := []int{1, 3, 64, 1000, 4096, 5000, math.MaxInt32}
		if len(x) > 1000 { // one of those that make less than 100 chunks
			sizes = []int{[]int{64, 1000, 4096, 5000, math.MaxInt32}[d.rng.IntN(5)]}
		}
		for _, size := range sizes {
			size = max(size, len(x)/100)
			count := []int{0, 1, 2, 64, size / 2, size - 1, size, math.MaxInt32}[d.rng.IntN(8)]
			in := d.source(x)
			var want entries
			for from := 0; from < len(x); from += min(size, len(x)) {
				part := in.x[from:min(from+min(size, len(x)), len(x))]
				chunk := pick(part, ranking(part)[:min(count, len(part))])
				for i := range chunk.idx {
					want.idx, want.val = append(want.idx, chunk.idx[i]+int32(from)), append(want.val, chunk.val[i])
				}
			}
			require.Equal(d, len(want.idx), runtime.ChunkedLen(len(x), count, size))
			dst := d.target(len(want.idx)+d.rng.IntN(40), d.rng.IntN(2) == 0)
			require.NoError(d, k.TopKChunks(in.Source, count, size, dst))
			d.equalEntries(want, len(want.idx), dst, "%d of %d", count, size)
			d.equalSource(in, want)
		}
	})
}

func testCodecArguments(d *device) {
	k, _ := d.codecs(false)
	p, q := place(d, make([]float32, 64)), place(d, make([]int32, 8))
	list, src := runtime.Entries{Idx: q, Val: p, N: 8, Len: q}, runtime.Source{X: p, N: 8}
	message, none := runtime.Message{Ptr: p, Bytes: 256}, runtime.Array{}
	const c = runtime.CodecI8
	var failures []error
	for _, n := range []int{-1, math.MaxInt32 + 1} {
		far := runtime.Entries{Idx: q, Val: p, N: n, Len: q}
		failures = append(failures, k.Encode(far, c, 8, message, none), k.Encode(list, c, n, message, none), k.Encode(list, c, 8, runtime.Message{Ptr: p, Bytes: n}, none),
			k.Encode(list, c, 8, message, runtime.Array{Ptr: p, N: n}), k.Decode(runtime.Message{Ptr: p, Bytes: n}, c, list), k.Decode(message, c, far),
			k.Quantize(p, c, p, n, 0), k.Dequantize(p, c, p, n, false),
			k.TopKChunks(runtime.Source{X: p, N: n}, 1, 8, list), k.TopKChunks(src, n, 8, list), k.TopKChunks(src, 1, n, list), k.TopKChunks(src, 1, 8, far))
	}
	noIdx, noVal, noLen := list, list, list
	noIdx.Idx, noVal.Val, noLen.Len = 0, 0, 0
	for _, codec := range []runtime.Codec{runtime.CodecNone, runtime.CodecSign + 1, 255} {
		failures = append(failures, k.Encode(list, codec, 8, message, none), k.Decode(message, codec, list))
	}
	for _, codec := range []runtime.Codec{runtime.CodecNone, runtime.CodecPositions, 255} {
		failures = append(failures, k.Quantize(p, codec, p, 8, 0), k.Dequantize(p, codec, p, 8, false))
	}
	failures = append(failures, k.Encode(noIdx, c, 8, message, none), k.Encode(noVal, c, 8, message, none), k.Encode(list, c, 8, runtime.Message{Bytes: 256}, none),
		k.Encode(list, c, 8, runtime.Message{Ptr: p, Bytes: 7}, none), k.Decode(runtime.Message{Bytes: 256}, c, list), k.Decode(message, c, noIdx), k.Decode(message, c, noVal), k.Decode(message, c, noLen),
		k.Quantize(0, c, p, 8, 0), k.Quantize(p, c, 0, 8, 0), k.Dequantize(0, c, p, 8, false), k.Dequantize(p, c, 0, 8, false),
		k.TopKChunks(runtime.Source{N: 1}, 1, 8, list), k.TopKChunks(src, 1, 0, list), k.TopKChunks(src, 1, 8, runtime.Entries{N: 1}), k.TopKChunks(src, 2, 2, runtime.Entries{Idx: q, Val: p, N: 7}))
	for i, err := range failures {
		require.ErrorIs(d, err, runtime.ErrArgument, "call %d", i)
	}
	typed := src
	typed.Grad, typed.DType = p, dtype.I32
	require.ErrorIs(d, k.TopKChunks(typed, 1, 8, list), runtime.ErrDType)
	d.synchronize()
}
