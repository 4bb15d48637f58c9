package runtimetest

import (
	"encoding/binary"
	"math"
	goruntime "runtime"
	"slices"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Codecs makes messages as [kernel.Codec] describes them.
type Codecs interface {
	// List returns the message of a list in ascending order.
	List(idx []int32, val []float32, c kernel.Codec) []byte
	// Array returns the codes of an array, and what they decode to.
	Array(x []float32, c kernel.Codec) (code []byte, decoded []float32)
	// ListValues returns what the values of a list decode to.
	ListValues(x []float32, c kernel.Codec) (decoded []float32)
}

// hostCodecs are the codecs of package cpu.
type hostCodecs struct{ kernel.Kernels }

func (h hostCodecs) List(idx []int32, val []float32, c kernel.Codec) []byte {
	n := 1
	if len(idx) > 0 {
		n += int(idx[len(idx)-1])
	}
	message := make([]byte, c.Bound(len(idx), n))
	list := kernel.Entries{
		Idx: hostmem.Addr(idx),
		Val: hostmem.Addr(val),
		N:   len(idx),
	}
	dst := kernel.Message{Ptr: hostmem.Addr(message), Bytes: len(message)}
	h.keep(h.Encode(list, c, n, dst, kernel.Array{}), idx, val)
	return message[:binary.LittleEndian.Uint32(message[4:])]
}

func (h hostCodecs) Array(x []float32, c kernel.Codec) (code []byte, decoded []float32) {
	code = make([]byte, c.Size(len(x)))
	decoded = make([]float32, len(x))
	h.keep(h.Quantize(hostmem.Addr(code), c, hostmem.Addr(x), len(x), 0), x)
	h.keep(h.Dequantize(hostmem.Addr(decoded), c, hostmem.Addr(code), len(x), false), x)
	return code, decoded
}

func (h hostCodecs) ListValues(x []float32, c kernel.Codec) (decoded []float32) {
	idx := make([]int32, len(x))
	for i := range idx {
		idx[i] = int32(i)
	}
	message := h.List(idx, x, c)
	decoded = make([]float32, len(x))
	length := make([]int32, 1)
	dst := kernel.Entries{
		Idx: hostmem.Addr(idx),
		Val: hostmem.Addr(decoded),
		N:   len(x),
		Len: hostmem.Addr(length),
	}
	src := kernel.Message{Ptr: hostmem.Addr(message), Bytes: len(message)}
	h.keep(h.Decode(src, c, dst), idx, decoded, length, message)
	return decoded
}

// keep has memory live until here.
func (hostCodecs) keep(err error, memory ...any) {
	goruntime.KeepAlive(memory)
	if err != nil {
		panic(err)
	}
}

func isFinite(v float32) bool { return magnitude(v) < magnitude(inf) }

// arrayCodecs code arrays and lists, listCodecs what lists can be coded with.
var (
	arrayCodecs = []kernel.Codec{kernel.CodecF32, kernel.CodecBF16, kernel.CodecF16, kernel.CodecFP8,
		kernel.CodecI8, kernel.CodecI4, kernel.CodecI2, kernel.CodecSign}
	listCodecs = slices.Concat(arrayCodecs, []kernel.Codec{kernel.CodecPositions})
)

// room returns memory for a message of that many bytes, and a function that reads the first of them.
func (d *device) room(bytes int) (ptr uintptr, get func(n int) []byte) {
	words := slices.Repeat([]uint32{0xa5a5a5a5}, (bytes+3)/4)
	ptr = place(d, words)
	d.Cleanup(func() {
		filling := len(words)*4 - bytes
		if filling == 0 || d.Failed() {
			return
		}
		got := d.download(ptr+uintptr(bytes), filling)
		require.Equal(d, slices.Repeat([]byte{0xa5}, filling), got, "behind a message, seed %d", Seed)
	})
	return ptr, func(n int) []byte {
		d.synchronize()
		return d.download(ptr, n)
	}
}

// spreads are ways in which the indices of m entries may lie in n elements.
var spreads = []struct {
	name    string
	indices func(d *device, m, n int) []int32
}{
	{"uniform", func(d *device, m, n int) []int32 { return d.random(m, n, "zero").idx }},
	{"one partition", func(d *device, m, n int) []int32 {
		idx := d.random(m, min(2*m, n), "zero").idx
		from := d.rng.IntN(n - min(2*m, n) + 1)
		for i := range idx {
			idx[i] += int32(from)
		}
		return idx
	}},
	{"runs", func(d *device, m, n int) (idx []int32) {
		for i := 0; len(idx) < m && i < n; i++ {
			if d.rng.IntN(40) == 0 {
				spare := (n - i) - (m - len(idx))
				gap := max(1, min(n/4, spare))
				i += d.rng.IntN(gap)
			}
			idx = append(idx, int32(i))
		}
		return idx
	}},
	{"two scales", func(d *device, m, n int) (idx []int32) {
		for i := 0; len(idx) < m && i < n; {
			idx = append(idx, int32(i))
			scale := 1 << d.rng.IntN(12)
			i += 1 + d.rng.IntN(scale)
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

// eachCoded runs f on lists of all codecs, spreads and sizes. Of the longer ones each codec has two spreads, and of
// the longest one, unless TUTTI_EXTENDED is set. n is the range of their indices.
func (d *device) eachCoded(f func(d *device, c kernel.Codec, l entries, n int)) {
	for i, m := range []int{0, 1, 2, 63, 1000, 1025, 4096, 9001} {
		for j, s := range spreads {
			reach := 1 + m*(1+d.rng.IntN(200))
			l := entries{idx: s.indices(d, m, reach)}
			n := 1
			if len(l.idx) > 0 {
				n = int(l.idx[len(l.idx)-1]) + 1
			}
			for k, c := range listCodecs {
				every := 3
				if m >= 4096 {
					every = len(spreads)
				}
				if !extended && m >= 1000 && (i+j+k)%every > 0 {
					continue
				}
				g := draw(d, gradients...).name
				l.val = d.gradient(g, len(l.idx))
				d.subtest(func(d *device) { f(d, c, l, n) }, "%v, %d %s, %s", c, m, g, s.name)
			}
		}
	}
}

// sameMessage compares messages up to what NaNs hold.
func (d *device) sameMessage(want, got []byte, name string) {
	for i := range want {
		if want[i] != got[i] {
			d.fail("%s: byte %d of %d is %#x, want %#x (seed %d)", name, i, len(want), got[i], want[i], Seed)
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
	d.eachCoded(func(d *device, c kernel.Codec, l entries, n int) {
		slices.Sort(l.idx)
		list := d.list(l)
		if c == kernel.CodecPositions {
			list.Val = 0
		}
		want := d.reference.List(l.idx, l.val, c)
		bound := c.Bound(len(l.idx), n)
		require.LessOrEqual(d, len(want), bound, "length and bound, seed %d", Seed)
		require.Equal(d, len(l.idx), min(c.Fit(bound, n), len(l.idx)))
		ptr, get := d.room(bound)
		message := kernel.Message{
			Ptr:   ptr,
			Bytes: bound,
			Len:   place(d, []int32{-1}),
		}
		// Some entries lose to an array that is too short.
		length := min(n, 300_000)
		residual := d.gradient("normal", length)
		lost := kernel.Array{
			Ptr:    place(d, residual),
			N:      length,
			Faults: place(d, []int32{3}),
		}
		if d.rng.IntN(4) == 0 {
			lost.Ptr = 0
		}
		require.NoError(d, d.Encode(list, c, n, message, lost))
		require.EqualValues(d, len(want), readOne[int32](d, message.Len), "length, seed %d", Seed)
		d.sameMessage(want, get(len(want)), "message")
		decoded := entries{idx: l.idx}
		faults := int32(3)
		if c != kernel.CodecPositions {
			decoded.val = d.reference.ListValues(l.val, c)
			for j, i := range l.idx {
				if int(i) >= length {
					faults++
					continue
				}
				lostHere := lose(l.val[j], decoded.val[j])
				residual[i] = sum(residual[i], lostHere)
			}
		}
		if lost.Ptr != 0 {
			d.equalArray(residual, lost.Ptr, "what is lost")
			d.equalFaults(faults, lost.Faults)
		}
		for _, room := range []int{len(l.idx), len(l.idx) + 5, len(l.idx) / 2} {
			dst := d.target(room, true)
			if c == kernel.CodecPositions {
				dst.Val = 0
			}
			require.NoError(d, d.Decode(message, c, dst))
			d.equalEntries(decoded.first(room), min(room, len(l.idx)), dst, "decoded")
		}
	})
}

// testEncodeRoom has messages with room for a part of a list.
func testEncodeRoom(d *device) {
	for _, c := range listCodecs {
		for _, bytes := range []int{8, 20, 100, 1001, 4003} {
			d.subtest(func(d *device) {
				const n = 100_000
				m := 1 + d.rng.IntN(6000)
				l := d.random(m, n, "normal")
				capacity := c.Fit(bytes, n)
				fit := min(capacity, len(l.idx))
				require.LessOrEqual(d, c.Bound(fit, n), max(bytes, 8))
				require.Greater(d, c.Bound(capacity+1, n), bytes)
				residual := make([]float32, n)
				// Adding anything else to what does not fit, even 0, would show: -0 becomes 0.
				negativeZero := float32(math.Copysign(0, -1))
				for j := fit; j < min(fit+3, len(l.idx)); j++ {
					l.val[j] = negativeZero
					residual[l.idx[j]] = negativeZero
				}
				lost := kernel.Array{Ptr: place(d, residual), N: n}
				ptr, get := d.room(bytes)
				message := kernel.Message{Ptr: ptr, Bytes: bytes}
				require.NoError(d, d.Encode(d.list(l), c, n, message, lost))
				want := d.reference.List(l.idx[:fit], l.val[:fit], c)
				d.sameMessage(want, get(len(want)), "message")
				if c != kernel.CodecPositions {
					decoded := d.reference.ListValues(l.val[:fit], c)
					for j, i := range l.idx {
						residual[i] = l.val[j]
						if j < fit {
							residual[i] = lose(l.val[j], decoded[j])
						}
					}
				}
				d.equalArray(residual, lost.Ptr, "what is lost")
			}, "%v, %d bytes", c, bytes)
		}
	}
}

// testHostileCodes encodes lists that do not ascend, and decodes messages of any content.
func testHostileCodes(d *device) {
	for round := range 40 {
		for _, c := range listCodecs {
			d.subtest(func(d *device) {
				const n = 50_000
				m := d.rng.IntN(5000)
				l := d.random(m, n, "special")
				bound := c.Bound(len(l.idx), n)
				for range d.rng.IntN(3) * len(l.idx) / 2 {
					position := d.rng.IntN(len(l.idx))
					l.idx[position] = int32(d.rng.Uint32())
				}
				ptr, get := d.room(bound)
				message := kernel.Message{
					Ptr:   ptr,
					Bytes: bound,
					Len:   place(d, []int32{-1}),
				}
				lost := kernel.Array{
					Ptr:    place(d, make([]float32, n)),
					N:      n,
					Faults: place(d, []int32{0}),
				}
				require.NoError(d, d.Encode(d.list(l), c, n, message, lost))
				length := readOne[int32](d, message.Len)
				require.True(d, 8 <= length && int(length) <= bound, "%d bytes, seed %d", length, Seed)
				decode := func(message kernel.Message) {
					room := d.rng.IntN(6000)
					dst := d.target(room, true)
					require.NoError(d, d.Decode(message, c, dst))
					got := readOne[int32](d, dst.Len)
					require.True(d, 0 <= got && int(got) <= dst.N, "%d entries, seed %d", got, Seed)
				}
				decode(message)
				bytes := get(int(length))
				for range 1 + d.rng.IntN(8) {
					position := d.rng.IntN(len(bytes))
					if d.coin() {
						position = d.rng.IntN(min(len(bytes), 100))
					}
					bytes[position] ^= 1 << d.rng.IntN(8)
				}
				cut := d.rng.IntN(len(bytes) + 1)
				bytes = bytes[:cut]
				if d.coin() && len(bytes) >= 8 {
					binary.LittleEndian.PutUint32(bytes[4:], uint32(len(bytes)))
				}
				words := make([]uint32, (len(bytes)+3)/4)
				for i, b := range bytes {
					words[i/4] |= uint32(b) << (i % 4 * 8)
				}
				decode(kernel.Message{Ptr: place(d, words), Bytes: len(bytes)})
			}, "%d %v", round, c)
		}
	}
}

func testQuantize(d *device) {
	for _, n := range []int{0, 1, 2, 7, 63, 64, 65, 1000, 4097, 10_007} {
		for _, g := range gradients {
			for _, c := range arrayCodecs {
				d.subtest(func(d *device) {
					x := d.gradient(g.name, n)
					if d.rng.IntN(4) == 0 {
						for i := range x { // near the ends of the range
							scale := draw[float32](d, 0x1p126, 0x1p-130)
							x[i] = product(x[i], scale)
						}
					}
					code, decoded := d.reference.Array(x, c)
					require.Len(d, code, c.Size(n))
					src := place(d, x)
					ptr, get := d.room(len(code))
					residual := place(d, d.gradient("normal", n))
					lost := draw(d, 0, src, residual)
					require.NoError(d, d.Quantize(ptr, c, src, n, lost))
					d.sameMessage(code, get(len(code)), "array")
					if lost != 0 {
						want := make([]float32, n)
						for i := range want {
							want[i] = lose(x[i], decoded[i])
						}
						d.equalArray(want, lost, "what is lost")
					}
					if lost != src {
						d.equalArray(x, src, "the source")
					}
					y := d.gradient("special", n)
					dst := place(d, y)
					require.NoError(d, d.Dequantize(dst, c, ptr, n, true))
					for i := range y {
						y[i] = sum(y[i], decoded[i])
					}
					d.equalArray(y, dst, "sums")
					require.NoError(d, d.Dequantize(dst, c, ptr, n, false))
					d.equalArray(decoded, dst, "values")
					d.sameMessage(code, get(len(code)), "array afterwards")
				}, "%v, %d %s", c, n, g.name)
			}
		}
	}
}

func testTopKChunks(d *device) {
	d.eachGradient(func(d *device, x []float32) {
		sizes := []int{1, 3, 64, 1000, 4096, 5000, math.MaxInt32}
		if len(x) > 1000 { // one of those that make less than 100 chunks
			sizes = []int{draw(d, 64, 1000, 4096, 5000, math.MaxInt32)}
		}
		for _, size := range sizes {
			size = max(size, len(x)/100)
			count := draw(d, 0, 1, 2, 64, size/2, size-1, size, math.MaxInt32)
			in := d.source(x)
			var want entries
			for from := 0; from < len(x); from += min(size, len(x)) {
				end := min(from+min(size, len(x)), len(x))
				part := in.x[from:end]
				order := ranking(part)
				chunk := pick(part, order[:min(count, len(part))])
				for i, index := range chunk.idx {
					want.append(index+int32(from), chunk.val[i])
				}
			}
			require.Equal(d, len(want.idx), kernel.ChunkedLen(len(x), count, size))
			room := len(want.idx) + d.rng.IntN(40)
			dst := d.target(room, d.coin())
			require.NoError(d, d.TopKChunks(in.Source, count, size, dst))
			d.equalEntries(want, len(want.idx), dst, "%d of %d", count, size)
			d.equalSource(in, want)
		}
	})
}

// codecArguments are such as the kernels of codecs accept.
type codecArguments struct {
	p       uintptr // of 64 float32
	q       uintptr // of 8 int32
	list    kernel.Entries
	src     kernel.Source
	message kernel.Message
}

func (d *device) codecArguments() codecArguments {
	p := place(d, make([]float32, 64))
	q := place(d, make([]int32, 8))
	return codecArguments{
		p: p,
		q: q,
		list: kernel.Entries{
			Idx: q,
			Val: p,
			N:   8,
			Len: q,
		},
		src:     kernel.Source{X: p, N: 8},
		message: kernel.Message{Ptr: p, Bytes: 256},
	}
}

// refused asks for ErrArgument of each.
func (d *device) refused(failures ...error) {
	for i, err := range failures {
		require.ErrorIs(d, err, runtime.ErrArgument, "call %d", i)
	}
	d.synchronize()
}

func testCodecLengths(d *device) {
	const c = kernel.CodecI8
	a := d.codecArguments()
	none := kernel.Array{}
	for _, n := range []int{-1, math.MaxInt32 + 1} {
		far := a.list
		far.N = n
		long := kernel.Message{Ptr: a.p, Bytes: n}
		d.refused(
			d.Encode(far, c, 8, a.message, none),
			d.Encode(a.list, c, n, a.message, none),
			d.Encode(a.list, c, 8, long, none),
			d.Encode(a.list, c, 8, a.message, kernel.Array{Ptr: a.p, N: n}),
			d.Decode(long, c, a.list),
			d.Decode(a.message, c, far),
			d.Quantize(a.p, c, a.p, n, 0),
			d.Dequantize(a.p, c, a.p, n, false),
			d.TopKChunks(kernel.Source{X: a.p, N: n}, 1, 8, a.list),
			d.TopKChunks(a.src, n, 8, a.list),
			d.TopKChunks(a.src, 1, n, a.list),
			d.TopKChunks(a.src, 1, 8, far),
		)
	}
}

func testCodecNames(d *device) {
	a := d.codecArguments()
	for _, codec := range []kernel.Codec{kernel.CodecNone, kernel.CodecSign + 1, 255} {
		d.refused(
			d.Encode(a.list, codec, 8, a.message, kernel.Array{}),
			d.Decode(a.message, codec, a.list),
		)
	}
	for _, codec := range []kernel.Codec{kernel.CodecNone, kernel.CodecPositions, 255} {
		d.refused(
			d.Quantize(a.p, codec, a.p, 8, 0),
			d.Dequantize(a.p, codec, a.p, 8, false),
		)
	}
}

func testCodecArguments(d *device) {
	const c = kernel.CodecI8
	a := d.codecArguments()
	none := kernel.Array{}
	noIdx := a.list
	noIdx.Idx = 0
	noVal := a.list
	noVal.Val = 0
	noLen := a.list
	noLen.Len = 0
	noPtr := kernel.Message{Bytes: 256}
	short := kernel.Entries{
		Idx: a.q,
		Val: a.p,
		N:   7,
	}
	d.refused(
		d.Encode(noIdx, c, 8, a.message, none),
		d.Encode(noVal, c, 8, a.message, none),
		d.Encode(a.list, c, 8, noPtr, none),
		d.Encode(a.list, c, 8, kernel.Message{Ptr: a.p, Bytes: 7}, none),
		d.Decode(noPtr, c, a.list),
		d.Decode(a.message, c, noIdx),
		d.Decode(a.message, c, noVal),
		d.Decode(a.message, c, noLen),
		d.Quantize(0, c, a.p, 8, 0),
		d.Quantize(a.p, c, 0, 8, 0),
		d.Dequantize(0, c, a.p, 8, false),
		d.Dequantize(a.p, c, 0, 8, false),
		d.TopKChunks(kernel.Source{N: 1}, 1, 8, a.list),
		d.TopKChunks(a.src, 1, 0, a.list),
		d.TopKChunks(a.src, 1, 8, kernel.Entries{N: 1}),
		d.TopKChunks(a.src, 2, 2, short),
	)
}

// testCodecTypes selects from gradients of a type that they do not have.
func testCodecTypes(d *device) {
	a := d.codecArguments()
	typed := a.src
	typed.Grad = a.p
	typed.DType = dtype.I32
	require.ErrorIs(d, d.TopKChunks(typed, 1, 8, a.list), runtime.ErrDType)
	d.synchronize()
}
