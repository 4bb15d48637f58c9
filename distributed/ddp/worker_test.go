package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

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

// gated holds up collectives of gradients, when it is shut, until its gate is open.
type gated struct {
	comm.Communicator
	shut atomic.Bool
}

func gate(c comm.Communicator, open <-chan struct{}) *gated {
	g := &gated{}
	g.Communicator = standin.Observe(c, func(call comm.Call) {
		if (call.Op == comm.OpAllGather || call.Op == comm.OpAllReduce) && g.shut.Load() {
			<-open
		}
	})
	return g
}

func (g *gated) Unwrap() comm.Communicator { return g.Communicator }

// twoBuckets makes a Gradients of two buckets, whose gradients share memory, and which begins with this number of
// dense steps.
func twoBuckets(ctx context.Context, rt runtime.Runtime, c comm.Communicator, warmup int) (*ddp.Gradients, []*runtime.Tensor, error) {
	const n = 1500
	var params []*runtime.Tensor
	for i := range 4 {
		t, err := runtime.FromSlice(rt, standin.Normal(n, c.Rank(), i), n, 1)
		if err != nil {
			return nil, nil, err
		}
		params = append(params, t)
	}
	g, err := ddp.New(ctx, rt, c, params, ddp.Config{BucketBytes: 2 * 4 * n,
		Config: sparse.Config{Pattern: "topkA", Density: 0.1, Schedule: sparse.Schedule{WarmupSteps: warmup}}})
	return g, params, err
}

// ready is a backward pass.
func ready(ctx context.Context, g *ddp.Gradients, params []*runtime.Tensor) error {
	for i, p := range slices.Backward(params) {
		if err := g.Ready(ctx, i, p); err != nil {
			return err
		}
	}
	return nil
}

// While a bucket is exchanged, the caller's backward pass goes on.
func TestBucketsTravelBehindTheCaller(t *testing.T) {
	for _, warmup := range []int{0, 2} {
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			open := make(chan struct{})
			gated := gate(c, open)
			g, params, err := twoBuckets(ctx, rt, gated, warmup)
			require.NoError(t, err)
			h, plain, err := twoBuckets(ctx, rt, c, warmup) // the same, held up by nothing
			require.NoError(t, err)
			// The first step also compares what the ranks reduce.
			require.NoError(t, errors.Join(g.ReduceAll(ctx, params), h.ReduceAll(ctx, plain)))
			before := standin.Bits(params[1])
			gated.shut.Store(true)
			require.NoError(t, ready(ctx, g, params), "though neither bucket can have been exchanged")
			assert.Equal(t, before, standin.Bits(params[1]), "nothing is written before Wait")
			close(open)
			require.NoError(t, errors.Join(g.Wait(ctx), h.ReduceAll(ctx, plain)))
			for i := range params {
				assert.Equal(t, standin.Bits(plain[i]), standin.Bits(params[i]))
			}
			require.NoError(t, errors.Join(g.Close(), h.Close()))
			standin.Free(t, append(params, plain...))
			return nil
		})
	}
}

// TestBucketsAllocate: the steps of buckets that the communication worker exchanges allocate nothing.
func TestBucketsAllocate(t *testing.T) {
	const rounds, steps = 10, 40
	perStep := math.Inf(1)
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		g, params, err := twoBuckets(ctx, rt, c, 0)
		require.NoError(t, err)
		step := func() {
			if err == nil {
				err = errors.Join(ready(ctx, g, params), g.Wait(ctx))
			}
		}
		for range rounds {
			if c.Rank() == 0 {
				perStep = min(perStep, testing.AllocsPerRun(steps, step))
				continue
			}
			for range steps + 1 { // AllocsPerRun adds one
				step()
			}
		}
		require.NoError(t, errors.Join(err, g.Close()))
		standin.Free(t, params)
		return nil
	})
	assert.Zero(t, perStep, "allocations per step")
}

// The context of Wait ends exchanges that a peer never joins, and the step is as if
// it had not been.
func TestWaitEndsExchanges(t *testing.T) {
	over := make(chan struct{})
	made := make(chan struct{}) // rank 1 has made the first step, which ends with an error once rank 0 has aborted
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		if c.Rank() == 0 {
			defer close(over)
		}
		g, params, err := twoBuckets(ctx, rt, c, 0)
		require.NoError(t, err)
		defer standin.Free(t, params)
		require.NoError(t, g.ReduceAll(ctx, params))
		if c.Rank() == 1 { // makes no second step
			close(made)
			<-over
			return g.Close()
		}
		before := standin.Bits(params[1])
		require.NoError(t, ready(ctx, g, params))
		<-made
		short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		assert.ErrorIs(t, g.Wait(short), comm.ErrTimeout)
		assert.Equal(t, before, standin.Bits(params[1]))
		assert.NoError(t, c.Close())
		return g.Close()
	})
}

