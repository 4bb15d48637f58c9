package ddp_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestAccumulate: three passes of which one communicates, kept in F32 and rounded
// once, also where the last pass leaves a gradient out, and nothing of it in the
// next step.
func TestAccumulate(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		f32, err := runtime.New(rt, dtype.F32, 3)
		require.NoError(t, err)
		bf16, err := runtime.New(rt, dtype.BF16, 2)
		require.NoError(t, err)
		empty, err := runtime.New(rt, dtype.F32, 0)
		require.NoError(t, err)
		all := []*runtime.Tensor{f32, bf16, empty}
		meter := metered.New(c)
		g, err := ddp.New(ctx, rt, meter, all, ddp.Config{})
		require.NoError(t, err)

		fill := func(x float64) {
			require.NoError(t, f32.Fill(x+float64(c.Rank())))
			require.NoError(t, bf16.Fill(x))
		}
		sent := meter.Totals()
		for _, x := range []float64{256, 1} { // in bf16, 256 + 1 is 256
			fill(x)
			for i, gradient := range all {
				require.NoError(t, g.Accumulate(i, gradient))
			}
		}
		assert.Equal(t, sent, meter.Totals(), "nothing was sent")
		fill(1)
		require.NoError(t, g.Ready(ctx, 1, bf16))
		assert.ErrorIs(t, g.Accumulate(1, bf16), comm.ErrArgument)
		require.NoError(t, g.Wait(ctx)) // f32 was not used in the last pass
		half, err := cpu.Slice[dtype.BFloat16](bf16)
		require.NoError(t, err)
		assert.Equal(t, float32(258), half[1].Float32())
		single, err := cpu.Slice[float32](g.Result(0))
		require.NoError(t, err)
		assert.Equal(t, []float32{258, 258, 258}, single, "256+0+1+0 on one rank, 256+1+1+1 on the other")

		fill(4)
		require.NoError(t, g.ReduceAll(ctx, all))
		single, err = cpu.Slice[float32](f32)
		require.NoError(t, err)
		assert.Equal(t, []float32{4.5, 4.5, 4.5}, single)
		require.NoError(t, g.Close())
		assert.ErrorIs(t, g.Accumulate(0, f32), comm.ErrClosed)
		standin.Free(t, all)
		return nil
	})
}

// TestAccumulateUndone: a step that fails on all ranks loses no sum, whether the last
// pass left the gradient out or not.
func TestAccumulateUndone(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		all := standin.Gradients(t, rt, 2)
		f := standin.NewFaulty(c)
		g, err := ddp.New(ctx, rt, f, all, ddp.Config{Config: sparse.Config{ClipNorm: 1e9}})
		require.NoError(t, err)
		for step := range 2 {
			for i, x := range all {
				require.NoError(t, x.Fill(float64(1+c.Rank())))
				require.NoError(t, g.Accumulate(i, x))
			}
			if step == 1 {
				f.Calls, f.At = 0, 0
				assert.ErrorIs(t, g.ReduceAll(ctx, []*runtime.Tensor{all[0], nil}), standin.ErrFault)
				f.At = -1
			}
			require.NoError(t, g.ReduceAll(ctx, []*runtime.Tensor{all[0], nil}))
			for i, want := range []float32{3, 1.5} {
				values, err := cpu.Slice[float32](g.Result(i))
				require.NoError(t, err)
				assert.Equal(t, want, values[99], "step %d, gradient %d", step, i)
			}
		}
		require.NoError(t, g.Close())
		standin.Free(t, all)
		return nil
	})
}

// TestAccumulateAndRebind: a plain step that failed loses no sum of a gradient that was left out.
func TestAccumulateAndRebind(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		all := standin.Gradients(t, rt, 2)
		f := standin.NewFaulty(c)
		g, err := ddp.New(ctx, rt, f, all, ddp.Config{})
		require.NoError(t, err)
		require.NoError(t, errors.Join(all[1].Fill(5), g.Accumulate(1, all[1])))
		f.At = 0
		require.ErrorIs(t, g.ReduceAll(ctx, []*runtime.Tensor{all[0], nil}), standin.ErrFault)
		require.NoError(t, g.Rebind(ctx, c))
		require.NoError(t, g.ReduceAll(ctx, []*runtime.Tensor{all[0], nil}))
		values, err := cpu.Slice[float32](g.Result(1))
		require.NoError(t, err)
		assert.EqualValues(t, 5, values[99])
		err = g.Close()
		standin.Free(t, all)
		return err
	})
}

// TestAccumulateAndState: a state has no sums, so none is made while there are some, and
// those of other steps are forgotten when one is restored.
func TestAccumulateAndState(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		all := standin.Gradients(t, rt, 2)
		g, err := ddp.New(ctx, rt, c, all, ddp.Config{})
		require.NoError(t, err)
		state, err := g.State(ctx)
		require.NoError(t, err)
		require.NoError(t, all[1].Fill(1))
		require.NoError(t, g.Accumulate(1, all[1]))
		_, err = g.State(ctx)
		assert.ErrorIs(t, err, comm.ErrArgument)
		assert.ErrorContains(t, err, "gradient 1")
		require.NoError(t, g.Restore(ctx, state))
		require.NoError(t, g.ReduceAll(ctx, all))
		values, err := cpu.Slice[float32](all[1])
		require.NoError(t, err)
		assert.Equal(t, float32(1), values[99])
		_, err = g.State(ctx)
		require.NoError(t, err)
		require.NoError(t, g.Close())
		standin.Free(t, all)
		return nil
	})
}

// TestAccumulateMisuse: types that are not accumulated, and wrong tensors.
func TestAccumulateMisuse(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		f64, err := runtime.New(rt, dtype.F64, 3)
		require.NoError(t, err)
		all := []*runtime.Tensor{f64}
		g, err := ddp.New(ctx, rt, c, all, ddp.Config{})
		require.NoError(t, err)
		assert.ErrorIs(t, g.Accumulate(0, f64), comm.ErrUnsupported)
		assert.ErrorIs(t, g.Accumulate(1, f64), comm.ErrArgument)
		assert.ErrorIs(t, g.Accumulate(0, nil), comm.ErrArgument)
		require.NoError(t, g.ReduceAll(ctx, all), "that was no error of the communication")
		require.NoError(t, g.Close())
		standin.Free(t, all)
		return nil
	})
}
