package sparse_test

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// strayIndices is a communicator whose lists have an index that no tensor of n
// elements has, once.
type strayIndices struct {
	comm.Methods
	comm.Wrapped
	armed bool
	n     int
}

func newStray(c comm.Communicator, n int) *strayIndices {
	s := &strayIndices{Wrapped: comm.Wrap(c), n: n}
	s.Methods = comm.Methods{
		Do: func(call comm.Call) error {
			if err := call.Make(c); err != nil || !s.armed || call.DType != dtype.I32 || call.Count < 10 {
				return err
			}
			if err := c.Sync(context.Background()); err != nil {
				return err
			}
			s.armed = false
			hostmem.Slice[int32](call.Recv, 1)[0] = int32(s.n)
			return nil
		},
		Together: func(calls []comm.Call) error { return c.Group(calls...) },
	}
	return s
}

// TestStrayIndices: indices that the tensor does not have are left out, and every
// step that follows says so, whatever its exchange reads and policies ask for.
func TestStrayIndices(t *testing.T) {
	const n, bad, steps = 3000, 1, 4
	for _, cfg := range []sparse.Config{
		{Pattern: "topkA", Density: 0.1}, {Pattern: "topkA", Density: 0.1, NonFinite: sparse.PassNonFinite},
		{Pattern: "topkA", Density: 0.1, NoUndo: true}, {Pattern: "gtopk", Density: 0.1, NonFinite: sparse.PassNonFinite},
	} {
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			stray := newStray(c, n)
			u, err := standin.NewTrainee(rt, stray, cfg, n)
			require.NoError(t, err)
			var errs []error
			for step := range steps {
				stray.armed = step == bad && (c.Rank() == 0 || cfg.Pattern == "topkA")
				ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
				errs = append(errs, u.Step(ctx, step))
				cancel()
				if errs[step] != nil && c.Rank() == 0 {
					_ = c.Close() // the other one waits otherwise
				}
			}
			if c.Rank() == 0 {
				assert.NoError(t, errs[0], "%+v", cfg)
				assert.ErrorIs(t, errs[bad+1], comm.ErrMismatch, "%+v", cfg)
				assert.ErrorContains(t, errs[bad+1], "indices", "%+v", cfg)
				assert.Error(t, errs[bad+2], "%+v", cfg)
			}
			_ = c.Close() // it may say what is unfinished
			return u.Close()
		})
	}
}

// TestDenseVelocity: velocities of F16 gradients outgrow the type in dense steps,
// too. What results have no room for comes later, and nothing is dropped.
func TestDenseVelocity(t *testing.T) {
	const n, steps, warmup, value, momentum, largest = 40, 60, 20, 8000, 0.9, 65504
	for _, cfg := range []sparse.Config{
		{Momentum: momentum, NonFinite: sparse.SkipNonFinite},
		{Pattern: "topkA", Density: 1, Momentum: momentum, Schedule: sparse.Schedule{WarmupSteps: warmup}},
	} {
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			s, err := sparse.New(rt, c, n, cfg)
			require.NoError(t, err)
			g, err := runtime.New(rt, dtype.F16, n)
			require.NoError(t, err)
			var velocity, in, out float64
			for step := range steps {
				x := float64(value)
				if step >= steps/2 {
					x = 0 // what is left comes out
				}
				require.NoError(t, errors.Join(g.Fill(x), s.AllReduce(ctx, g)))
				stats, err := s.Stats(ctx)
				require.NoError(t, err)
				assert.False(t, stats.Skipped, "step %d", step)
				if velocity = momentum*velocity + x; step >= warmup && cfg.Pattern == "topkA" {
					velocity = x // what was sent before is masked, but for the first time
					if step == warmup {
						velocity = 0
						for range warmup {
							velocity = momentum*velocity + x
						}
						velocity = momentum*velocity + x
					}
				}
				in += velocity
				got := make([]byte, 2*n)
				ptr, err := g.Ptr()
				require.NoError(t, errors.Join(err, rt.CopyOut(got, ptr)))
				values := make([]float32, n)
				require.NoError(t, dtype.ToFloat32(values, got, dtype.F16))
				require.LessOrEqual(t, values[3], float32(largest))
				out += float64(values[3])
			}
			assert.InEpsilon(t, in, out, 1e-3, "%+v", cfg)
			return errors.Join(s.Close(), g.Free())
		})
	}
}

