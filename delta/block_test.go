package delta

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
)

// moved returns n elements of bits around values of a trained layer, and a copy of which about a share has
// moved: those of move units in the last place.
func moved(r *rand.Rand, n int, share float64, move func() int) (old, new []byte) {
	old = make([]byte, 2*n)
	for i := range n {
		binary.LittleEndian.PutUint16(old[2*i:], uint16(math.Float32bits(float32(r.NormFloat64()*0.02))>>16))
	}
	new = slices.Clone(old)
	for i := range n {
		if r.Float64() < share {
			b := binary.LittleEndian.Uint16(new[2*i:])
			binary.LittleEndian.PutUint16(new[2*i:], uint16(int(b)+move()))
		}
	}
	return old, new
}

// lastPlace is as optimizers move: mostly by one.
func lastPlace(r *rand.Rand) func() int {
	return func() int {
		by := 1
		for r.Float64() < 0.14 {
			by++
		}
		return by * (1 - 2*r.IntN(2))
	}
}

// entropy returns the bits of positions and differences of what compare found, by their frequencies.
func entropy(c *coder, elements int) float64 {
	counts := map[int64]int{}
	for _, d := range c.diffs {
		counts[d]++
	}
	m, n := float64(len(c.diffs)), float64(elements)
	h := n*math.Log2(n) - m*math.Log2(m) - (n-m)*math.Log2(max(n-m, 1))
	for _, k := range counts {
		h += float64(k) * math.Log2(m/float64(k))
	}
	return h
}

func compare(c *coder, old, new []byte, d dtype.DType) {
	if _, err := c.compare(hostPlace(old), hostPlace(new), d, len(new)/d.Size(), 0); err != nil {
		panic(err)
	}
}

func encode(c *coder, dst, old, new []byte, d dtype.DType, small bool) []byte {
	code, err := c.encode(dst, hostPlace(old), hostPlace(new), d, len(new)/d.Size(), 0, small)
	if err != nil {
		panic(err)
	}
	return code
}

func apply(c *coder, code, data []byte, d dtype.DType, subtract bool) error {
	sum, err := c.apply(code, hostPlace(data), d, len(data)/d.Size(), crc32.Checksum(data, castagnoli), subtract)
	if want := crc32.Checksum(data, castagnoli); err == nil && sum != want {
		panic(fmt.Sprintf("checksum %#x, want %#x", sum, want))
	}
	return err
}

// TestEntropy compares the length of blocks with the entropy of what they hold, at any share.
func TestEntropy(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	wide := func() int { return (1 + int(math.Abs(r.NormFloat64())*math.Exp(4*r.Float64()))) * (1 - 2*r.IntN(2)) }
	one := func() int { return 1 - 2*r.IntN(2) }
	up := func() int { return 1 }
	for name, move := range map[string]func() int{"last place": lastPlace(r), "wide": wide, "one": one, "up": up} {
		if testing.Short() && name != "wide" {
			continue
		}
		for i, share := range []float64{0.001, 0.01, 0.03, 0.1, 0.2, 0.38, 0.5, 1} {
			if !extended && name != "wide" && (i+len(name))%2 != 0 {
				continue
			}
			old, new := moved(r, blockLen, share, move)
			var c coder
			compare(&c, old, new, dtype.BF16)
			code := encode(&c, nil, old, new, dtype.BF16, false)
			h := entropy(&c, blockLen)
			ratio := 8 * float64(len(code)) / h
			t.Logf("%-10s %5.1f %%: %.3f bytes a changed weight, %.4f of the entropy, form %d", name, 100*share, float64(len(code))/float64(len(c.idx)), ratio, code[0])
			if name != "wide" || share > 0.001 { // where a thousand differences say little of how they are distributed
				assert.Less(t, ratio, 1.03, "%s, %v", name, share)
			}
			got := slices.Clone(old)
			require.NoError(t, apply(&c, code, got, dtype.BF16, false))
			require.Equal(t, crc32.ChecksumIEEE(new), crc32.ChecksumIEEE(got), "%s %v", name, share)
			require.NoError(t, apply(&c, code, got, dtype.BF16, true))
			require.Equal(t, crc32.ChecksumIEEE(old), crc32.ChecksumIEEE(got))
		}
	}
}

