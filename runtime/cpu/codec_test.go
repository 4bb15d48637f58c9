package cpu

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/simd/simdtest"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// entropy is the entropy of n elements, in bits: whether each is selected, with the probability at(i).
func entropy(n int, at func(i int) float64) (bits float64) {
	last := 0.0 // most elements have the probability of the one before
	each := 0.0
	for i := range n {
		p := at(i)
		if p != last {
			last = p
			each = 0
			if p > 0 && p < 1 {
				each = -p*math.Log2(p) - (1-p)*math.Log2(1-p)
			}
		}
		bits += each
	}
	return bits
}

// drawn selects element i of n with the probability at(i).
func drawn(rng *rand.Rand, n int, at func(i int) float64) (e entries) {
	for i := range n {
		if rng.Float64() < at(i) {
			e.idx = append(e.idx, int32(i))
		}
	}
	e.val = normals(rng, len(e.idx))
	return e
}

// encoded returns the length of the message of a list.
func encoded(w workbench, e entries, c kernel.Codec, n int) int {
	bound, length := c.Bound(len(e.idx), n), room[int32](w, 1)
	message := kernel.Message{Ptr: room[byte](w, bound), Bytes: bound, Len: length}
	require.NoError(w, w.Encode(w.list(e, 0), c, n, message, kernel.Array{}))
	return int(read[int32](length, 1)[0])
}

func uniform(p float64) func(int) float64 { return func(int) float64 { return p } }

func TestIndicesCostLittleMoreThanTheirEntropy(t *testing.T) {
	const n, seed = 1 << 21, 41
	layers := []float64{0.001, 0.1, 0.005, 0.05}
	for name, at := range map[string]func(i int) float64{
		"0.1 %": uniform(0.001), "0.2 %": uniform(0.0019), "0.37 %": uniform(0.0037), "0.7 %": uniform(0.0074), "1 %": uniform(0.01), "1.5 %": uniform(0.015),
		"3 %": uniform(0.0297), "5.8 %": uniform(0.0585), "10 %": uniform(0.1),
		"falling": func(i int) float64 { return 0.2 * math.Exp(-20*float64(i)/n) },
		"layers":  func(i int) float64 { return layers[i*len(layers)/n] },
		"rows": func(i int) float64 { // one of 16 has all of them
			if i/16384%16 == 3 {
				return 0.1
			}
			return 0
		},
	} {
		rng, w := rand.New(rand.NewPCG(seed, 0)), newWorkbench(t)
		e := drawn(rng, n, at)
		least := entropy(n, at)
		bits := float64(8 * encoded(w, e, kernel.CodecPositions, n))
		t.Logf("%s: %.3f bits an index, %.2f %% over the entropy; bound %.3f", name, bits/float64(len(e.idx)), 100*(bits/least-1),
			8*float64(kernel.CodecPositions.Bound(len(e.idx), n))/float64(len(e.idx)))
		assert.LessOrEqual(t, bits, 1.03*least, "%s, seed %d", name, seed)
		if strings.HasSuffix(name, "%") {
			assert.LessOrEqual(t, 0.92*8*float64(kernel.CodecPositions.Bound(len(e.idx), n)), bits, "%s, seed %d", name, seed)
		}
	}
}

func TestBytesOfAnEntry(t *testing.T) {
	const n, seed = 1 << 22, 42
	selected := drawn(rand.New(rand.NewPCG(seed, 0)), n, uniform(0.01))
	for _, c := range []struct {
		kernel.Codec
		most float64
	}{{kernel.CodecF32, 5.1}, {kernel.CodecBF16, 3.1}, {kernel.CodecF16, 3.1}, {kernel.CodecFP8, 2.1}, {kernel.CodecI8, 2.1}, {kernel.CodecI4, 1.6}, {kernel.CodecI2, 1.35}} {
		w := newWorkbench(t)
		each := float64(encoded(w, selected, c.Codec, n)) / float64(len(selected.idx))
		t.Logf("%v: %.3f bytes", c.Codec, each)
		assert.LessOrEqual(t, each, c.most, "%v, seed %d", c.Codec, seed)
	}
	rng, w := rand.New(rand.NewPCG(seed, 1)), newWorkbench(t)
	chunks := w.list(entries{}, kernel.ChunkedLen(n, 64, 4096))
	require.NoError(t, w.TopKChunks(kernel.Source{X: put(w, normals(rng, n)...), N: n}, 64, 4096, chunks))
	e := entries{read[int32](chunks.Idx, chunks.N), read[float32](chunks.Val, chunks.N)}
	each := float64(encoded(w, e, kernel.CodecI2, n)) / float64(chunks.N)
	t.Logf("64 of 4096, i2: %.3f bytes", each)
	assert.LessOrEqual(t, each, 1.2, "seed %d", seed)
}