// TestScaleResidualInPlace: what was not sent is in a tensor that is its owner's.
func TestScaleResidualInPlace(t *testing.T) {
	standin.World(t, 1, func(_ context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		s, err := sparse.New(rt, c, 100, sparse.Config{Pattern: "topkA", Density: 0.1, NoUndo: true, InPlace: true})
		require.NoError(t, err)
		assert.ErrorIs(t, s.ScaleResidual(2), comm.ErrUnsupported)
		return s.Close()
	})
}

// TestChoiceIsUndone: a step that fails takes the choice that it began with back, so
// that all ranks choose again, also those that the failure kept from choosing; and a
// state from before the choice undoes it.
func TestChoiceIsUndone(t *testing.T) {
	const n, ranks = 20_000, 2
	others, err := local.New(ranks)
	require.NoError(t, err)
	standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		f := standin.NewFaulty(standin.Pace(c, func(call comm.Call) time.Duration {
			if call.Op == comm.OpAllReduce && call.Count > 100 {
				return 5 * time.Millisecond
			}
			return 0
		}))
		u, err := standin.NewTrainee(rt, f, sparse.Config{Pattern: sparse.Auto, Density: 0.02}, n)
		require.NoError(t, err)
		virgin, err := u.S.State(ctx)
		require.NoError(t, err)
		require.NoError(t, u.Load(0))
		given := standin.Bits(u.T)
		failing := &lastCall{Communicator: f, sparse: u.S}
		require.NoError(t, u.S.Rebind(failing))
		failing.armed = true
		assert.ErrorIs(t, u.S.AllReduce(ctx, u.T), standin.ErrFault)
		assert.True(t, failing.made, "the choice was made before the fault")
		assert.Equal(t, given, standin.Bits(u.T))
		stats, err := u.S.Stats(ctx)
		require.NoError(t, err)
		assert.Nil(t, stats.Choice)
		_, err = u.S.Residual()
		assert.ErrorIs(t, err, comm.ErrUnsupported, "nothing is chosen")
		state, err := u.S.State(ctx)
		require.NoError(t, err)
		assert.Equal(t, virgin, state)
		require.NoError(t, errors.Join(c.Close(), u.S.Rebind(others[c.Rank()]), u.S.AllReduce(ctx, u.T)))
		stats, err = u.S.Stats(ctx)
		require.NoError(t, err)
		assert.NotNil(t, stats.Choice)
		require.NoError(t, u.S.Restore(ctx, virgin))
		_, err = u.S.Residual()
		assert.ErrorIs(t, err, comm.ErrUnsupported, "nothing is chosen any more")
		require.NoError(t, u.Step(ctx, 0))
		return errors.Join(u.Close(), others[c.Rank()].Close())
	})
}

// TestChoiceWithoutMemory: where there is no memory to undo steps of the pattern that was
// chosen, the step fails, and those that follow can be undone.
func TestChoiceWithoutMemory(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		f := standin.NewFaulty(standin.Pace(c, func(call comm.Call) time.Duration {
			if call.Op == comm.OpAllReduce && call.Count > 100 {
				return 5 * time.Millisecond
			}
			return 0
		}))
		scarce := &scarce{Runtime: rt}
		u, err := standin.NewTrainee(scarce, f, sparse.Config{Pattern: sparse.Auto, Density: 0.02}, 20_000)
		require.NoError(t, err)
		scarce.left, scarce.sparse = 1, u.S
		assert.ErrorIs(t, u.Step(ctx, 0), runtime.ErrOutOfMemory)
		require.NoError(t, u.Step(ctx, 0))
		before := u.State()
		f.Calls, f.At = 0, 0
		assert.ErrorIs(t, u.Step(ctx, 1), standin.ErrFault)
		assert.Equal(t, before, u.State())
		return u.Close()
	})
}

