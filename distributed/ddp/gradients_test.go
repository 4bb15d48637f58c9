package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestBucketsByType: types that alternate fill a bucket each, and the bucket that
// a backward pass completes first is reduced first.
func TestBucketsByType(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		var params []*runtime.Tensor
		for _, dt := range []dtype.DType{dtype.F32, dtype.BF16, dtype.F32, dtype.BF16, dtype.F32} {
			p, err := runtime.New(rt, dt, 100)
			require.NoError(t, err)
			params = append(params, p)
		}
		g, err := ddp.New(ctx, rt, c, params, ddp.Config{BucketBytes: 800})
		require.NoError(t, err)
		assert.Equal(t, [][]int{{4, 2}, {3, 1}, {0}}, g.Buckets())
		require.NoError(t, g.Close())
		standin.Free(t, params)
		return nil
	})
}

// TestHostBucketIsOneGroup: without streams the gradients of a bucket are reduced
// as one group, large ones where they are.
func TestHostBucketIsOneGroup(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		params := standin.Gradients(t, rt, 2) // small ones, which are put together
		for range 2 {
			p, err := runtime.New(rt, dtype.F32, 5000)
			require.NoError(t, err)
			params = append(params, p)
		}
		live := rt.Stats().LiveBlocks
		made := &standin.Grouped{Communicator: c}
		g, err := ddp.New(ctx, rt, made, params, ddp.Config{})
		require.NoError(t, err)
		for i, p := range params {
			require.NoError(t, p.Fill(float64(i+c.Rank())))
		}
		require.NoError(t, g.ReduceAll(ctx, params))
		require.Len(t, made.Groups, 1)
		calls := made.Groups[0]
		require.Len(t, calls, 3)
		assert.Equal(t, 200, calls[0].Count)
		for i, param := range params {
			p, err := param.Ptr()
			require.NoError(t, err)
			if i >= 2 {
				assert.Equal(t, comm.AllReduceCall(p, p, 5000, dtype.F32, comm.Avg), calls[4-i], "where it is")
			}
			values, err := cpu.Slice[float32](param)
			require.NoError(t, err)
			assert.Equal(t, float32(i)+0.5, values[99])
		}
		assert.Equal(t, live+1, rt.Stats().LiveBlocks)
		require.NoError(t, g.Close())
		standin.Free(t, params)
		return nil
	})
}

// symmetric is a communicator with streams that has symmetric memory.
type symmetric struct {
	standin.StreamedComm
	live map[uintptr]int
}

func (c symmetric) AllocateSymmetric(_ context.Context, bytes int) (uintptr, error) {
	p, err := c.S.Runtime.Allocate(bytes)
	c.live[p] = bytes
	return p, err
}

func (c symmetric) FreeSymmetric(_ context.Context, p uintptr) error {
	delete(c.live, p)
	return c.S.Runtime.Deallocate(p)
}

// TestDenseBucketOverflows checks that a policy holds for dense buckets, too.
func TestDenseBucketOverflows(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		values := []float32{1, 2, 3}
		if c.Rank() == 1 {
			values[1] = float32(math.Inf(1))
		}
		g, err := runtime.FromSlice(rt, values)
		if err != nil {
			return err
		}
		s, err := ddp.New(ctx, rt, c, []*runtime.Tensor{g}, ddp.Config{
			Config: sparse.Config{NonFinite: sparse.SkipNonFinite},
		})
		if err != nil {
			return err
		}
		if err := s.ReduceAll(ctx, []*runtime.Tensor{g}); err != nil {
			return err
		}
		got, err := runtime.ToSlice[float32](g)
		assert.Equal(t, make([]float32, 3), got)
		return errors.Join(err, s.Close(), g.Free())
	})
}

// TestBucketsInSymmetricMemory: where there are streams, what is put together is
// put in memory that makes collectives faster. A rank that failed does not free
// it, because its peers may not be freeing theirs.
func TestBucketsInSymmetricMemory(t *testing.T) {
	s := &standin.Streamed{Runtime: cpu.New(), Reach: runtime.CPU}
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		world := symmetric{StreamedComm: standin.NewStreamedComm(c, s), live: map[uintptr]int{}}
		params := standin.Gradients(t, s, 3)
		for _, lost := range []error{nil, errors.New("order lost")} {
			g, err := ddp.New(ctx, s, world, params, ddp.Config{BucketBytes: 800})
			require.NoError(t, err)
			require.Len(t, world.live, 1, "of two gradients; the third stays where it is")
			for p, bytes := range world.live {
				assert.Equal(t, 800, bytes)
				defer s.Runtime.Deallocate(p) //nolint:errcheck // what the communicator's Close does
			}
			s.OrderFails = lost
			for i, p := range params {
				require.NoError(t, p.Fill(float64(i)))
			}
			require.ErrorIs(t, g.ReduceAll(ctx, params), lost)
			require.NoError(t, g.Close())
			assert.Equal(t, lost != nil, len(world.live) == 1)
			for i, p := range params {
				values, err := cpu.Slice[float32](p)
				require.NoError(t, err)
				assert.EqualValues(t, i, values[99])
			}
		}
		standin.Free(t, params)
		return nil
	}))
	assert.NoError(t, s.Close())
}