// BenchmarkDiff is compare and code of 16 MiB of bf16, in bytes of the new version a second.
func BenchmarkDiff(b *testing.B) {
	for _, share := range []float64{0.01, 0.03, 0.1} {
		b.Run(dtype.BF16.String()+"-"+percent(share), func(b *testing.B) {
			r := rand.New(rand.NewPCG(1, 2))
			old, new := moved(r, blockLen, share, lastPlace(r))
			var c coder
			var code []byte
			b.SetBytes(int64(len(new)))
			for b.Loop() {
				compare(&c, old, new, dtype.BF16)
				code = encode(&c, code[:0], old, new, dtype.BF16, false)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(c.idx)), "ns/changed")
		})
	}
}

// BenchmarkApplySorted is BenchmarkApply of what is written for files. The elements move on from round to round.
func BenchmarkApplySorted(b *testing.B) {
	for _, share := range []float64{0.01, 0.03} {
		b.Run(dtype.BF16.String()+"-"+percent(share), func(b *testing.B) {
			r := rand.New(rand.NewPCG(1, 2))
			old, new := moved(r, blockLen, share, lastPlace(r))
			var c coder
			compare(&c, old, new, dtype.BF16)
			m := len(c.idx)
			code := slices.Clone(c.encodeSorted(old, dtype.BF16))
			for b.Loop() {
				if _, err := c.apply(code, hostPlace(old), dtype.BF16, blockLen, 0, false); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(m), "ns/changed")
		})
	}
}

// BenchmarkApply includes the checksum of the block.
func BenchmarkApply(b *testing.B) {
	for _, share := range []float64{0.01, 0.03, 0.1} {
		b.Run(dtype.BF16.String()+"-"+percent(share), func(b *testing.B) {
			r := rand.New(rand.NewPCG(1, 2))
			old, new := moved(r, blockLen, share, lastPlace(r))
			var c coder
			compare(&c, old, new, dtype.BF16)
			code := encode(&c, nil, old, new, dtype.BF16, false)
			m, undo := len(c.idx), false
			for b.Loop() {
				if _, err := c.apply(code, hostPlace(old), dtype.BF16, blockLen, 0, undo); err != nil {
					b.Fatal(err)
				}
				undo = !undo
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(m), "ns/changed")
		})
	}
}

// BenchmarkStages takes the parts of Apply one by one.
func BenchmarkStages(b *testing.B) {
	for _, share := range []float64{0.01, 0.03, 0.1} {
		r := rand.New(rand.NewPCG(1, 2))
		old, new := moved(r, blockLen, share, lastPlace(r))
		var c coder
		compare(&c, old, new, dtype.BF16)
		code := encode(&c, nil, old, new, dtype.BF16, false)
		m, undo := len(c.idx), false
		for _, stage := range []struct {
			name string
			do   func() error
		}{
			{"positions", func() error {
				src := cursor{data: code}
				src.byte()
				src.uvarint()
				c.reserve(dtype.BF16, m)
				return readPositions(&src, c.idx, blockLen)
			}},
			{"read", func() error { // positions and values
				_, err := c.read(code, dtype.BF16, blockLen)
				return err
			}},
			{"list", func() error {
				writeDiffs[int16](&c, code[0], c.area[diffsAt(m):])
				return nil
			}},
			{"patch", func() error { // with the list, without checksums
				undo = !undo
				writeDiffs[int16](&c, code[0], c.area[diffsAt(m):])
				patchHost(view[int16](old), dtype.BF16, c.idx[:m], view[int16](c.area[diffsAt(m):]), undo)
				return nil
			}},
			{"checksum", func() error {
				crc32.Checksum(old, castagnoli)
				return nil
			}},
		} {
			b.Run(dtype.BF16.String()+"-"+percent(share)+"-"+stage.name, func(b *testing.B) {
				for b.Loop() {
					if err := stage.do(); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(m), "ns/changed")
			})
		}
	}
}

func percent(share float64) string { return fmt.Sprintf("%02.0f", 100*share) }

// pattern returns n elements: of any bits, or of few values.
func pattern(r *rand.Rand, n, size int, few bool) []byte {
	b := make([]byte, n*size)
	for i := range b {
		if b[i] = byte(r.Uint32()); few && r.IntN(3) > 0 {
			b[i] = 0x80 * byte(r.IntN(2))
		}
	}
	return b
}

