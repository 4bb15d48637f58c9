package ddp_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestStepsApart has ranks of which one has completed a step more than the other go on
// together: where a schedule is not over, that is an error until they are at one step.
func TestStepsApart(t *testing.T) {
	for _, at := range []struct {
		schedule sparse.Schedule
		says     string // of the rank that is ahead
	}{
		{sparse.Schedule{}, ""},
		{sparse.Schedule{WarmupSteps: 1}, ""},
		{sparse.Schedule{WarmupSteps: 2}, "no schedule any more"},
		{sparse.Schedule{Densities: []float64{0.5}, StepsPerEpoch: 9}, "step 2 of the schedule"},
	} {
		cfg := sparse.Config{Pattern: sparse.TopkA, Density: 0.1, Schedule: at.schedule}
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			alone, err := c.Split(ctx, c.Rank(), 0)
			require.NoError(t, err)
			u, err := standin.NewTrainee(rt, alone, cfg, 100)
			require.NoError(t, err)
			m, err := newModel(ctx, rt, alone, ddp.Config{Config: cfg})
			require.NoError(t, err)
			one := func() error { return u.Step(ctx, 1) }
			all := func() error { return errors.Join(m.load(1), m.sync.ReduceAll(ctx, m.params)) }
			require.NoError(t, errors.Join(one(), all()))
			sparse, err := u.S.State(ctx)
			require.NoError(t, err)
			gradients, err := m.sync.State(ctx)
			require.NoError(t, err)
			if c.Rank() == 1 {
				require.NoError(t, errors.Join(one(), all()))
			}
			require.NoError(t, errors.Join(u.S.Rebind(c), m.sync.Rebind(ctx, c)))
			for _, step := range []func() error{one, all} {
				err := step()
				if at.says == "" {
					require.NoError(t, err)
					continue
				}
				require.ErrorIs(t, err, comm.ErrMismatch)
				assert.ErrorContains(t, err, "step 1 of the schedule")
				assert.ErrorContains(t, err, at.says)
			}
			require.NoError(t, errors.Join(u.S.Restore(ctx, sparse), m.sync.Restore(ctx, gradients), one(), all()))
			return errors.Join(u.Close(), m.close(), alone.Close())
		})
	}
}

// TestContextOverBefore: a step that does not begin, because its context is over, leaves
// everything usable, also where steps cannot be undone.
func TestContextOverBefore(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		const n = 100
		cfg := sparse.Config{Pattern: "topkA", Density: 0.1, NoUndo: true}
		u, err := standin.NewTrainee(rt, c, cfg, n)
		require.NoError(t, err)
		buckets, err := ddp.New(ctx, rt, c, []*runtime.Tensor{u.T}, ddp.Config{Config: cfg})
		require.NoError(t, err)
		plain, err := ddp.New(ctx, rt, c, []*runtime.Tensor{u.T}, ddp.Config{})
		require.NoError(t, err)
		for name, step := range map[string]func(ctx context.Context) error{
			"sparse":  func(ctx context.Context) error { return u.S.AllReduce(ctx, u.T) },
			"buckets": func(ctx context.Context) error { return buckets.ReduceAll(ctx, []*runtime.Tensor{u.T}) },
			"plain":   func(ctx context.Context) error { return plain.ReduceAll(ctx, []*runtime.Tensor{u.T}) },
		} {
			before := standin.Bits(u.T)
			assert.ErrorIs(t, step(over), comm.ErrCanceled, name)
			assert.Equal(t, before, standin.Bits(u.T), name)
		}
		_, stateErr := u.S.State(ctx)
		_, bucketsErr := buckets.State(ctx)
		_, plainErr := plain.State(ctx)
		require.NoError(t, errors.Join(stateErr, bucketsErr, plainErr))
		require.NoError(t, errors.Join(u.Step(ctx, 0), buckets.ReduceAll(ctx, []*runtime.Tensor{u.T}), plain.ReduceAll(ctx, []*runtime.Tensor{u.T})))
		return errors.Join(buckets.Close(), plain.Close(), u.Close())
	})
}