// scarce has memory for so many allocations when a pattern has been chosen, and then for
// all but one.
type scarce struct {
	*cpu.Runtime
	sparse *sparse.Reducer
	left   int
}

func (s *scarce) Allocate(n int) (uintptr, error) {
	if s.sparse != nil {
		if _, err := s.sparse.Residual(); !errors.Is(err, comm.ErrUnsupported) {
			if s.left--; s.left < 0 {
				s.sparse = nil
				return 0, runtime.ErrOutOfMemory
			}
		}
	}
	return s.Runtime.Allocate(n)
}

// lastCall fails the wait of a step in which the pattern has been chosen.
type lastCall struct {
	comm.Communicator
	sparse      *sparse.Reducer
	armed, made bool
}

func (l *lastCall) Sync(ctx context.Context) error {
	if _, unchosen := l.sparse.Residual(); l.armed && unchosen == nil {
		l.armed, l.made = false, true
		return standin.ErrFault
	}
	return l.Communicator.Sync(ctx)
}

// TestVelocityOtherWorld saves a run with momentum and goes on with fewer and with
// more ranks: the mean of the velocities and the sum of the residuals stay, and
// every rank has a velocity.
func TestVelocityOtherWorld(t *testing.T) {
	const n, steps = 500, 4
	cfg := sparse.Config{Pattern: "topkA", Density: 0.1, Momentum: 0.9}
	// sums are of the residuals and the velocities in states of all ranks.
	sums := func(states [][]byte) (residual, velocity []float64) {
		residual, velocity = make([]float64, n), make([]float64, n)
		for rank, state := range states {
			values := state[len(state)-4-8*n:]
			most := 0.0
			for i := range n {
				residual[i] += float64(math.Float32frombits(binary.LittleEndian.Uint32(values[4*i:])))
				v := float64(math.Float32frombits(binary.LittleEndian.Uint32(values[4*(n+i):])))
				velocity[i] += v
				most = max(most, math.Abs(v))
			}
			assert.Positive(t, most, "rank %d of %d has no velocity", rank, len(states))
		}
		return residual, velocity
	}
	for _, saved := range []int{2, 5} {
		states := make([][]byte, saved)
		standin.World(t, saved, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			u, err := standin.NewTrainee(rt, c, cfg, n)
			for step := range steps {
				if err == nil {
					err = u.Step(ctx, step)
				}
			}
			if err != nil {
				return err
			}
			states[c.Rank()], err = u.S.State(ctx)
			return errors.Join(err, u.Close())
		})
		residual, velocity := sums(states)
		for _, size := range []int{1, 2, 3, 4, 7} {
			again := make([][]byte, size)
			standin.World(t, size, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				u, err := standin.NewTrainee(rt, c, cfg, n)
				if err != nil {
					return err
				}
				var mine [][]byte
				for _, r := range sparse.RestoreRanks(saved, size, c.Rank()) {
					mine = append(mine, states[r])
				}
				if err := u.S.Restore(ctx, mine...); err != nil {
					return err
				}
				again[c.Rank()], err = u.S.State(ctx)
				return errors.Join(err, u.Step(ctx, steps), u.Close())
			})
			r, v := sums(again)
			for i := range n {
				assert.InDelta(t, residual[i], r[i], 1e-5*(1+math.Abs(residual[i])), "%d to %d ranks, index %d", saved, size, i)
				want := velocity[i] / float64(saved)
				assert.InDelta(t, want, v[i]/float64(size), 1e-5*(1+math.Abs(want)), "%d to %d ranks, index %d", saved, size, i)
			}
		}
	}
}

// TestNoZerosInSplit: the split allreduce of topkSA does not send the zeros that fill
// up a list of k entries.
func TestNoZerosInSplit(t *testing.T) {
	few := func(rank, _ int) []float32 {
		g := make([]float32, 10_000)
		g[3000*rank], g[3000*rank+1] = 1, -2
		return g
	}
	assert.Less(t, measureVolume(t, "topkSA", 3, 10_000, 2, 0.1, few).most, 60.0)
}
