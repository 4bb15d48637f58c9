package distributed_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"log/slog"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
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
	for _, cfg := range []distributed.Config{
		{Pattern: "topkA", Density: 0.1}, {Pattern: "topkA", Density: 0.1, Overflow: distributed.OverflowPass},
		{Pattern: "topkA", Density: 0.1, NoUndo: true}, {Pattern: "gtopk", Density: 0.1, Overflow: distributed.OverflowPass},
	} {
		world(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			stray := newStray(c, n)
			u, err := newTrainee(rt, stray, cfg, n)
			require.NoError(t, err)
			var errs []error
			for step := range steps {
				stray.armed = step == bad && (c.Rank() == 0 || cfg.Pattern == "topkA")
				ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
				errs = append(errs, u.step(ctx, step))
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
			return u.close()
		})
	}
}

// TestDenseVelocity: velocities of F16 gradients outgrow the type in dense steps,
// too. What results have no room for comes later, and nothing is dropped.
func TestDenseVelocity(t *testing.T) {
	const n, steps, warmup, value, momentum, largest = 40, 60, 20, 8000, 0.9, 65504
	for _, cfg := range []distributed.Config{
		{Momentum: momentum, Overflow: distributed.OverflowDrop},
		{Pattern: "topkA", Density: 1, Momentum: momentum, Schedule: distributed.Schedule{WarmupSteps: warmup}},
	} {
		world(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			s, err := distributed.NewSparse(rt, c, n, cfg)
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
	world(t, 1, func(_ context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		s, err := distributed.NewSparse(rt, c, 100, distributed.Config{Pattern: "topkA", Density: 0.1, NoUndo: true, InPlace: true})
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
	world(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		f := newFaulty(pace(c, func(call comm.Call) time.Duration {
			if call.Op == comm.OpAllReduce && call.Count > 100 {
				return 5 * time.Millisecond
			}
			return 0
		}))
		u, err := newTrainee(rt, f, distributed.Config{Pattern: distributed.Auto, Density: 0.02}, n)
		require.NoError(t, err)
		virgin, err := u.s.State(ctx)
		require.NoError(t, err)
		require.NoError(t, u.load(0))
		given := bits(u.t)
		failing := &lastCall{Communicator: f, sparse: u.s}
		require.NoError(t, u.s.Rebind(failing))
		failing.armed = true
		assert.ErrorIs(t, u.s.AllReduce(ctx, u.t), errFault)
		assert.True(t, failing.made, "the choice was made before the fault")
		assert.Equal(t, given, bits(u.t))
		stats, err := u.s.Stats(ctx)
		require.NoError(t, err)
		assert.Nil(t, stats.Choice)
		_, err = u.s.Residual()
		assert.ErrorIs(t, err, comm.ErrUnsupported, "nothing is chosen")
		state, err := u.s.State(ctx)
		require.NoError(t, err)
		assert.Equal(t, virgin, state)
		require.NoError(t, errors.Join(c.Close(), u.s.Rebind(others[c.Rank()]), u.s.AllReduce(ctx, u.t)))
		stats, err = u.s.Stats(ctx)
		require.NoError(t, err)
		assert.NotNil(t, stats.Choice)
		require.NoError(t, u.s.Restore(ctx, virgin))
		_, err = u.s.Residual()
		assert.ErrorIs(t, err, comm.ErrUnsupported, "nothing is chosen any more")
		require.NoError(t, u.step(ctx, 0))
		return errors.Join(u.close(), others[c.Rank()].Close())
	})
}

// TestChoiceWithoutMemory: where there is no memory to undo steps of the pattern that was
// chosen, the step fails, and those that follow can be undone.
func TestChoiceWithoutMemory(t *testing.T) {
	world(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		f := newFaulty(pace(c, func(call comm.Call) time.Duration {
			if call.Op == comm.OpAllReduce && call.Count > 100 {
				return 5 * time.Millisecond
			}
			return 0
		}))
		scarce := &scarce{Runtime: rt}
		u, err := newTrainee(scarce, f, distributed.Config{Pattern: distributed.Auto, Density: 0.02}, 20_000)
		require.NoError(t, err)
		scarce.left, scarce.sparse = 1, u.s
		assert.ErrorIs(t, u.step(ctx, 0), runtime.ErrOutOfMemory)
		require.NoError(t, u.step(ctx, 0))
		before := u.state()
		f.calls, f.at = 0, 0
		assert.ErrorIs(t, u.step(ctx, 1), errFault)
		assert.Equal(t, before, u.state())
		return u.close()
	})
}

// scarce has memory for so many allocations when a pattern has been chosen, and then for
// all but one.
type scarce struct {
	*cpu.Runtime
	sparse *distributed.Sparse
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
	sparse      *distributed.Sparse
	armed, made bool
}

func (l *lastCall) Sync(ctx context.Context) error {
	if _, unchosen := l.sparse.Residual(); l.armed && unchosen == nil {
		l.armed, l.made = false, true
		return errFault
	}
	return l.Communicator.Sync(ctx)
}

// TestVelocityOtherWorld saves a run with momentum and goes on with fewer and with
// more ranks: the mean of the velocities and the sum of the residuals stay, and
// every rank has a velocity.
func TestVelocityOtherWorld(t *testing.T) {
	const n, steps = 500, 4
	cfg := distributed.Config{Pattern: "topkA", Density: 0.1, Momentum: 0.9}
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
		world(t, saved, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			u, err := newTrainee(rt, c, cfg, n)
			for step := range steps {
				if err == nil {
					err = u.step(ctx, step)
				}
			}
			if err != nil {
				return err
			}
			states[c.Rank()], err = u.s.State(ctx)
			return errors.Join(err, u.close())
		})
		residual, velocity := sums(states)
		for _, size := range []int{1, 2, 3, 4, 7} {
			again := make([][]byte, size)
			world(t, size, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				u, err := newTrainee(rt, c, cfg, n)
				if err != nil {
					return err
				}
				var mine [][]byte
				for _, r := range distributed.RestoreRanks(saved, size, c.Rank()) {
					mine = append(mine, states[r])
				}
				if err := u.s.Restore(ctx, mine...); err != nil {
					return err
				}
				again[c.Rank()], err = u.s.State(ctx)
				return errors.Join(err, u.step(ctx, steps), u.close())
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

// TestRestoreRebuilt goes on with a run whose buckets were filled anew after its first
// step: with the same buckets, and not a third time.
func TestRestoreRebuilt(t *testing.T) {
	cfg := distributed.GradientConfig{BucketBytes: 800, FirstBucketBytes: 400, Rebuild: true}
	world(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		params := gradients(t, rt, 5)
		order := []int{0, 2, 4, 1, 3}
		step := func(g *distributed.GradientSync) {
			for _, i := range order {
				require.NoError(t, params[i].Fill(float64(i+c.Rank())))
				require.NoError(t, g.Ready(ctx, i, params[i]))
			}
			require.NoError(t, g.Wait(ctx))
			for i, p := range params {
				values, err := cpu.Slice[float32](p)
				require.NoError(t, err)
				assert.InDelta(t, float64(i)+0.5, values[99], 1e-6)
			}
		}
		first, err := distributed.NewGradientSync(ctx, rt, c, params, cfg)
		require.NoError(t, err)
		step(first)
		state, err := first.State(ctx)
		require.NoError(t, err)

		second, err := distributed.NewGradientSync(ctx, rt, c, params, cfg)
		require.NoError(t, err)
		before := second.Buckets()
		for i := range len(state) {
			assert.ErrorIs(t, second.Restore(ctx, state[:i]), comm.ErrArgument)
		}
		assert.Equal(t, before, second.Buckets())
		require.NoError(t, second.Restore(ctx, state))
		assert.Equal(t, first.Buckets(), second.Buckets())
		assert.NotEqual(t, before, second.Buckets())
		order = []int{4, 3, 2, 1, 0}
		step(second)
		assert.Equal(t, first.Buckets(), second.Buckets())
		stats, err := second.Stats(ctx)
		require.NoError(t, err)
		assert.Equal(t, 1, stats.Step)

		other := cfg
		other.Rebuild = false
		third, err := distributed.NewGradientSync(ctx, rt, c, params, other)
		require.NoError(t, err)
		assert.ErrorIs(t, third.Restore(ctx, state), comm.ErrMismatch)
		assert.Equal(t, before, third.Buckets())
		require.NoError(t, errors.Join(first.Close(), second.Close(), third.Close()))
		free(t, params)
		return nil
	})
}

// TestRestoreOtherSteps: states of several ranks are of one step, also where all
// buckets are plain.
func TestRestoreOtherSteps(t *testing.T) {
	for _, cfg := range []distributed.GradientConfig{{}, sparseModel} {
		var states [2][]byte
		world(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			m, err := newModel(ctx, rt, c, cfg)
			require.NoError(t, err)
			for step := range 2 {
				require.NoError(t, errors.Join(m.load(step), m.sync.ReduceAll(ctx, m.params)))
				if step == c.Rank() {
					states[step], err = m.sync.State(ctx)
					require.NoError(t, err)
				}
			}
			return m.close()
		})
		world(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			m, err := newModel(ctx, rt, c, cfg)
			require.NoError(t, err)
			assert.ErrorIs(t, m.sync.Restore(ctx, states[0], states[1]), comm.ErrMismatch)
			stats, err := m.sync.Stats(ctx)
			require.NoError(t, err)
			assert.Zero(t, stats.Step)
			return m.close()
		})
	}
}

// TestRestoreOtherChoice goes on with a run for which other patterns were chosen: it
// has the bits of that run.
func TestRestoreOtherChoice(t *testing.T) {
	const ranks, steps = 2, 6
	cfg := distributed.GradientConfig{Config: distributed.Config{Pattern: distributed.Auto, Density: 0.05}, DenseUpTo: -1}
	// Where dense allreduces are slow, patterns are sparse, and where all else is, dense.
	slow := func(dense bool) func(comm.Call) time.Duration {
		return func(call comm.Call) time.Duration {
			if (call.Op == comm.OpAllReduce) == dense && call.Count > 100 {
				return 3 * time.Millisecond
			}
			return 0
		}
	}
	for _, sparseFirst := range []bool{true, false} {
		world(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			first, err := newModel(ctx, rt, pace(c, slow(sparseFirst)), cfg)
			require.NoError(t, err)
			second, err := newModel(ctx, rt, pace(c, slow(!sparseFirst)), cfg)
			require.NoError(t, err)
			assert.NotEqual(t, first.sync.Patterns(), second.sync.Patterns())
			step := func(m *model, step int) []uint32 {
				require.NoError(t, errors.Join(m.load(step), m.sync.ReduceAll(ctx, m.params)))
				return m.bits()
			}
			for i := range steps / 2 {
				step(first, i)
				step(second, i) // what it has is replaced
			}
			state, err := first.sync.State(ctx)
			require.NoError(t, err)
			other := cfg
			other.Density = 0.06
			third, err := newModel(ctx, rt, pace(c, slow(!sparseFirst)), other)
			require.NoError(t, err)
			before := third.sync.Patterns()
			if sparseFirst { // a plain allreduce has no density
				assert.ErrorIs(t, third.sync.Restore(ctx, state), comm.ErrMismatch)
				assert.Equal(t, before, third.sync.Patterns())
			}
			require.NoError(t, second.sync.Restore(ctx, state))
			assert.Equal(t, first.sync.Patterns(), second.sync.Patterns())
			for i := steps / 2; i < steps; i++ {
				assert.Equal(t, step(first, i), step(second, i))
			}
			return errors.Join(first.close(), second.close(), third.close())
		})
	}
}

