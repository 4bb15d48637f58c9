package elastic

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/exponents"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// weightBytes returns n weights, as F32 or their upper halves, with a NaN and a -0 among them.
func weightBytes(r *rand.Rand, n, size int) []byte {
	data := make([]byte, 0, n*size)
	for i := range n {
		x := math.Float32bits(float32(r.NormFloat64() * 0.02))
		switch i {
		case 7:
			x = 0xffc1_2345
		case 8:
			x = 0x8000_0000
		}
		if size == 2 {
			data = binary.LittleEndian.AppendUint16(data, uint16(x>>16))
		} else {
			data = binary.LittleEndian.AppendUint32(data, x)
		}
	}
	return data
}

// TestCodedState: a member that joins has the others' tensors, bit for bit, of types that are coded and others, of more
// than one piece and less than a part, and bf16 travels in 0.67 of its bytes.
func TestCodedState(t *testing.T) {
	const seed = 57
	r := rand.New(rand.NewPCG(seed, 0))
	kinds := []struct {
		d dtype.DType
		n int
	}{
		{dtype.BF16, pieceElements + partElements + 5},
		{dtype.BF16, partElements},
		{dtype.F32, 2*partElements + 1},
		{dtype.F16, partElements - 1},
		{dtype.I32, partElements},
	}
	var want [][]byte
	bytes, shortest := 0, 0.0
	for _, k := range kinds {
		data := weightBytes(r, k.n, k.d.Size())
		want = append(want, data)
		bytes += len(data)
		if k.d == dtype.BF16 {
			shortest += 0.33 * float64(len(data))
		}
	}
	var sent int64
	err := local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		m := &Member{cfg: Config{Runtime: rt}, trainer: Plain{}}
		counted := metered.New(c)
		e := &Epoch{Comm: counted, Members: []string{"a", "b"}}
		for i, k := range kinds {
			x, err := runtime.New(rt, k.d, k.n)
			if err != nil {
				return err
			}
			m.cfg.Tensors = append(m.cfg.Tensors, x)
			if c.Rank() == 0 {
				address, err := x.Ptr()
				if err := errors.Join(err, rt.CopyIn(address, want[i])); err != nil {
					return err
				}
			}
		}
		if c.Rank() == 0 {
			err := m.send(ctx, e, 1, []byte("shared"))
			sent = counted.Totals().SentBytes
			return err
		}
		// Restore is called with the state of the trainer.
		m.trainer = &altered{Trainer: Plain{}, load: func(_ context.Context, states ...[]byte) error {
			assert.Equal(t, [][]byte{[]byte("shared")}, states)
			return nil
		}}
		if err := m.receive(ctx, e, 0); err != nil {
			return err
		}
		for i, x := range m.cfg.Tensors {
			got := make([]byte, len(want[i]))
			address, err := x.Ptr()
			if err := errors.Join(err, rt.CopyOut(got, address)); err != nil {
				return err
			}
			assert.True(t, slices.Equal(want[i], got), "%v, %d elements, seed %d", kinds[i].d, kinds[i].n, seed)
		}
		return nil
	})
	require.NoError(t, err)
	t.Logf("%d bytes of state, %d sent", bytes, sent)
	assert.Less(t, float64(sent), float64(bytes)-shortest, "seed %d", seed)
}

// TestForgedState: a state that no member sends is an error that names the kind of it.
func TestForgedState(t *testing.T) {
	const n = partElements
	code := encodeParts(weightBytes(rand.New(rand.NewPCG(58, 0)), n, 2), 2)
	for name, forged := range map[string]struct {
		announced []int64
		length    int64
		code      []byte
	}{
		"form":     {announced: []int64{0, 7}},
		"negative": {announced: []int64{-1, sendsCoded}},
		"empty":    {announced: []int64{0, sendsCoded}, length: 0},
		"long":     {announced: []int64{0, sendsCoded}, length: 1 << 40},
		"cut":      {announced: []int64{0, sendsCoded}, length: int64(len(code) - 1), code: code[:len(code)-1]},
		"damaged":  {announced: []int64{0, sendsCoded}, length: int64(len(code)), code: append([]byte{code[0] + 1}, code[1:]...)},
	} {
		t.Run(name, func(t *testing.T) {
			err := local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
				rt := cpu.New()
				defer rt.Close()
				x, err := runtime.New(rt, dtype.BF16, n)
				if err != nil {
					return err
				}
				m := &Member{cfg: Config{Runtime: rt, Tensors: []*runtime.Tensor{x}}, trainer: Plain{}}
				e := &Epoch{Comm: c, Members: []string{"a", "b"}}
				if c.Rank() == 1 {
					err := m.receive(ctx, e, 0)
					assert.ErrorIs(t, err, comm.ErrMismatch)
					c.Abort(err)
					return nil
				}
				post := func(t *runtime.Tensor) error { return distributed.Send(ctx, c, t, 1, stateTag) }
				err = communicate(ctx, m, e, forged.announced, post)
				if err == nil && forged.announced[0] == 0 && forged.announced[1] == sendsCoded {
					err = communicate(ctx, m, e, []int64{forged.length}, post)
				}
				if err == nil && forged.code != nil {
					_ = communicate(ctx, m, e, forged.code, post)
				}
				return nil
			})
			require.NoError(t, err)
		})
	}
}

// TestDecodeParts: what encodeParts has not made is refused.
func TestDecodeParts(t *testing.T) {
	const seed, n = 59, 2*partElements + 100
	data := weightBytes(rand.New(rand.NewPCG(seed, 0)), n, 2)
	code := encodeParts(data, 2)
	got := make([]byte, len(data))
	require.NoError(t, decodeParts(got, code, 2))
	require.Equal(t, data, got)
	for _, length := range []int{0, 3, 4, 11, 12, 13, len(code) / 2, len(code) - 1} {
		require.ErrorIs(t, decodeParts(got, code[:length], 2), exponents.ErrDamaged, "%d bytes", length)
	}
	require.ErrorIs(t, decodeParts(got, append(slices.Clone(code), 0), 2), exponents.ErrDamaged)
	for i := range 12 {
		damaged := slices.Clone(code)
		damaged[i] ^= 1
		require.ErrorIs(t, decodeParts(got, damaged, 2), exponents.ErrDamaged, "byte %d", i)
	}
}
