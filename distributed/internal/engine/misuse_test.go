package engine_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// corrupting is a communicator that changes one of the words that a rank gets
// when ranks exchange a few of them.
type corrupting struct {
	comm.Communicator
	exchange string // "allgather" or "alltoall"
	words    int    // how many each rank sends
	value    int32
}

func (c corrupting) corrupt(exchange string, recv uintptr, words int, dt dtype.DType) error {
	if err := c.Sync(context.Background()); err != nil || dt != dtype.I32 || exchange != c.exchange || words != c.words {
		return err
	}
	hostmem.Slice[int32](recv, words*c.WorldSize())[words*(c.WorldSize()-1-c.Rank())] = c.value
	return nil
}

func (c corrupting) AllGather(send, recv uintptr, n int, dt dtype.DType) error {
	if err := c.Communicator.AllGather(send, recv, n, dt); err != nil || n > c.words {
		return err // a list, perhaps in a group, in which nothing can be waited for
	}
	return c.corrupt("allgather", recv, n, dt)
}

func (c corrupting) AllToAll(send, recv uintptr, n int, dt dtype.DType) error {
	if err := c.Communicator.AllToAll(send, recv, n, dt); err != nil {
		return err
	}
	return c.corrupt("alltoall", recv, n, dt)
}

// TestImpossibleLengths checks that what a peer announces is compared with the
// tensor before memory is sized by it: no rank asks for more than a small
// multiple of what a step takes.
func TestImpossibleLengths(t *testing.T) {
	const n, density = 6000, 0.1
	for _, k := range []struct {
		pattern  string
		exchange string
		words    int
		value    int32 // one above the largest possible, or far from possible
	}{
		{"topkAopt", "allgather", 1, 2*n/10 + 1},
		{"topkAopt", "allgather", 1, -1},
		{"topkAopt", "allgather", 1, 1 << 30},
		{"gaussiank", "allgather", 1, 1 << 30},
		{"gaussiankconcat", "allgather", 1, 1 << 30},
		{"topkSA", "alltoall", 1, n/2 + 1},
		{"topkSA", "alltoall", 1, -1},
		{"topkSA", "allgather", 1, n/2 + 1},
		{"gaussiankSA", "alltoall", 1, 1 << 30},
		{"oktopk", "alltoall", 1, 1 << 30},
		{"oktopk", "allgather", 1, 1 << 30},
		{"oktopk", "allgather", 4, n},
		{"oktopk", "allgather", 4, -1},
	} {
		t.Run(fmt.Sprintf("%s, %s of %d: %d", k.pattern, k.exchange, k.words, k.value), func(t *testing.T) {
			rt := cpu.New()
			require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
				g, err := runtime.FromSlice(rt, standin.Normal(n, c.Rank()), n)
				if err != nil {
					return err
				}
				s, err := engine.New(rt, corrupting{c, k.exchange, k.words, k.value}, n, engine.Config{Pattern: k.pattern, Density: density})
				if err != nil {
					return err
				}
				for range 2 { // the error stays
					err = s.AllReduce(ctx, g)
					assert.ErrorIs(t, err, comm.ErrMismatch)
					assert.ErrorContains(t, err, fmt.Sprintf("rank %d of 2 announces %d", 1-c.Rank(), k.value))
				}
				if err := s.Close(); err != nil {
					return err
				}
				return g.Free()
			}))
			assert.Less(t, rt.Stats().PeakBytes, int64(1<<20))
			require.NoError(t, rt.Close())
		})
	}
}

// TestTensorsOfTwoLengths has a rank reduce a longer tensor than the other.
func TestTensorsOfTwoLengths(t *testing.T) {
	const n = 100
	rt := cpu.New()
	err := local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		mine := n * (1 + 99*c.Rank())
		g, err := runtime.FromSlice(rt, standin.Normal(mine, c.Rank()), mine)
		if err != nil {
			return err
		}
		defer g.Free()
		s, err := engine.New(rt, c, mine, engine.Config{Pattern: "topkAopt", Density: 0.5})
		if err != nil {
			return err
		}
		err = s.AllReduce(ctx, g)
		assert.ErrorIs(t, err, comm.ErrMismatch)
		assert.ErrorContains(t, err, `rank 0 has "100 elements", rank 1 has "10000 elements"`)
		return errors.Join(err, c.Close(), s.Close())
	})
	assert.ErrorIs(t, err, comm.ErrMismatch)
	require.NoError(t, rt.Close())
}