// TestLostResiduals: a line of the log says that ranks are gone with what they had not
// sent, one for all buckets, and nothing where nothing is lost.
func TestLostResiduals(t *testing.T) {
	const ranks = 3
	var text bytes.Buffer
	var mu sync.Mutex
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(newLockedBuffer(&mu, &text), nil)))
	defer slog.SetDefault(before)
	for _, k := range []struct {
		pattern string
		fewer   int
		lines   int
	}{{"topkA", 1, 2}, {"topkA", 0, 0}, {distributed.Dense, 1, 0}} {
		others, err := local.New(ranks - k.fewer)
		require.NoError(t, err)
		text.Reset()
		world(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			u, err := newTrainee(rt, c, distributed.Config{Pattern: k.pattern, Density: 0.1}, 500)
			require.NoError(t, err)
			m, err := newModel(ctx, rt, c, distributed.GradientConfig{Config: distributed.Config{Pattern: k.pattern, Density: 0.1, ClipNorm: 9}})
			require.NoError(t, err)
			require.NoError(t, errors.Join(u.step(ctx, 0), m.load(0), m.sync.ReduceAll(ctx, m.params)))
			if rank := c.Rank(); rank < len(others) {
				defer others[rank].Close()
				require.NoError(t, errors.Join(u.s.Rebind(others[rank]), m.sync.Rebind(ctx, others[rank])))
				require.NoError(t, errors.Join(u.step(ctx, 1), m.load(1), m.sync.ReduceAll(ctx, m.params)))
			}
			return errors.Join(u.close(), m.close())
		})
		assert.Equal(t, k.lines, bytes.Count(text.Bytes(), []byte("is lost\" ranks=2 lost=1")), "%+v: %s", k, text.String())
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