// TestTypes codes every type at many lengths, shares and distances, NaNs and zeros of both signs among
// them.
func TestTypes(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, d := range dtype.All() {
		for _, n := range []int{1, 2, 7, 9, 100, 1023, 4097, 9000} {
			for _, share := range []float64{0, 0.01, 0.2, 0.6, 1} {
				testVersions(t, r, d, n, share)
			}
		}
	}
}

func testVersions(t *testing.T, r *rand.Rand, d dtype.DType, n int, share float64) {
	var c coder
	last := pattern(r, n, d.Size(), n%2 == 0)
	for range 3 {
		next := slices.Clone(last)
		for i := range n {
			if at := i * d.Size(); r.Float64() < share {
				copy(next[at:at+d.Size()], pattern(r, 1, d.Size(), true))
			} else if share == 0.2 && i%10 == 0 {
				next[at] += byte(1 - 2*r.IntN(2))
			}
		}
		compare(&c, last, next, d)
		if bytes.Equal(last, next) {
			require.Empty(t, c.idx)
			continue
		}
		code, small := encode(&c, nil, last, next, d, false), encode(&c, nil, last, next, d, true)
		require.LessOrEqual(t, len(small), len(code))
		require.LessOrEqual(t, len(code), len(next)+5, "%v, %d", d, n)
		got := slices.Clone(last)
		require.NoError(t, apply(&c, small, got, d, false))
		require.True(t, bytes.Equal(next, got), "%v, %d elements, %v, small", d, n, share)
		copy(got, last)
		require.NoError(t, apply(&c, code, got, d, false))
		require.True(t, bytes.Equal(next, got), "%v, %d elements, %v", d, n, share)
		require.NoError(t, apply(&c, code, got, d, true))
		require.True(t, bytes.Equal(last, got), "%v, %d elements, %v, back", d, n, share)
		last = next
	}
}

// TestPositions: gaps that lead beyond the largest index, and back to a negative one, are refused.
func TestPositions(t *testing.T) {
	var c coder
	code := append([]byte{formList, 2, 31, 0}, 0xff, 0xff, 0xff, 0x7f, 0, 0, 0, 0)
	code = c.appendValues(code, []uint64{0, 0})
	data := make([]byte, 20)
	require.ErrorIs(t, apply(&c, code, data, dtype.BF16, false), ErrDelta)
	require.Equal(t, make([]byte, 20), data)
}

// FuzzBlock: any bytes as the code of a block are an error, or change what subtracting makes as it was.
func FuzzBlock(f *testing.F) {
	r := rand.New(rand.NewPCG(5, 6))
	for _, share := range []float64{0.02, 0.3, 1} {
		old, new := moved(r, 3000, share, lastPlace(r))
		var c coder
		compare(&c, old, new, dtype.BF16)
		for _, small := range []bool{false, true} {
			f.Add(encode(&c, nil, old, new, dtype.BF16, small), uint8(dtype.BF16-1), uint16(3000))
		}
	}
	var full coder
	layer := weights(r, "w", dtype.BF16, 500).Memory.(Host)
	code, _, err := full.encodeFull(hostPlace(layer), dtype.BF16, 500)
	require.NoError(f, err)
	f.Add(code, uint8(dtype.BF16-1), uint16(500))
	f.Add([]byte{formOnes, 3, 31, 255, 1, 2, 3, 4, 5, 6, 7, 8, 9}, uint8(dtype.F64), uint16(100))
	var c coder
	f.Fuzz(func(t *testing.T, code []byte, kind uint8, n uint16) {
		d := dtype.All()[int(kind)%len(dtype.All())]
		old := pattern(rand.New(rand.NewPCG(7, 8)), int(n), d.Size(), false)
		data, message := slices.Clone(old), slices.Clone(code)
		if apply(&c, code, data, d, false) == nil {
			if form, _ := formOf(code); form == formSorted {
				return // which is not taken back
			}
			require.NoError(t, apply(&c, code, data, d, true))
		}
		require.True(t, bytes.Equal(old, data), "not as before")
		require.Equal(t, message, code)
	})
}
