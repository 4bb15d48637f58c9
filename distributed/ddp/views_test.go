package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// copying counts copies of whole gradients.
type copying struct {
	*cpu.Runtime
	gradients map[uintptr]int // with their bytes
	copies    atomic.Int64
}

// watch looks for copies of those that share a bucket with others: results may be
// copied, a bucket at a time.
func (c *copying) watch(gradients []*runtime.Tensor, buckets [][]int) {
	c.gradients = map[uintptr]int{}
	for _, bucket := range buckets {
		for _, i := range bucket {
			p, err := gradients[i].Ptr()
			if err != nil {
				panic(err)
			}
			if len(bucket) > 1 {
				c.gradients[p] = gradients[i].Bytes()
			}
		}
	}
}

func (c *copying) Copy(dst, src uintptr, bytes int) error {
	if bytes > 0 && (c.gradients[dst] == bytes || c.gradients[src] == bytes) {
		c.copies.Add(1)
	}
	return c.Runtime.Copy(dst, src, bytes)
}

// viewed is a model whose gradients live in the buckets.
func viewed(ctx context.Context, rt runtime.Runtime, c comm.Communicator, cfg ddp.Config) (*model, error) {
	cfg.BucketViews = true
	m, err := newModel(ctx, rt, c, cfg)
	if err != nil {
		return nil, err
	}
	for _, t := range m.params { // the parameters, which are not the gradients
		err = errors.Join(err, t.Free())
	}
	m.params = m.sync.Views()
	return m, err
}

var viewConfigs = []ddp.Config{
	{},
	{Config: sparse.Config{ClipNorm: 30, NoUndo: true}},
	{Config: sparse.Config{ClipNorm: 30}},
	{Config: sparse.Config{Pattern: "topkA", Density: 0.1}},
	{Config: sparse.Config{Pattern: "gtopk", Density: 0.1, NoUndo: true}},
	{Config: sparse.Config{Pattern: "oktopk", Density: 0.1, ClipNorm: 30, ClipGlobal: true}},
	{Config: sparse.Config{Pattern: "topkSA", Density: 0.1, Momentum: 0.9, Schedule: sparse.Schedule{WarmupSteps: 2}}},
}

// TestBucketViews: gradients that live in the buckets are not copied, neither to a
// bucket nor back, and steps have the bits of those whose gradients are elsewhere.
func TestBucketViews(t *testing.T) {
	const ranks, steps = 3, 5
	for _, cfg := range viewConfigs {
		for _, streams := range []bool{false, true} {
			label := fmt.Sprintf("%+v, streams %v", cfg.Config, streams)
			run := func(views bool) (all [ranks][][]uint32) {
				require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
					counting := &copying{Runtime: cpu.New()}
					var rt runtime.Runtime = counting
					if streams {
						rt, c = countingStream{counting}, standin.NewOrdered(ctx, c)
					}
					make := newModel
					if views {
						make = viewed
					}
					m, err := make(ctx, rt, c, cfg)
					require.NoError(t, err, label)
					counting.watch(m.params, m.sync.Buckets())
					if views {
						require.Len(t, m.params, len(modelShapes))
						for i, p := range m.params {
							assert.Equal(t, modelShapes[i], p.Shape())
						}
					}
					for step := range steps {
						given := m.params
						if step == 3 { // one is left out, and zero
							given = append([]*runtime.Tensor(nil), given...)
							given[1] = nil
						}
						require.NoError(t, errors.Join(m.load(step), m.sync.ReduceAll(ctx, given)), label)
						for i := range m.params {
							all[c.Rank()] = append(all[c.Rank()], standin.Bits(m.sync.Result(i)))
						}
						if step < 3 {
							copies := int(counting.copies.Swap(0))
							assert.Equal(t, views, copies == 0, "%s, step %d: %d copies", label, step, copies)
						}
					}
					if views {
						return errors.Join(m.sync.Close(), counting.Close())
					}
					return errors.Join(m.close(), counting.Close())
				}))
				return all
			}
			assert.Equal(t, run(false), run(true), label)
		}
	}
}

// countingStream is copying with a compute stream.
type countingStream struct{ *copying }

func (countingStream) ComputeStream() uintptr { return standin.ComputeStream }

// TestBucketViewsSurvive: a step that fails leaves gradients that live in buckets as
// they were, and they stay where they are when it is repeated elsewhere.
func TestBucketViewsSurvive(t *testing.T) {
	tuning.Set(t, tuning.Tuning{ThresholdInterval: 3})
	const ranks = 2
	others, err := local.New(ranks)
	require.NoError(t, err)
	standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		f := standin.NewFaulty(c)
		m, err := viewed(ctx, rt, f, sparseModel)
		require.NoError(t, err)
		reference, err := newModel(ctx, rt, others[c.Rank()], sparseModel)
		require.NoError(t, err)
		require.NoError(t, m.load(0))
		given := m.bits()
		f.Calls, f.At = 0, 3
		assert.ErrorIs(t, m.sync.ReduceAll(ctx, m.params), standin.ErrFault)
		assert.Equal(t, given, m.bits())
		_ = c.Close()
		require.NoError(t, m.sync.Rebind(ctx, others[c.Rank()]))
		assert.Equal(t, m.params, m.sync.Views())
		assert.Equal(t, given, m.bits())
		require.NoError(t, m.sync.ReduceAll(ctx, m.params))
		require.NoError(t, errors.Join(reference.load(0), reference.sync.ReduceAll(ctx, reference.params)))
		assert.Equal(t, reference.bits(), m.bits())
		return errors.Join(m.sync.Close(), reference.close(), others[c.Rank()].Close())
	})
}