// TestCodecPathsAgree expects the same messages of the portable code and the assembly, and the same of them.
func TestCodecPathsAgree(t *testing.T) {
	const n, seed = 100_000, 47
	var first [][]byte
	simdtest.EachPath(t, func(t *testing.T) {
		w, rng := newWorkbench(t), rand.New(rand.NewPCG(seed, 0))
		var all [][]byte
		keep := func(p uintptr, bytes int) { all = append(all, slices.Clone(read[byte](p, bytes))) }
		for _, at := range []func(int) float64{uniform(0.3), uniform(0.01), uniform(0.0001), func(i int) float64 { return 0.5 * math.Exp(-float64(i)/10_000) }} {
			e := drawn(rng, n, at)
			for i := range 20 { // here and there, something out of the ordinary
				e.val[rng.IntN(len(e.val))] = []float32{0, float32(math.Inf(1)), float32(math.NaN()), math.MaxFloat32, 1e-42}[i%5]
			}
			for c := kernel.CodecPositions; c.Encodes(); c++ {
				message := kernel.Message{Ptr: room[byte](w, c.Bound(len(e.idx), n)), Bytes: c.Bound(len(e.idx), n), Len: room[int32](w, 1)}
				lost, dst := kernel.Array{Ptr: room[float32](w, n), N: n}, w.list(entries{}, len(e.idx))
				require.NoError(t, w.Encode(w.list(e, 0), c, n, message, lost))
				require.NoError(t, w.Decode(message, c, dst))
				require.Zero(t, slices.Compare(e.idx, read[int32](dst.Idx, len(e.idx))), "%v, seed %d", c, seed)
				keep(message.Ptr, int(read[int32](message.Len, 1)[0]))
				keep(lost.Ptr, 4*n)
				if c.Quantizes() {
					keep(dst.Val, 4*len(e.idx))
					code, sums := room[byte](w, c.Size(len(e.val))), put(w, normals(rng, len(e.val))...)
					require.NoError(t, w.Quantize(code, c, dst.Val, len(e.val), 0))
					require.NoError(t, w.Dequantize(sums, c, code, len(e.val), true))
					keep(code, c.Size(len(e.val)))
					keep(sums, 4*len(e.val))
				}
			}
		}
		if first == nil {
			first = all
		}
		for i := range all {
			require.True(t, slices.Equal(first[i], all[i]), "buffer %d, seed %d", i, seed)
		}
	})
}

// words returns the integers of some bytes.
func words(data []byte) (w []int32) {
	for ; len(data) >= 4; data = data[4:] {
		w = append(w, int32(binary.LittleEndian.Uint32(data)))
	}
	return w
}

// guarded puts bytes, of which n are to be used, between others that are to stay.
func guarded(w workbench, data []byte, n int) (ptr uintptr, check func()) {
	const guard = 64
	all := slices.Concat(slices.Repeat([]byte{0xa5}, guard), data, make([]byte, n-min(n, len(data))), slices.Repeat([]byte{0xa5}, guard))
	base := put(w, all...)
	return base + guard, func() {
		w.Helper()
		now := read[byte](base, len(all))
		for i := range guard {
			require.EqualValues(w, 0xa5, now[i], "before an array")
			require.EqualValues(w, 0xa5, now[len(all)-1-i], "behind an array")
		}
	}
}

