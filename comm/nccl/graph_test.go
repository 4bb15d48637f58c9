package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// TestGraphOfKernelsAndCollectives captures a step of both streams, ordered by
// events, and replays it. A replay halves the numbers and adds up those of all
// ranks, so it multiplies by half the world size.
func TestGraphOfKernelsAndCollectives(t *testing.T) {
	runtimes := openGPUs(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	world, err := nccl.InProcess(ctx, runtimes)
	require.NoError(t, err)
	for _, symmetric := range []bool{false, true} {
		assert.NoError(t, each(world, func(c *nccl.Comm) error { return replay(ctx, c, symmetric) }), "symmetric: %t", symmetric)
	}
	require.NoError(t, each(world, (*nccl.Comm).Close))
}

func replay(ctx context.Context, c *nccl.Comm, symmetric bool) error {
	const n, replays = 1000, 5
	rt := c.Runtime()
	allocate, free := buffers(ctx, c, symmetric)
	buf, err := allocate(n * 4)
	if err != nil {
		return err
	}
	event, err := c.CreateEvent()
	if err != nil {
		return err
	}
	stream := rt.ComputeStream()
	// The first call of a kernel allocates what it needs, which a capture cannot.
	if err := errors.Join(rt.Fill(buf, n, dtype.F32, 6), rt.Kernels().Store(buf, dtype.F32, buf, n, 0.5, 0), rt.Synchronize(ctx)); err != nil {
		return err
	}
	graph, err := rt.Stream().Capture(func() error {
		return errors.Join(
			rt.Kernels().Store(buf, dtype.F32, buf, n, 0.5, 0),
			c.RecordOnStream(event, stream), c.CommStreamWaitEvent(event),
			c.AllReduce(buf, buf, n, dtype.F32, comm.Sum),
			c.RecordOnCommStream(event), c.StreamWaitEvent(stream, event))
	})
	if err != nil {
		return err
	}
	for range replays {
		if err := graph.Launch(rt.Stream()); err != nil {
			return err
		}
	}
	got, err := read(rt, buf, n)
	if err != nil {
		return err
	}
	want := float32(3)
	for range replays {
		want *= float32(c.WorldSize()) / 2
	}
	for i, v := range got {
		if v != want {
			return fmt.Errorf("element %d is %v after %d replays, want %v", i, v, replays, want)
		}
	}
	return errors.Join(graph.Close(), c.DestroyEvent(event), c.Barrier(ctx), free(buf))
}

// Waiting inside a capture is a mistake of the caller's alone.
func TestSyncInACapture(t *testing.T) {
	runtimes := openGPUs(t)
	ctx := t.Context()
	world, err := nccl.InProcess(ctx, runtimes[:1])
	require.NoError(t, err)
	c := world[0]
	var inside error
	_, err = c.Stream().Capture(func() error {
		inside = c.Sync(ctx)
		return nil
	})
	t.Log(inside, "; ", err)
	assert.ErrorContains(t, inside, "captur")
	assert.NotErrorIs(t, inside, comm.ErrBroken)
	assert.NoError(t, c.Barrier(ctx), "the communicator goes on")
	assert.NoError(t, c.Close())
}

// TestReplaysOfSparseSteps captures a sparse step of each pattern that can be, and
// replays it with a fresh gradient each time: the results and the residual have the
// bits of as many steps that were submitted one by one.
func TestReplaysOfSparseSteps(t *testing.T) {
	runtimes := openGPUs(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	world, err := nccl.InProcess(ctx, runtimes)
	require.NoError(t, err)
	for _, pattern := range sparsity.Patterns() {
		if sparsity.NeedsHost(pattern) || pattern == sparse.Dense {
			continue
		}
		for name, cfg := range map[string]sparse.Config{"transactions": {}, "no undo": {NoUndo: true}} {
			cfg.Pattern, cfg.Density = pattern, 0.01
			t.Run(pattern+"/"+name, func(t *testing.T) {
				assert.NoError(t, each(world, func(c *nccl.Comm) error { return replaySteps(ctx, c, cfg) }))
			})
		}
	}
	require.NoError(t, each(world, (*nccl.Comm).Close))
}

func replaySteps(ctx context.Context, c *nccl.Comm, cfg sparse.Config) (err error) {
	const n, warm, steps = 20_011, 3, 1000
	rt := c.Runtime()
	rng := rand.New(rand.NewPCG(uint64(c.Rank()), 16))
	values := make([]float32, n+4*steps)
	for i := range values {
		values[i] = float32(rng.NormFloat64())
	}
	random, err := runtime.FromSlice(rt, values)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, random.Free()) }()
	from, err := random.Ptr()
	if err != nil {
		return err
	}
	var runs [2]struct {
		t, sum *runtime.Tensor // sum is of all results
		s      *sparse.Reducer
		graph  *cuda.Graph
	}
	for i := range runs {
		u := &runs[i]
		if u.s, err = sparse.New(rt, c, n, cfg); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, u.s.Close()) }()
		for _, t := range []**runtime.Tensor{&u.t, &u.sum} {
			if *t, err = runtime.New(rt, dtype.F32, n); err != nil {
				return err
			}
			defer func() { err = errors.Join(err, (*t).Free()) }()
			if err := (*t).Fill(0); err != nil {
				return err
			}
		}
	}
	for step := range steps + warm {
		for i := range runs {
			u := &runs[i]
			t, err := u.t.Ptr()
			if err != nil {
				return err
			}
			sum, err := u.sum.Ptr()
			if err != nil {
				return err
			}
			gradient := kernel.Source{X: t, N: n, Grad: from + uintptr(16*(step%steps)), DType: dtype.F32}
			err = errors.Join(rt.Fill(t, n, dtype.F32, 0), rt.Kernels().Accumulate(gradient))
			switch {
			case i == 0 || step < warm:
				err = errors.Join(err, u.s.AllReduce(ctx, u.t))
			case step == warm:
				u.graph, err = rt.Stream().Capture(func() error { return u.s.AllReduce(ctx, u.t) })
				if err == nil {
					defer u.graph.Close() //nolint:errcheck
				}
				fallthrough
			default:
				if err == nil {
					err = u.graph.Launch(rt.Stream())
				}
			}
			err = errors.Join(err, rt.Kernels().Accumulate(kernel.Source{X: sum, N: n, Grad: t, DType: dtype.F32}))
			if err != nil {
				return fmt.Errorf("step %d of run %d: %w", step, i, err)
			}
		}
	}
	if err := c.Sync(ctx); err != nil {
		return err
	}
	for _, of := range []func(i int) (*runtime.Tensor, error){
		func(i int) (*runtime.Tensor, error) { return runs[i].sum, nil },
		func(i int) (*runtime.Tensor, error) { return runs[i].s.Residual() },
	} {
		var bits [2][]float32
		for i := range runs {
			t, err := of(i)
			if err != nil {
				return err
			}
			p, err := t.Ptr()
			if err != nil {
				return err
			}
			if bits[i], err = read(rt, p, n); err != nil {
				return err
			}
		}
		for i := range bits[0] {
			if math.Float32bits(bits[0][i]) != math.Float32bits(bits[1][i]) {
				return fmt.Errorf("element %d: %v one by one, %v replayed", i, bits[0][i], bits[1][i])
			}
		}
	}
	return nil
}