// Dense steps of a schedule read gradients that several buckets put together in one
// memory, until they have been exchanged.
func TestWarmupOfBucketsThatShareMemory(t *testing.T) {
	const ranks, n, count = 2, 1000, 8
	standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		var params []*runtime.Tensor
		for range count {
			p, err := runtime.New(rt, dtype.F32, n, 1)
			if err != nil {
				return err
			}
			defer p.Free()
			params = append(params, p)
		}
		slow := standin.Observe(c, func(comm.Call) { time.Sleep(time.Millisecond) }) // so that others would come first
		g, err := ddp.New(ctx, rt, slow, params, ddp.Config{
			BucketBytes: 2 * 4 * n, // two gradients each
			Config:      sparse.Config{Pattern: "topkA", Density: 0.1, Schedule: sparse.Schedule{WarmupSteps: 2}},
		})
		if err != nil {
			return err
		}
		defer g.Close()
		for step := range 2 {
			for i, p := range params {
				if err := p.Fill(float64(100*step + 10*i + c.Rank())); err != nil {
					return err
				}
			}
			if err := g.ReduceAll(ctx, params); err != nil {
				return err
			}
			for i, p := range params {
				got, err := runtime.ToSlice[float32](p)
				if err != nil {
					return err
				}
				assert.Equal(t, float32(100*step+10*i)+0.5, got[n-1], "step %d, gradient %d", step, i)
			}
		}
		return nil
	})
}

// TestStatsInTheMiddle: what the device alone knows of the last step is not asked for
// while the communication worker uses the communicator.
func TestStatsInTheMiddle(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, memory *cpu.Runtime) error {
		rt := standin.NewForking(memory)
		open := make(chan struct{})
		gated := gate(c, open)
		x, err := runtime.FromSlice(rt, standin.Normal(3000, c.Rank()))
		require.NoError(t, err)
		all := []*runtime.Tensor{x}
		// Dense steps of a pattern whose others keep the host.
		cfg := sparse.Config{Pattern: sparse.TopkSA, Density: 0.1, Schedule: sparse.Schedule{WarmupSteps: 2}}
		g, err := ddp.New(ctx, rt, standin.NewByEvents(ctx, gated), all, ddp.Config{Config: cfg, DenseUpTo: -1})
		require.NoError(t, err)
		require.NoError(t, g.ReduceAll(ctx, all))
		gated.shut.Store(true)
		require.NoError(t, g.Ready(ctx, 0, x))
		_, statsErr := g.Stats(ctx)
		close(open)
		assert.ErrorIs(t, statsErr, comm.ErrArgument)
		require.NoError(t, g.Wait(ctx))
		stats, err := g.Stats(ctx)
		require.NoError(t, err)
		assert.Equal(t, 1, stats.Step)
		assert.False(t, stats.Skipped)
		return errors.Join(g.Close(), x.Free())
	})
}

// copyingForker is a runtime with asynchronous copies and side streams.
type copyingForker struct{ standin.Copying }

func (b copyingForker) ForkStream() (runtime.Runtime, error) {
	of := cpu.New()
	return copyingFork{standin.NewCopying(of, b.W, &standin.Stumbling{Kernels: of.Kernels()}, b.Rng)}, nil
}

type copyingFork struct{ standin.Copying }

func (copyingFork) ComputeStream() uintptr { return standin.ComputeStream + 2 }

// The same in buckets that have one verdict: a step that one of them has skipped is skipped in all, and what they read
// later belongs to the step before.
func TestBucketsReadLater(t *testing.T) {
	tuning.Set(t, tuning.Tuning{ThresholdInterval: 10, RebalanceInterval: 25})
	const n, ranks, buckets, steps = 30_000, 2, 3, 40
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	overflows := rand.New(rand.NewPCG(seed, 1))
	bad := make([]int, steps) // a bucket with a non-finite gradient in a step, if it is one
	for step := range bad {
		bad[step] = overflows.IntN(4 * buckets)
	}
	run := func(streams bool) [][][]uint32 {
		all := make([][][]uint32, ranks)
		rt := cpu.New()
		require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			var memory runtime.Runtime = rt
			rank := c.Rank()
			if streams {
				memory = copyingForker{Copying: standin.NewCopying(rt, new(standin.Waits), &standin.Stumbling{Kernels: rt.Kernels()}, rand.New(rand.NewPCG(seed, 7)))}
				c = standin.NewByEvents(ctx, c)
			}
			var params []*runtime.Tensor
			for range buckets {
				p, err := runtime.New(memory, dtype.F32, n)
				if err != nil {
					return err
				}
				params = append(params, p)
			}
			cfg := ddp.Config{BucketBytes: 4 * n, DenseUpTo: -1,
				Config: sparse.Config{Pattern: sparse.Oktopk, Density: 0.05}}
			g, err := ddp.New(ctx, memory, c, params, cfg)
			if err != nil {
				return err
			}
			for step := range steps {
				for b, p := range params {
					x := standin.Normal(n, rank, step, b)
					if bad[step] == b && rank == 1 {
						x[step] = float32(math.NaN())
					}
					if err := runtime.CopyIn(p, x); err != nil {
						return err
					}
				}
				if err := g.ReduceAll(ctx, params); err != nil {
					return fmt.Errorf("step %d: %w", step, err)
				}
				if step%5 == 4 {
					stats, err := g.Stats(ctx)
					if err != nil {
						return err
					}
					if stats.Skipped != (bad[step] < buckets) {
						return fmt.Errorf("step %d: skipped %v", step, stats.Skipped)
					}
				}
				for _, p := range params {
					all[rank] = append(all[rank], standin.Bits(p))
				}
			}
			err = g.Close()
			for _, p := range params {
				err = errors.Join(err, p.Free())
			}
			return err
		}))
		require.NoError(t, rt.Close())
		return all
	}
	want, got := run(false), run(true)
	for rank := range want {
		for i := range want[rank] {
			require.True(t, slices.Equal(want[rank][i], got[rank][i]), "seed %d, rank %d, step %d, bucket %d has other bits", seed, rank, i/buckets, i%buckets)
		}
	}
}