// FuzzDecode decodes messages of any content. A list that ascends comes back when it is encoded again.
func FuzzDecode(f *testing.F) {
	for _, c := range []kernel.Codec{kernel.CodecPositions, kernel.CodecI8, kernel.CodecI2, kernel.CodecSign} {
		w := newWorkbench(f)
		e := drawn(rand.New(rand.NewPCG(43, 0)), 2000, uniform(0.1))
		bound := c.Bound(len(e.idx), 2000)
		p := room[byte](w, bound)
		require.NoError(f, w.Encode(w.list(e, 0), c, 2000, kernel.Message{Ptr: p, Bytes: bound}, kernel.Array{}))
		f.Add(slices.Clone(read[byte](p, bound)), uint8(c), uint16(300))
	}
	f.Add([]byte{255, 255, 255, 127, 8, 0, 0, 0}, uint8(kernel.CodecPositions), uint16(9))
	f.Fuzz(func(t *testing.T, data []byte, codec uint8, size uint16) {
		w, c, n := newWorkbench(t), kernel.Codec(codec), int(size)
		if !c.Encodes() {
			return
		}
		message, checkMessage := guarded(w, data, len(data))
		idx, checkIdx := guarded(w, nil, 4*n)
		val, checkVal := guarded(w, nil, 4*n)
		dst := kernel.Entries{Idx: idx, Val: val, N: n, Len: room[int32](w, 1)}
		require.NoError(t, w.Decode(kernel.Message{Ptr: message, Bytes: len(data)}, c, dst))
		checkMessage()
		checkIdx()
		checkVal()
		got := slices.Clone(read[int32](idx, n)[:read[int32](dst.Len, 1)[0]])
		if len(got) == 0 || got[0] < 0 || !slices.IsSorted(got) || len(slices.Compact(slices.Clone(got))) < len(got) {
			return
		}
		span := int(got[len(got)-1]) + 1
		bound := c.Bound(len(got), span)
		again := kernel.Message{Ptr: room[byte](w, bound), Bytes: bound}
		require.NoError(t, w.Encode(dst, c, span, again, kernel.Array{}))
		require.NoError(t, w.Decode(again, c, dst))
		require.Equal(t, got, slices.Clone(read[int32](idx, n)[:read[int32](dst.Len, 1)[0]]))
	})
}

// FuzzEncode encodes lists of any content into messages of any size.
func FuzzEncode(f *testing.F) {
	f.Add([]byte{}, uint8(kernel.CodecI8), uint16(8), int32(0))
	f.Add([]byte{1, 0, 0, 0, 2, 0, 0, 0, 255, 255, 255, 127}, uint8(kernel.CodecI4), uint16(100), int32(math.MaxInt32))
	f.Add([]byte{255, 255, 255, 255, 0, 0, 0, 0}, uint8(kernel.CodecI2), uint16(40), int32(2))
	f.Fuzz(func(t *testing.T, data []byte, codec uint8, bytes uint16, n int32) {
		w, c, idx := newWorkbench(t), kernel.Codec(codec), words(data)
		if !c.Encodes() || bytes < 8 || n < 0 {
			return
		}
		e, residual := entries{idx, make([]float32, len(idx))}, room[float32](w, 100)
		for i := range e.val {
			e.val[i] = float32(i%7) - 3
		}
		p, check := guarded(w, nil, int(bytes))
		message := kernel.Message{Ptr: p, Bytes: int(bytes), Len: room[int32](w, 1)}
		lost := kernel.Array{Ptr: residual, N: 100, Faults: room[int32](w, 1)}
		require.NoError(t, w.Encode(w.list(e, 0), c, int(n), message, lost))
		check()
		require.LessOrEqual(t, int(read[int32](message.Len, 1)[0]), int(bytes))
		dst := w.list(entries{}, len(idx)+1)
		require.NoError(t, w.Decode(message, c, dst))
		got := read[int32](dst.Idx, int(read[int32](dst.Len, 1)[0]))
		ascends := slices.IsSorted(idx) && len(slices.Compact(slices.Clone(idx))) == len(idx)
		if ascends && (len(idx) == 0 || idx[0] >= 0 && int64(idx[len(idx)-1])-int64(idx[0]) < int64(n)) {
			require.Len(t, got, min(len(idx), c.Fit(int(bytes), int(n))))
			require.True(t, slices.Equal(idx[:len(got)], got))
		}
	})
}

