package ddp_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestRestoreRebuilt goes on with a run whose buckets were filled anew after its first
// step: with the same buckets, and not a third time.
func TestRestoreRebuilt(t *testing.T) {
	cfg := ddp.Config{BucketBytes: 800, FirstBucketBytes: 400, Rebuild: true}
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		params := standin.Gradients(t, rt, 5)
		order := []int{0, 2, 4, 1, 3}
		step := func(g *ddp.Gradients) {
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
		first, err := ddp.New(ctx, rt, c, params, cfg)
		require.NoError(t, err)
		step(first)
		state, err := first.State(ctx)
		require.NoError(t, err)

		second, err := ddp.New(ctx, rt, c, params, cfg)
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
		third, err := ddp.New(ctx, rt, c, params, other)
		require.NoError(t, err)
		assert.ErrorIs(t, third.Restore(ctx, state), comm.ErrMismatch)
		assert.Equal(t, before, third.Buckets())
		require.NoError(t, errors.Join(first.Close(), second.Close(), third.Close()))
		standin.Free(t, params)
		return nil
	})
}

// TestRestoreOtherSteps: states of several ranks are of one step, also where all
// buckets are plain.
func TestRestoreOtherSteps(t *testing.T) {
	for _, cfg := range []ddp.Config{{}, sparseModel} {
		var states [2][]byte
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
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
		standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
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
	cfg := ddp.Config{Config: sparse.Config{Pattern: sparse.Auto, Density: 0.05}, DenseUpTo: -1}
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
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			first, err := newModel(ctx, rt, standin.Pace(c, slow(sparseFirst)), cfg)
			require.NoError(t, err)
			second, err := newModel(ctx, rt, standin.Pace(c, slow(!sparseFirst)), cfg)
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
			third, err := newModel(ctx, rt, standin.Pace(c, slow(!sparseFirst)), other)
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
	slog.SetDefault(slog.New(slog.NewTextHandler(standin.NewLockedBuffer(&mu, &text), nil)))
	defer slog.SetDefault(before)
	for _, k := range []struct {
		pattern string
		fewer   int
		lines   int
	}{{"topkA", 1, 2}, {"topkA", 0, 0}, {sparse.Dense, 1, 0}} {
		others, err := local.New(ranks - k.fewer)
		require.NoError(t, err)
		text.Reset()
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			u, err := standin.NewTrainee(rt, c, sparse.Config{Pattern: k.pattern, Density: 0.1}, 500)
			require.NoError(t, err)
			m, err := newModel(ctx, rt, c, ddp.Config{Config: sparse.Config{Pattern: k.pattern, Density: 0.1, ClipNorm: 9}})
			require.NoError(t, err)
			require.NoError(t, errors.Join(u.Step(ctx, 0), m.load(0), m.sync.ReduceAll(ctx, m.params)))
			if rank := c.Rank(); rank < len(others) {
				defer others[rank].Close()
				require.NoError(t, errors.Join(u.S.Rebind(others[rank]), m.sync.Rebind(ctx, others[rank])))
				require.NoError(t, errors.Join(u.Step(ctx, 1), m.load(1), m.sync.ReduceAll(ctx, m.params)))
			}
			return errors.Join(u.Close(), m.close())
		})
		assert.Equal(t, k.lines, bytes.Count(text.Bytes(), []byte("is lost\" ranks=2 lost=1")), "%+v: %s", k, text.String())
	}
}

// FuzzRestoreGradients forges states of a Gradients, with checksums that are right:
// an error, or one that goes on.
func FuzzRestoreGradients(f *testing.F) {
	for i := range 60 {
		f.Add(uint8(i%3), uint16(5*i), []byte{byte(i), 1})
	}
	f.Fuzz(func(t *testing.T, which uint8, at uint16, change []byte) {
		cfg := []ddp.Config{{Rebuild: true}, sparseModel, {Config: sparse.Config{Pattern: sparse.Auto, Density: 0.1}}}[which%3]
		standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
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
