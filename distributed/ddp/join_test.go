package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestJoin: ranks with data for different numbers of steps, one without any, keep
// the same parameters for two epochs; averages are over all ranks.
func TestJoin(t *testing.T) {
	const epochs = 2
	have := []int{5, 2, 0}
	for _, cfg := range []sparse.Config{{}, {Pattern: sparse.TopkA, Density: 0.5}, {Pattern: sparse.Gtopk, Density: 0.5}, {Pattern: sparse.TopkSA, Density: 0.5}} {
		t.Run(fmt.Sprintf("pattern=%s", cfg.Pattern), func(t *testing.T) {
			updates := make([][][]float32, len(have))
			standin.World(t, len(have), func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				x, err := runtime.New(rt, dtype.F32, 4)
				require.NoError(t, err)
				y, err := runtime.New(rt, dtype.F32, 1)
				require.NoError(t, err)
				all := []*runtime.Tensor{x, y}
				g, err := ddp.New(ctx, rt, c, all, ddp.Config{Config: cfg, DenseUpTo: -1, Uneven: true})
				require.NoError(t, err)
				update := func() error {
					var step []float32
					for i := range all {
						values, err := cpu.Slice[float32](g.Result(i))
						require.NoError(t, err)
						step = append(step, values...)
					}
					updates[c.Rank()] = append(updates[c.Rank()], step)
					return nil
				}
				for range epochs {
					for step := range have[c.Rank()] {
						require.NoError(t, x.Fill(float64(3*(step+1)*(c.Rank()+1))))
						require.NoError(t, y.Fill(6))
						if err := g.ReduceAll(ctx, all); err != nil {
							return err
						}
						require.NoError(t, update())
					}
					if err := g.Join(ctx, all, update); err != nil {
						return err
					}
				}
				stats, err := g.Stats(ctx)
				require.NoError(t, err)
				assert.Equal(t, epochs*have[0], stats.Step+1)
				require.NoError(t, g.Close())
				standin.Free(t, all)
				return nil
			})
			assert.Len(t, updates[0], epochs*have[0])
			assert.Equal(t, updates[0], updates[1])
			assert.Equal(t, updates[0], updates[2])
			if cfg.Pattern == "" {
				want := [][]float32{{3, 3, 3, 3, 4}, {6, 6, 6, 6, 4}, {3, 3, 3, 3, 2}, {4, 4, 4, 4, 2}, {5, 5, 5, 5, 2}}
				assert.Equal(t, append(want, want...), updates[0])
			}
		})
	}
}

// An update that reads the gradients' own memory is the same on all ranks, in Join as after Wait,
// also on a rank that never had data, and where gradients live in the buckets.
func TestJoinUpdatesFromGradients(t *testing.T) {
	const n = 3841
	have := []int{4, 2, 0}
	for _, cfg := range []ddp.Config{{}, {BucketViews: true}, {Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}, DenseUpTo: -1}} {
		cfg.Uneven = true
		parameters := make([][]float32, len(have))
		standin.World(t, len(have), func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			params := []*runtime.Tensor{nil, nil}
			for i, length := range []int{n, 7} {
				var err error
				params[i], err = runtime.New(rt, dtype.F32, length)
				require.NoError(t, err)
			}
			g, err := ddp.New(ctx, rt, c, params, cfg)
			require.NoError(t, err)
			all := params
			if cfg.BucketViews {
				all = g.Views()
			}
			parameter := make([]float32, n+7)
			update := func() error {
				at := 0
				for _, tensor := range all {
					values, err := cpu.Slice[float32](tensor)
					if err != nil {
						return err
					}
					for _, x := range values {
						parameter[at] -= 0.1 * x
						at++
					}
				}
				return nil
			}
			for step := range have[c.Rank()] {
				for i, tensor := range all {
					require.NoError(t, runtime.CopyIn(tensor, standin.Normal(tensor.Len(), c.Rank(), step, i)))
				}
				if err := errors.Join(g.ReduceAll(ctx, all), update()); err != nil {
					return err
				}
			}
			given := all
			if cfg.BucketViews {
				given = nil
			}
			if err := g.Join(ctx, given, update); err != nil {
				return err
			}
			parameters[c.Rank()] = parameter
			require.NoError(t, g.Close())
			standin.Free(t, params)
			return nil
		})
		assert.NotZero(t, parameters[0][0])
		for r := range have {
			assert.Equal(t, parameters[0], parameters[r], "rank %d", r)
		}
	}
}