// TestNoGradients: without parameters there is nothing to skip, whatever a device would have to say.
func TestNoGradients(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		ordered := standin.NewOrdered(ctx, c)
		g, err := ddp.New(ctx, standin.NewOnStream(rt), ordered, nil, ddp.Config{Config: sparse.Config{NonFinite: sparse.SkipNonFinite}})
		require.NoError(t, err)
		for range 2 {
			require.NoError(t, g.Wait(ctx))
			stats, err := g.Stats(ctx)
			require.NoError(t, err)
			assert.False(t, stats.Skipped)
			require.NoError(t, g.Wait(ctx))
			require.NoError(t, g.Rebind(ctx, ordered))
		}
		return g.Close()
	})
}

// BenchmarkGradientSync measures a step of a model whose gradients are ready at
// once: 24 of 256 KiB, and as many of 4 KiB, between 2 ranks.
func BenchmarkGradientSync(b *testing.B) {
	const ranks, count = 2, 24
	for _, n := range []int{1 << 10, 1 << 16} {
		for _, bucket := range []int{256 << 10, 1 << 20, 4 << 20, 25 << 20} {
			b.Run(fmt.Sprintf("%dKiB/bucket=%dKiB", n*4>>10, bucket>>10), func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(4 * int64(n) * count)
				err := standin.Backend(b, ranks).Run(b.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
					var params []*runtime.Tensor
					for range count {
						p, err := runtime.New(r.Runtime, dtype.F32, n)
						if err != nil {
							return err
						}
						if err := p.Fill(1); err != nil {
							return err
						}
						params = append(params, p)
					}
					g, err := ddp.New(ctx, r.Runtime, r.Comm, params, ddp.Config{BucketBytes: bucket})
					if err != nil {
						return err
					}
					for i := range b.N + 3 {
						if i == 3 && r.Comm.Rank() == 0 {
							b.ResetTimer()
						}
						if err := g.ReduceAll(ctx, params); err != nil {
							return err
						}
					}
					errs := []error{g.Close()}
					for _, p := range params {
						errs = append(errs, p.Free())
					}
					return errors.Join(errs...)
				})
				if err != nil {
					b.Fatal(err)
				}
			})
		}
	}
}

// TestReduceAllOfWrongGradients: one that is wrong is an error before any of them is
// taken, so the same call with the right ones makes the step.
func TestReduceAllOfWrongGradients(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		all := standin.Gradients(t, rt, 3)
		g, err := ddp.New(ctx, rt, c, all, ddp.Config{})
		require.NoError(t, err)
		for _, x := range all {
			require.NoError(t, x.Fill(float64(c.Rank())))
		}
		short, err := all[0].Slice(0, 0, 99)
		require.NoError(t, err)
		err = g.ReduceAll(ctx, []*runtime.Tensor{short, all[1], all[2]})
		assert.ErrorIs(t, err, runtime.ErrShape)
		assert.ErrorContains(t, err, "gradient 0")
		require.NoError(t, g.ReduceAll(ctx, all))
		for _, x := range all {
			values, err := cpu.Slice[float32](x)
			require.NoError(t, err)
			assert.Equal(t, float32(0.5), values[99])
		}
		require.NoError(t, g.Close())
		standin.Free(t, all)
		return nil
	})
}

// TestSpans has a timeline with each step, and its Wait within it.
func TestSpans(t *testing.T) {
	const steps = 3
	err := local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		timeline := &spanKeeper{Wrapped: comm.Wrap(c)}
		gradient, err := runtime.New(rt, dtype.F32, 10)
		if err != nil {
			return err
		}
		g, err := ddp.New(ctx, rt, timeline, []*runtime.Tensor{gradient}, ddp.Config{})
		if err != nil {
			return err
		}
		for range steps {
			if err := g.ReduceAll(ctx, []*runtime.Tensor{gradient}); err != nil {
				return err
			}
		}
		assert.Len(t, timeline.spans, 2*steps)
		for i := 0; i < len(timeline.spans); i += 2 {
			step := timeline.spans[i]
			wait := timeline.spans[i+1]
			assert.Equal(t, "gradients", step.name)
			assert.Equal(t, "gradient wait", wait.name)
			assert.False(t, wait.started.Before(step.started), "a step begins with its first gradient")
			if i > 0 {
				assert.False(t, step.started.Before(timeline.spans[i-2].ended), "steps follow each other")
			}
		}
		return errors.Join(g.Close(), gradient.Free())
	})
	require.NoError(t, err)
}

// spanKeeper is a communicator that keeps a timeline.
type spanKeeper struct {
	comm.Wrapped
	spans []keptSpan
}

type keptSpan struct {
	name           string
	started, ended time.Time
}

func (k *spanKeeper) Span(name string, started time.Time) {
	k.spans = append(k.spans, keptSpan{name, started, time.Now()})
}