// FuzzRestoreGradients forges states of a GradientSync, with checksums that are right:
// an error, or one that goes on.
func FuzzRestoreGradients(f *testing.F) {
	for i := range 60 {
		f.Add(uint8(i%3), uint16(5*i), []byte{byte(i), 1})
	}
	f.Fuzz(func(t *testing.T, which uint8, at uint16, change []byte) {
		cfg := []distributed.GradientConfig{{Rebuild: true}, sparseModel, {Config: distributed.Config{Pattern: distributed.Auto, Density: 0.1}}}[which%3]
		world(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			m, err := newModel(ctx, rt, c, cfg)
			require.NoError(t, err)
			require.NoError(t, errors.Join(m.load(0), m.sync.ReduceAll(ctx, m.params)))
			state, err := m.sync.State(ctx)
			require.NoError(t, err)
			body := state[:len(state)-4]
			copy(body[int(at)%len(body):], change)
			before, patterns := m.sync.Buckets(), m.sync.Patterns()
			err = m.sync.Restore(ctx, binary.LittleEndian.AppendUint32(body, crc32.Checksum(body, crc32.MakeTable(crc32.Castagnoli))))
			if err != nil {
				require.True(t, errors.Is(err, comm.ErrArgument) || errors.Is(err, comm.ErrMismatch), "%v", err)
				require.Equal(t, before, m.sync.Buckets())
				require.Equal(t, patterns, m.sync.Patterns())
				require.NoError(t, errors.Join(m.load(1), m.sync.ReduceAll(ctx, m.params)))
			} else {
				_ = errors.Join(m.load(1), m.sync.ReduceAll(ctx, m.params))
			}
			return m.close()
		})
	})
}