// least reports the least time that the last of some calls took, which other processes disturb least, and
// returns it.
func least(b *testing.B, runs ...func() error) time.Duration {
	best := time.Duration(math.MaxInt64)
	for b.Loop() {
		for _, run := range runs[:len(runs)-1] {
			require.NoError(b, run())
		}
		start := time.Now()
		require.NoError(b, runs[len(runs)-1]())
		best = min(best, time.Since(start))
	}
	b.ReportMetric(float64(best.Nanoseconds()), "least-ns")
	return best
}

// BenchmarkCodec encodes and decodes 41,943 of 4,194,304 entries.
func BenchmarkCodec(b *testing.B) {
	const n, seed = 1 << 22, 44
	w := newWorkbench(b)
	x := put(w, normals(rand.New(rand.NewPCG(seed, 0)), n)...)
	list, out := w.list(entries{}, n/100), w.list(entries{}, n/100)
	require.NoError(b, w.TopK(kernel.Source{X: x, N: n}, n/100, list, 0))
	lost := kernel.Array{Ptr: x, N: n}
	for c := kernel.CodecPositions; c.Encodes(); c++ {
		message := kernel.Message{Ptr: room[byte](w, c.Bound(list.N, n)), Bytes: c.Bound(list.N, n)}
		b.Run(fmt.Sprintf("encode/%v", c), func(b *testing.B) {
			least(b, func() error { return w.Encode(list, c, n, message, kernel.Array{}) })
		})
		b.Run(fmt.Sprintf("encode, residual/%v", c), func(b *testing.B) {
			least(b, func() error { return w.Encode(list, c, n, message, lost) })
		})
		b.Run(fmt.Sprintf("decode/%v", c), func(b *testing.B) {
			least(b, func() error { return w.Decode(message, c, out) })
		})
	}
	b.Run("chunks", func(b *testing.B) {
		chunks := w.list(entries{}, n/64)
		least(b, func() error { return w.TopKChunks(kernel.Source{X: x, N: n}, 64, 4096, chunks) })
	})
}

// BenchmarkQuantize reports how long copying takes, of n float32, in units of what the codecs take. Each takes
// turns with a copy, and the least times of both count.
func BenchmarkQuantize(b *testing.B) {
	const n, seed = 1 << 22, 45
	w := newWorkbench(b)
	x, y, lost := put(w, normals(rand.New(rand.NewPCG(seed, 0)), n)...), room[float32](w, n), room[float32](w, n)
	code := room[float32](w, n)
	for c := kernel.CodecF32; c.Quantizes(); c++ {
		require.NoError(b, w.Quantize(code, c, x, n, 0))
		for _, test := range []struct {
			name string
			run  func() error
		}{
			{"quantize", func() error { return w.Quantize(code, c, x, n, 0) }},
			{"quantize, residual", func() error { return w.Quantize(code, c, x, n, lost) }},
			{"dequantize", func() error { return w.Dequantize(y, c, code, n, false) }},
			{"dequantize and add", func() error { return w.Dequantize(y, c, code, n, true) }},
		} {
			b.Run(fmt.Sprintf("%v/%s", c, test.name), func(b *testing.B) {
				copied := time.Duration(math.MaxInt64)
				took := least(b, func() error {
					start := time.Now()
					err := w.Copy(y, x, 4*n)
					copied = min(copied, time.Since(start))
					return err
				}, test.run)
				b.ReportMetric(float64(4*n)/float64(took.Nanoseconds()), "least-GB/s")
				b.ReportMetric(float64(copied)/float64(took), "of-copy")
			})
		}
	}
}