// TestRanksDisagree has the last rank reduce in another way than the others. All
// ranks name the difference, and nothing has happened: those that agree after all
// go on.
func TestRanksDisagree(t *testing.T) {
	const ranks, n = 3, 500
	cfg := engine.Config{Pattern: "topkA", Density: 0.1}
	with := func(change func(c *engine.Config)) engine.Config {
		other := cfg
		change(&other)
		return other
	}
	for what, other := range map[string]struct {
		cfg  engine.Config
		n    int
		dt   dtype.DType
		want string
	}{
		"pattern":    {with(func(c *engine.Config) { c.Pattern = "topkA2" }), n, dtype.F32, `rank 0 has "Pattern topkA", rank 2 has "Pattern topkA2"`},
		"density":    {with(func(c *engine.Config) { c.Density = 0.2 }), n, dtype.F32, `rank 0 has "Density 0.1", rank 2 has "Density 0.2"`},
		"type":       {cfg, n, dtype.BF16, `rank 0 has "f32", rank 2 has "bf16"`},
		"length":     {cfg, n + 1, dtype.F32, `rank 0 has "500 elements", rank 2 has "501 elements"`},
		"clipping":   {with(func(c *engine.Config) { c.ClipNorm = 1 }), n, dtype.F32, `rank 2 has "ClipNorm 1"`},
		"the policy": {with(func(c *engine.Config) { c.NonFinite = engine.FailNonFinite }), n, dtype.F32, `rank 2 has "NonFinite 3"`},
	} {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			mine, length, dt := cfg, n, dtype.F32
			if c.Rank() == ranks-1 {
				mine, length, dt = other.cfg, other.n, other.dt
			}
			s, err := engine.New(rt, c, length, mine)
			if err != nil {
				return err
			}
			g, err := runtime.New(rt, dt, length)
			if err != nil {
				return err
			}
			err = errors.Join(g.Fill(1), s.AllReduce(ctx, g))
			assert.ErrorIs(t, err, comm.ErrMismatch, what)
			assert.ErrorContains(t, err, other.want, what)
			if c.Rank() == ranks-1 {
				require.NoError(t, errors.Join(s.Close(), g.Free()))
				if s, err = engine.New(rt, c, n, cfg); err != nil {
					return err
				}
				if g, err = runtime.New(rt, dtype.F32, n); err != nil {
					return err
				}
				require.NoError(t, g.Fill(1))
			}
			return errors.Join(s.AllReduce(ctx, g), s.Close(), g.Free())
		})
	}
}

// The parts of a step have an order, and RollBack rolls back whatever was done of it.
func TestPartsOfAStep(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		const n = 100
		s, err := engine.New(rt, c, n, engine.Config{Pattern: sparsity.TopkA, Density: 0.1})
		require.NoError(t, err)
		g, err := runtime.FromSlice(rt, standin.Normal(n, c.Rank()), n)
		require.NoError(t, err)
		residual, err := s.Residual()
		require.NoError(t, err)
		in, gradient, before := engine.Input{Ptr: standin.Pointer(g), DType: dtype.F32}, standin.Bits(g), standin.Bits(residual)
		assert.ErrorIs(t, s.Exchange(ctx), comm.ErrArgument)
		assert.ErrorIs(t, s.Commit(engine.Passes), comm.ErrArgument)
		assert.NoError(t, s.RollBack(), "nothing was begun")
		for parts := range 3 {
			require.NoError(t, s.Select(ctx, in))
			if parts > 0 {
				require.NoError(t, s.Exchange(ctx))
				assert.ErrorIs(t, s.Exchange(ctx), comm.ErrArgument)
			}
			if parts > 1 {
				_, err := s.Complete(ctx)
				require.NoError(t, err)
			}
			_, err = s.State(ctx)
			for i, err := range []error{s.Select(ctx, in), s.AllReduce(ctx, g), s.Restore(ctx, nil), s.ScaleResidual(2), s.Rebind(c), err} {
				assert.ErrorIs(t, err, comm.ErrArgument, "%d", i)
				assert.ErrorContains(t, err, "in the middle of a step", "%d", i)
			}
			require.NoError(t, s.RollBack())
			residual, err := s.Residual()
			require.NoError(t, err)
			standin.SameBits(t, before, standin.Bits(residual), "after %d parts", parts+1)
			standin.SameBits(t, gradient, standin.Bits(g), "after %d parts", parts+1)
			assert.ErrorIs(t, s.Commit(engine.Passes), comm.ErrArgument)
		}
		require.NoError(t, s.Select(ctx, in))
		require.NoError(t, s.Exchange(ctx))
		_, err = s.Complete(ctx)
		require.NoError(t, err)
		require.NoError(t, s.Commit(engine.Passes))
		stats, err := s.Stats(ctx)
		assert.Zero(t, stats.Step, "steps that were rolled back do not count")
		return errors.Join(err, s.Close(), g.Free())
	})
}