// TestAnnounceAfterAFailure: the number by which a rank says that it has data is not written while the communicator may
// still read it in a step that failed.
func TestAnnounceAfterAFailure(t *testing.T) {
	standin.WithStreams(t, func(ctx context.Context, s *standin.Streamed, c comm.Communicator) {
		params := standin.Gradients(t, s, 1)
		own := &halves{}
		g, err := ddp.New(ctx, s, c, params, ddp.Config{Uneven: true, Reducer: func(b ddp.Bucket) (ddp.Reducer, error) {
			var err error
			own.residual, err = runtime.New(b.Tensor.Runtime(), dtype.F32, b.Tensor.Len())
			return own, errors.Join(err, own.residual.Fill(0))
		}})
		require.NoError(t, err)
		own.fails = errors.New("told to fail")
		require.ErrorIs(t, g.ReduceAll(ctx, params), own.fails)
		s.Take()
		require.ErrorIs(t, g.ReduceAll(ctx, params), own.fails)
		assert.Regexp(t, "^HOST-WAITS", s.Take())
		require.NoError(t, g.Close())
		standin.Free(t, params)
	})
}

// TestJoinMisuse: without Uneven, in the middle of a step, and when update fails.
func TestJoinMisuse(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		all := standin.Gradients(t, rt, 2)
		for _, uneven := range []bool{false, true} {
			g, err := ddp.New(ctx, rt, c, all, ddp.Config{Uneven: uneven})
			require.NoError(t, err)
			if uneven {
				require.NoError(t, g.Join(ctx, nil, nil), "everybody is out of data")
				assert.ErrorIs(t, g.Join(ctx, nil, func() error { return nil }), comm.ErrArgument, "update has no place to look")
				assert.ErrorIs(t, g.Join(ctx, all[:1], nil), comm.ErrArgument)
				assert.ErrorIs(t, g.Join(ctx, []*runtime.Tensor{all[0], nil}, nil), comm.ErrArgument)
			}
			require.NoError(t, g.Ready(ctx, 0, all[0]))
			assert.ErrorIs(t, g.Join(ctx, nil, nil), comm.ErrArgument)
			require.NoError(t, g.Wait(ctx))
			require.NoError(t, g.Close())
		}
		standin.Free(t, all)
		return nil
	})
	full := errors.New("disk full")
	err := local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		all := standin.Gradients(t, rt, 1)
		g, err := ddp.New(ctx, rt, c, all, ddp.Config{Uneven: true})
		require.NoError(t, err)
		if c.Rank() == 1 {
			return g.Join(ctx, all, func() error { return full })
		}
		for err == nil {
			err = g.ReduceAll(ctx, all)
		}
		assert.ErrorIs(t, err, comm.ErrPeerFailed)
		return err
	})
	assert.ErrorIs(t, err, full)
}

// TestJoinWithoutUpdate: a rank may have nothing to do after the steps of others.
func TestJoinWithoutUpdate(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		all := standin.Gradients(t, rt, 2)
		g, err := ddp.New(ctx, rt, c, all, ddp.Config{Uneven: true})
		require.NoError(t, err)
		if c.Rank() == 0 {
			require.NoError(t, g.ReduceAll(ctx, all))
		}
		require.NoError(t, g.Join(ctx, nil, nil))
		require.NoError(t, g.Close())
		standin.Free(t, all)
		return nil
	})
}
