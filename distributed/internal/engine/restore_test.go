package engine_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestRestoreBeforeTheChoice: what was saved before a pattern was chosen has nothing
// that was not sent, whatever the Reducer has that takes it.
func TestRestoreBeforeTheChoice(t *testing.T) {
	const n = 1000
	slowDense := func(call comm.Call) time.Duration {
		if call.Op == comm.OpAllReduce && call.Count > 100 {
			return 3 * time.Millisecond
		}
		return 0
	}
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		u, err := standin.NewTrainee(rt, standin.Pace(c, slowDense), engine.Config{Pattern: sparsity.Auto, Density: 0.05}, n)
		require.NoError(t, err)
		virgin, err := u.S.State(ctx)
		require.NoError(t, err)
		require.NoError(t, u.Step(ctx, 0))
		require.NoError(t, u.S.Restore(ctx, virgin))
		zeros, err := runtime.New(rt, dtype.F32, n)
		require.NoError(t, err)
		require.NoError(t, errors.Join(zeros.Fill(0), u.S.AllReduce(ctx, zeros), c.Sync(ctx)))
		stats, err := u.S.Stats(ctx)
		require.NoError(t, err)
		require.NotEqual(t, sparsity.Dense, stats.Pattern)
		assert.True(t, slices.Equal(make([]uint32, n), standin.Bits(zeros)), stats.Pattern)
		return errors.Join(zeros.Free(), u.Close())
	})
}

// TestRestoreOfTwoChoices: states of ranks of two runs, for which different patterns
// were chosen, are refused.
func TestRestoreOfTwoChoices(t *testing.T) {
	const n = 1000
	slow := func(dense bool) func(comm.Call) time.Duration {
		return func(call comm.Call) time.Duration {
			if (call.Op == comm.OpAllReduce) == dense && call.Count > 10 {
				return 3 * time.Millisecond
			}
			return 0
		}
	}
	cfg := engine.Config{Pattern: sparsity.Auto, Density: 0.05}
	var states [2][]byte
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		for run := range states {
			u, err := standin.NewTrainee(rt, standin.Pace(c, slow(run == 0)), cfg, n)
			require.NoError(t, err)
			require.NoError(t, u.Step(ctx, 0))
			state, err := u.S.State(ctx)
			require.NoError(t, err)
			if c.Rank() == run {
				states[run] = state
			}
			require.NoError(t, u.Close())
		}
		return nil
	})
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		u, err := standin.NewTrainee(rt, c, cfg, n)
		require.NoError(t, err)
		assert.ErrorIs(t, u.S.Restore(ctx, states[0], states[1]), comm.ErrMismatch)
		return u.Close()
	})
}
