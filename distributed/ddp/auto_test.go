package ddp_test

import (
	"bytes"
	"context"
	"log/slog"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// The buckets of a model that are alike have one choice, made before the first
// step.
func TestAutoBuckets(t *testing.T) {
	const ranks = 2
	var text bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&text, nil)))
	defer slog.SetDefault(before)
	b := standin.Backend(t, ranks)
	lens := []int{1000, 20_000, 20_100, 19_900}
	var patterns [ranks][]string
	require.NoError(t, b.Run(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
		var params []*runtime.Tensor
		for i, n := range lens {
			p, err := runtime.FromSlice(r.Runtime, standin.Normal(n, r.Comm.Rank(), i))
			if err != nil {
				return err
			}
			defer p.Free()
			params = append(params, p)
		}
		g, err := ddp.New(ctx, r.Runtime, r.Comm, params, ddp.Config{
			BucketBytes: 4 * 20_000,
			DenseUpTo:   -1,
			Config:      sparse.Config{Pattern: sparse.Auto, Density: 0.01},
		})
		if err != nil {
			return err
		}
		defer g.Close()
		patterns[r.Comm.Rank()] = g.Patterns()
		for range 3 {
			if err := g.ReduceAll(ctx, params); err != nil {
				return err
			}
		}
		return nil
	}))
	require.Equal(t, patterns[0], patterns[1])
	require.Len(t, patterns[0], len(lens))
	assert.NotContains(t, patterns[0], sparse.Auto)
	assert.Equal(t, patterns[0][0], patterns[0][1], "alike")
	assert.Equal(t, 2, bytes.Count(text.Bytes(), []byte("chose a pattern")), "for 20,000 and for 1000")
}

// eachChoice runs body for each pattern that Auto may choose among three ranks, with a communicator over which it does.
func eachChoice(t *testing.T, body func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime, faults *standin.Faulty)) {
	for _, pattern := range []string{sparse.Dense, sparse.TopkA, sparse.TopkAopt, sparse.Gtopk, sparse.Oktopk} {
		t.Run(pattern, func(t *testing.T) {
			standin.World(t, 3, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				faults := standin.NewFaulty(c)
				body(ctx, standin.Prefer(faults, pattern), rt, faults)
				return nil
			})
		})
	}
}

// The outcome of a gradient that is not finite, and of a step that fails, follows from the configuration, whatever was
// chosen for the buckets, and so do states: each continues in a Gradients for which another pattern was chosen.
func TestAutoPolicies(t *testing.T) {
	cfg := ddp.Config{Config: sparse.Config{Pattern: sparse.Auto, Density: 0.02}}
	patterns := map[string]bool{}
	var mu sync.Mutex
	eachChoice(t, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime, faults *standin.Faulty) {
		params := []*runtime.Tensor{matrix(t, rt, 50, 100), matrix(t, rt, 7)} // a vector is dense
		defer standin.Free(t, params)
		load := func(step int) {
			for i, p := range params {
				require.NoError(t, runtime.CopyIn(p, standin.Normal(p.Len(), c.Rank(), step, i)))
			}
		}
		g, err := ddp.New(ctx, rt, c, params, cfg)
		require.NoError(t, err)
		defer g.Close()
		mu.Lock()
		patterns[g.Patterns()[1]] = true
		mu.Unlock()
		assert.True(t, g.RollsBack())
		load(0)
		require.NoError(t, g.ReduceAll(ctx, params))

		for i, p := range params {
			load(1)
			if c.Rank() == 1 {
				bad := standin.Normal(p.Len(), 5)
				bad[3] = float32(math.NaN())
				require.NoError(t, runtime.CopyIn(p, bad))
			}
			require.NoError(t, g.ReduceAll(ctx, params))
			stats, err := g.Stats(ctx)
			require.NoError(t, err)
			assert.True(t, stats.Skipped, "gradient %d", i)
			for _, p := range params {
				assert.Equal(t, make([]uint32, p.Len()), standin.Bits(p))
			}
		}

		load(2)
		before := [][]uint32{slices.Clone(standin.Bits(params[0])), slices.Clone(standin.Bits(params[1]))}
		faults.Calls, faults.At = 0, 0
		require.ErrorIs(t, g.ReduceAll(ctx, params), standin.ErrFault)
		for i, p := range params {
			assert.Equal(t, before[i], standin.Bits(p))
		}
		require.NoError(t, g.ReduceAll(ctx, params))
		residuals, err := g.Residuals()
		require.NoError(t, err)
		assert.Len(t, residuals, 1)

		state, err := g.State(ctx)
		require.NoError(t, err)
		prefers := sparse.Dense
		if g.Patterns()[1] == sparse.Dense {
			prefers = sparse.TopkA
		}
		other, err := ddp.New(ctx, rt, standin.Prefer(faults, prefers), params, cfg)
		require.NoError(t, err)
		defer other.Close()
		require.NotEqual(t, g.Patterns(), other.Patterns())
		require.NoError(t, other.Restore(ctx, state))
		assert.True(t, other.RollsBack())
		assert.Equal(t, g.Patterns(), other.Patterns())
		load(3)
		require.NoError(t, g.ReduceAll(ctx, params))
		want := slices.Clone(standin.Bits(params[0]))
		load(3)
		require.NoError(t, other.ReduceAll(ctx, params))
		assert.Equal(t, want, standin.Bits(params[0]))
	})
	assert.Len(t, patterns, 5, "%v", patterns)
}

// Options that exclude sparse buckets are refused with Auto, whatever would be chosen, before anything is measured.
func TestAutoExcludes(t *testing.T) {
	auto := sparse.Config{Pattern: sparse.Auto, Density: 0.02}
	eachChoice(t, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime, faults *standin.Faulty) {
		params := []*runtime.Tensor{matrix(t, rt, 50, 100)}
		defer standin.Free(t, params)
		for name, cfg := range map[string]ddp.Config{"Sum": {Config: auto, Sum: true}, "Wire": {Config: auto, Wire: dtype.BF16},
			"Shard": {Config: auto, Shard: true}} {
			faults.Calls = 0
			_, err := ddp.New(ctx, rt, c, params, cfg)
			assert.ErrorIs(t, err, comm.ErrArgument, name)
			assert.Zero(t, faults.Calls, "%s: nothing was measured", name)
		}
		double, err := runtime.New(rt, dtype.F64, 50, 100)
		require.NoError(t, err)
		defer double.Free()
		_, err = ddp.New(ctx, rt, c, []*runtime.Tensor{params[0], double}, ddp.Config{Config: auto})
		assert.ErrorIs(t, err, comm.ErrUnsupported)
		assert.ErrorContains(t, err, "gradient 1: ")
		unjudged := auto
		unjudged.NoUndo = true
		g, err := ddp.New(ctx, rt, c, params, ddp.Config{Config: unjudged})
		require.NoError(t, err)
		assert.False(t, g.RollsBack())
		require.NoError(t, g.Close())
	})
}

// matrix makes a gradient of zeros.
func matrix(t *testing.T, rt runtime.Runtime, shape ...int) *runtime.Tensor {
	m, err := runtime.New(rt, dtype.F32, shape...)
	require.NoError(t, err)
	return m
}
