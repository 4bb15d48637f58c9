package delta

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// weights returns a tensor of n elements like those of a trained layer, of the upper bits of F32 values.
func weights(r *rand.Rand, name string, d dtype.DType, n int) Tensor {
	var data Host
	for range n {
		x := math.Float32bits(float32(r.NormFloat64() * 0.02))
		switch d {
		case dtype.F32:
			data = binary.LittleEndian.AppendUint32(data, x)
		case dtype.F16: // all of these are normal numbers, or zero
			exponent := max(int32(x>>23&0xff)-127+15, 0)
			data = binary.LittleEndian.AppendUint16(data, uint16(x>>31<<15|uint32(exponent)<<10|x>>13&0x3ff))
		default:
			data = binary.LittleEndian.AppendUint16(data, uint16(x>>16))
		}
	}
	return Tensor{Name: name, DType: d, Shape: []int{n}, Memory: data}
}

// TestFullCopies compares the length of first versions with the length of the elements.
func TestFullCopies(t *testing.T) {
	const seed, n = 54, 300_000
	r, ctx := rand.New(rand.NewPCG(seed, 0)), t.Context()
	sparse := weights(r, "sparse", dtype.BF16, n)
	clear(sparse.Memory.(Host)[n/10:])
	constant := weights(r, "constant", dtype.BF16, n)
	for i := range n {
		binary.LittleEndian.PutUint16(constant.Memory.(Host)[2*i:], 0x3f80)
	}
	for _, c := range []struct {
		tensor Tensor
		most   float64
	}{
		{weights(r, "bf16", dtype.BF16, n), 0.67},
		{weights(r, "f16", dtype.F16, n), 0.86},
		{weights(r, "f32", dtype.F32, n), 0.84},
		{newTensor(r, "random bf16", dtype.BF16, n), 1.0001},
		{newTensor(r, "random f32", dtype.F32, n), 1.0001},
		{newTensor(r, "integers", dtype.I16, n), 1.0001},
		{newTensor(r, "f64", dtype.F64, n), 1.0001},
		{sparse, 0.05},
		{constant, 0.51},
		{Tensor{Name: "zeros", DType: dtype.F32, Shape: []int{n}, Memory: make(Host, 4*n)}, 0.002},
	} {
		p := NewPublisher(nil, nil)
		require.NoError(t, p.Commit(ctx, 1, []Tensor{c.tensor}))
		var message bytes.Buffer
		require.NoError(t, p.WriteSince(ctx, &message, 0))
		size := len(c.tensor.Memory.(Host))
		share := float64(message.Len()) / float64(size)
		t.Logf("%s: %.4f", c.tensor.Name, share)
		assert.Less(t, share, c.most, "%s, seed %d", c.tensor.Name, seed)
		changed := 0
		for element := range slices.Chunk(c.tensor.Memory.(Host), c.tensor.DType.Size()) {
			if slices.ContainsFunc(element, func(b byte) bool { return b != 0 }) {
				changed++
			}
		}
		assert.Equal(t, Stat{Weights: n, Changed: uint64(changed), Bytes: uint64(message.Len())}, p.Stat(), c.tensor.Name)
		s, err := NewSubscriber(ctx, nil, nil, Config{})
		require.NoError(t, err)
		_, err = s.Read(ctx, &message)
		require.NoError(t, err)
		shows(t, s, 1, model{c.tensor})
	}
}

// TestDeviceFullCopies publishes from and to the memory of runtimes: a first version, and one to who has another.
func TestDeviceFullCopies(t *testing.T) {
	const seed = 55
	for name, open := range openings() {
		t.Run(name, func(t *testing.T) {
			r, ctx := rand.New(rand.NewPCG(seed, 0)), t.Context()
			rt := open(t)
			defer rt.Close() //nolint:errcheck // leaks are another test's
			var version, other []Tensor
			var want model
			for i, d := range []dtype.DType{dtype.BF16, dtype.F32, dtype.I32} {
				w := weights(r, string(rune('a'+i)), d, 5000)
				if d == dtype.I32 {
					w = newTensor(r, w.Name, d, 5000)
				}
				want = append(want, w)
				for _, tensors := range []*[]Tensor{&version, &other} {
					x, err := runtime.New(rt, d, 5000)
					require.NoError(t, err)
					on, err := Of(w.Name, x)
					require.NoError(t, err)
					*tensors = append(*tensors, on)
				}
				_, err := version[i].Memory.WriteAt(w.Memory.(Host), 0)
				require.NoError(t, err)
			}
			p := NewPublisher(rt, nil)
			defer p.Close()
			require.NoError(t, p.Commit(ctx, 7, version))
			for _, cfg := range []Config{{}, {Tensors: other, Version: 3}} {
				s, err := NewSubscriber(ctx, rt, nil, cfg)
				require.NoError(t, err)
				var message bytes.Buffer
				require.NoError(t, p.WriteSince(ctx, &message, cfg.Version))
				assert.Less(t, message.Len(), 5000*(2+4+4)*9/10, "seed %d", seed)
				_, err = s.Read(ctx, &message)
				require.NoError(t, err)
				shows(t, s, 7, want)
				s.Close()
			}
		})
	}
}

// TestDamagedExponents: a block whose exponents are coded wrong, or that has none, is refused, and stays as it was.
func TestDamagedExponents(t *testing.T) {
	const seed, n = 56, 400
	r := rand.New(rand.NewPCG(seed, 0))
	var c coder
	now := weights(r, "w", dtype.BF16, n).Memory.(Host)
	code, _, err := c.encodeFull(hostPlace(now), dtype.BF16, n)
	require.NoError(t, err)
	require.Equal(t, byte(formExponents), code[0])
	data := make([]byte, 2*n)
	for _, d := range []dtype.DType{dtype.I16, dtype.U16} {
		require.ErrorIs(t, apply(&c, code, data, d, false), ErrDelta)
	}
	for i := 1; i < len(code); i++ {
		require.ErrorIs(t, apply(&c, code[:i], data, dtype.BF16, false), ErrDelta, "%d of %d bytes", i, len(code))
	}
	require.ErrorIs(t, apply(&c, append(slices.Clone(code), 0), data, dtype.BF16, false), ErrDelta)
	require.ErrorIs(t, apply(&c, code, make([]byte, 2*n+2), dtype.BF16, false), ErrDelta)
	require.ErrorIs(t, apply(&c, code, data[:2*n-2], dtype.BF16, false), ErrDelta)
	require.Equal(t, make([]byte, 2*n), data)
	require.NoError(t, apply(&c, code, data, dtype.BF16, false))
	require.Equal(t, []byte(now), data)
}

// BenchmarkFullCopies codes and applies a block of bf16.
func BenchmarkFullCopies(b *testing.B) {
	layer := weights(rand.New(rand.NewPCG(1, 2)), "w", dtype.BF16, blockLen).Memory.(Host)
	var c coder
	code, sum, err := c.encodeFull(hostPlace(layer), dtype.BF16, blockLen)
	require.NoError(b, err)
	b.Run("encode", func(b *testing.B) {
		b.SetBytes(int64(len(layer)))
		for b.Loop() {
			if _, _, err := c.encodeFull(hostPlace(layer), dtype.BF16, blockLen); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("apply", func(b *testing.B) {
		zeros := make([]byte, len(layer))
		b.SetBytes(int64(len(layer)))
		for b.Loop() {
			clear(zeros)
			if got, err := c.apply(code, hostPlace(zeros), dtype.BF16, blockLen, 0, false); err != nil || got != sum {
				b.Fatal(got, err)
			}
		}
	})
}
