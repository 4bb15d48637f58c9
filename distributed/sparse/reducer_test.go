package sparse_test

import (
	"context"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/internal/stages"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// reduced is a rank's Reducer with its gradient.
type reduced struct {
	*sparse.Reducer
	gradient *runtime.Tensor
}

func newReduced(t *testing.T, rt runtime.Runtime, c comm.Communicator, cfg sparse.Config, values []float32) reduced {
	t.Helper()
	r, err := sparse.New(rt, c, len(values), cfg)
	require.NoError(t, err)
	gradient, err := runtime.FromSlice(rt, values)
	require.NoError(t, err)
	return reduced{r, gradient}
}

func (r reduced) close() error { return errors.Join(r.Close(), r.gradient.Free()) }

func values(t *testing.T, x *runtime.Tensor) []float32 {
	t.Helper()
	all, err := runtime.ToSlice[float32](x)
	require.NoError(t, err)
	return all
}

// TestReducer: two ranks each send the larger of two entries, and keep the other one. The kept entry comes back from
// the rank's state, scaled, and over another communicator.
func TestReducer(t *testing.T) {
	others, err := local.New(2)
	require.NoError(t, err)
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		cfg := sparse.Config{Pattern: sparse.TopkA, Density: 0.5}
		r := newReduced(t, rt, c, cfg, []float32{8, 3})
		var observed []stages.Stage
		observe := func(_ int, s stages.Stage, _ uintptr) { observed = append(observed, s) }
		require.NoError(t, r.AllReduce(stages.Observe(ctx, observe), r.gradient))
		assert.Equal(t, []stages.Stage{stages.Selected, stages.Exchanged, stages.Finished}, observed)
		assert.Equal(t, []float32{8, 0}, values(t, r.gradient))
		stats, err := r.Stats(ctx)
		require.NoError(t, err)
		assert.Equal(t, 1, stats.SelectedLocal)
		assert.Equal(t, float32(8), stats.Threshold)

		list, err := r.Entries()
		require.NoError(t, err)
		length := make([]int32, 1)
		require.NoError(t, rt.CopyOut(hostmem.Bytes(length), list.Len))
		assert.EqualValues(t, 1, length[0])
		index := make([]int32, 1)
		entry := make([]float32, 1)
		require.NoError(t, errors.Join(rt.CopyOut(hostmem.Bytes(index), list.Idx), rt.CopyOut(hostmem.Bytes(entry), list.Val)))
		assert.Equal(t, []int32{0}, index)
		assert.Equal(t, []float32{8}, entry)
		total, err := runtime.New(rt, dtype.F32, 2)
		require.NoError(t, err)
		require.NoError(t, errors.Join(total.Fill(1), r.AddResult(total, 0.5)))
		assert.Equal(t, []float32{5, 1}, values(t, total))

		residual, err := r.Residual()
		require.NoError(t, err)
		assert.Equal(t, []float32{0, 3}, values(t, residual))
		state, err := r.State(ctx)
		require.NoError(t, err)
		shared, err := r.SharedState(ctx)
		require.NoError(t, err)
		assert.Less(t, len(shared), len(state))

		refused := errors.New("refused")
		r.BeforeCommit(func(context.Context) error { return refused })
		assert.ErrorIs(t, r.AllReduce(ctx, r.gradient), refused)
		r.BeforeCommit(nil)
		require.NoError(t, errors.Join(c.Close(), r.Rebind(others[c.Rank()]), r.Restore(ctx, state), r.ScaleResidual(2)))
		require.NoError(t, r.gradient.Fill(0))
		require.NoError(t, r.AllReduce(ctx, r.gradient))
		assert.Equal(t, []float32{0, 6}, values(t, r.gradient))
		return errors.Join(r.close(), total.Free(), others[c.Rank()].Close())
	})
}

// TestPolicies: the policies mean what their names say.
func TestPolicies(t *testing.T) {
	for policy, want := range map[sparse.NonFinitePolicy]error{
		sparse.PassNonFinite: nil,
		sparse.SkipNonFinite: nil,
		sparse.FailNonFinite: sparse.ErrNonFinite,
	} {
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			r := newReduced(t, rt, c, sparse.Config{NonFinite: policy}, []float32{float32(math.Inf(1)), 1})
			assert.ErrorIs(t, r.AllReduce(ctx, r.gradient), want)
			stats, err := r.Stats(ctx)
			require.NoError(t, err)
			assert.Equal(t, policy == sparse.SkipNonFinite, stats.Skipped)
			return r.close()
		})
	}
	for global, want := range map[bool]float32{false: float32(math.Sqrt(0.5)), true: 1} {
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			r := newReduced(t, rt, c, sparse.Config{ClipNorm: 1, ClipGlobal: global}, []float32{4})
			require.NoError(t, r.AllReduce(ctx, r.gradient))
			assert.InDelta(t, want, values(t, r.gradient)[0], 1e-6, "%v", global)
			return r.close()
		})
	}
}

// TestSchedule: dense steps, an epoch that sends nothing, and the configured density after it.
func TestSchedule(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		cfg := sparse.Config{
			Pattern:  sparse.Gtopk,
			Density:  0.5,
			Schedule: sparse.Schedule{WarmupSteps: 1, Densities: []float64{0}, StepsPerEpoch: 1},
		}
		r := newReduced(t, rt, c, cfg, []float32{0, 0})
		for _, want := range [][]float32{{4, 2}, {0, 0}, {8, 0}} {
			require.NoError(t, runtime.CopyIn(r.gradient, []float32{4, 2}))
			require.NoError(t, r.AllReduce(ctx, r.gradient))
			assert.Equal(t, want, values(t, r.gradient))
		}
		return r.close()
	})
}

// TestNames: each name of a pattern and a codec is listed, and can be configured.
func TestNames(t *testing.T) {
	patterns := []string{sparse.Dense, sparse.TopkA, sparse.TopkA2, sparse.TopkAopt, sparse.Gtopk, sparse.TopkSA,
		sparse.Gaussiank, sparse.GaussiankConcat, sparse.GaussiankSA, sparse.Oktopk, sparse.Chunked}
	assert.Equal(t, patterns, sparsity.Patterns())
	codecs := []string{sparse.F32, sparse.Lossless, sparse.BF16, sparse.F16, sparse.FP8, sparse.I8, sparse.I4, sparse.I2, sparse.Bit}
	assert.Equal(t, codecs, sparsity.Values())
	standin.World(t, 1, func(_ context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		for _, pattern := range append(patterns, sparse.Auto) {
			for _, codec := range codecs {
				r, err := sparse.New(rt, c, 2, sparse.Config{Pattern: pattern, Values: codec, Density: 0.1})
				require.NoError(t, err, "%s, %s", pattern, codec)
				require.NoError(t, r.Close())
			}
		}
		_, err := sparse.New(rt, c, 2, sparse.Config{Pattern: "nothing"})
		assert.ErrorIs(t, err, comm.ErrArgument)
		return nil
	})
	assert.Equal(t, []int{1, 3}, sparse.RestoreRanks(4, 2, 1))
}