// TestBucketViewsBeginAnew: views in plain buckets are other ones after a Rebind, and zeros, also where the runtime hands out the same memory.
func TestBucketViewsBeginAnew(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		params := standin.Gradients(t, rt, 2)
		g, err := ddp.New(ctx, rt, c, params, ddp.Config{BucketViews: true})
		require.NoError(t, err)
		before := g.Views()
		for _, v := range before {
			require.NoError(t, v.Fill(7))
		}
		require.NoError(t, g.Rebind(ctx, c))
		for i, v := range g.Views() {
			assert.NotSame(t, before[i], v)
			values, err := cpu.Slice[float32](v)
			require.NoError(t, err)
			assert.Equal(t, make([]float32, 100), values)
		}
		err = g.Close()
		standin.Free(t, params)
		return err
	})
}

// TestBucketViewsInSymmetricMemory: they are what the communicator reads and writes
// fastest, also a bucket of one gradient.
func TestBucketViewsInSymmetricMemory(t *testing.T) {
	s := &standin.Streamed{Runtime: cpu.New(), Reach: runtime.CPU}
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		world := symmetric{StreamedComm: standin.NewStreamedComm(c, s), live: map[uintptr]int{}}
		params := standin.Gradients(t, s, 3)
		_, err := ddp.New(ctx, s, world, params, ddp.Config{BucketViews: true, Wire: dtype.BF16})
		require.ErrorIs(t, err, comm.ErrArgument)
		g, err := ddp.New(ctx, s, world, params, ddp.Config{BucketBytes: 800, BucketViews: true})
		require.NoError(t, err)
		require.Len(t, world.live, 2)
		views := g.Views()
		for _, v := range views {
			p, err := v.Ptr()
			require.NoError(t, err)
			within := false
			for at, bytes := range world.live {
				within = within || p >= at && p+uintptr(v.Bytes()) <= at+uintptr(bytes)
			}
			assert.True(t, within)
		}
		require.NoError(t, g.ReduceAll(ctx, views))
		require.NoError(t, g.Close())
		assert.Empty(t, world.live)
		standin.Free(t, params)
		return nil
	}))
	assert.NoError(t, s.Close())
}

// TestGradientMemory measures what a Gradients of a BF16 model takes beside the
// gradients, in bytes per parameter.
func TestGradientMemory(t *testing.T) {
	const layers, rows = 24, 200
	topk := sparse.Config{Pattern: "topkA", Density: 0.01}
	frugal := topk
	frugal.NoUndo = true
	for _, k := range []struct {
		name string
		cfg  ddp.Config
		most float64
	}{
		// 4 for a residual, 4 for the one that a step is rolled back with, half a byte for
		// lists, and an eighth of 2 bytes for the bucket in which gradients are put together.
		{"transactions", ddp.Config{Config: topk}, 8.5 + 0.25},
		{"NoUndo", ddp.Config{Config: frugal}, 4.5 + 0.25},
		{"transactions, views", ddp.Config{Config: topk, BucketViews: true}, 8.5},
		{"NoUndo, views", ddp.Config{Config: frugal, BucketViews: true}, 4.5},
	} {
		standin.FreshWorld(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			var params []*runtime.Tensor
			total := 0
			for range layers {
				p, err := runtime.New(rt, dtype.BF16, rows, rows)
				require.NoError(t, err)
				params = append(params, p)
				total += p.Len()
			}
			cfg := k.cfg
			cfg.BucketBytes = total * 2 / 8
			before := rt.Stats().LiveBytes
			g, err := ddp.New(ctx, rt, c, params, cfg)
			require.NoError(t, err)
			gradients := params
			if k.cfg.BucketViews {
				gradients = g.Views()
				before += int64(2 * total) // these are the gradients
			}
			for step := range 3 {
				for _, p := range gradients {
					require.NoError(t, p.Fill(float64(step+1)))
				}
				require.NoError(t, g.ReduceAll(ctx, gradients))
			}
			per := float64(rt.Stats().LiveBytes-before) / float64(total)
			t.Logf("%s: %.2f bytes per parameter", k.name, per)
			assert.LessOrEqual(t, per, k.most, k.name)
			require.NoError(t, g.Close())
			standin.Free(t, params)
			return nil
		})
	}
}
