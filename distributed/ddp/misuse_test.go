package ddp_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestNilCommunicator checks that every function names what is missing.
func TestNilCommunicator(t *testing.T) {
	rt := cpu.New()
	tensors := standin.Gradients(t, rt, 2)
	a, b, ctx := tensors[0], tensors[1], t.Context()
	newSparse := func() error {
		_, err := sparse.New(rt, nil, 100, sparse.Config{})
		return err
	}
	newGradientSync := func() error {
		_, err := ddp.New(t.Context(), rt, nil, tensors, ddp.Config{})
		return err
	}
	newMesh := func() error {
		_, err := distributed.NewMesh(ctx, nil, distributed.Dim{Name: "data", Size: 1})
		return err
	}
	for name, call := range map[string]func() error{
		"AllReduce":      func() error { return distributed.AllReduce(ctx, nil, a, comm.Sum) },
		"Broadcast":      func() error { return distributed.Broadcast(ctx, nil, a, 0) },
		"Reduce":         func() error { return distributed.Reduce(ctx, nil, a, comm.Sum, 0) },
		"AllGather":      func() error { return distributed.AllGather(ctx, nil, a, b) },
		"AllGatherV":     func() error { return distributed.AllGatherV(ctx, nil, a, b, []int{100}) },
		"ReduceScatter":  func() error { return distributed.ReduceScatter(ctx, nil, a, b, comm.Sum) },
		"AllToAll":       func() error { return distributed.AllToAll(ctx, nil, a, b) },
		"AllToAllV":      func() error { return distributed.AllToAllV(ctx, nil, a, []int{100}, b, []int{100}) },
		"Gather":         func() error { return distributed.Gather(ctx, nil, a, b, 0) },
		"Scatter":        func() error { return distributed.Scatter(ctx, nil, a, b, 0) },
		"Send":           func() error { return distributed.Send(ctx, nil, a, 0, 1) },
		"Recv":           func() error { return distributed.Recv(ctx, nil, a, 0, 1) },
		"SendRecv":       func() error { return distributed.SendRecv(ctx, nil, a, 0, b, 0, 1) },
		"AllReduceAll":   func() error { return distributed.AllReduceAll(ctx, nil, tensors, comm.Sum) },
		"BroadcastAll":   func() error { return distributed.BroadcastAll(ctx, nil, tensors, 0) },
		"BroadcastBytes": func() error { _, err := distributed.BroadcastBytes(ctx, rt, nil, nil, 0); return err },
		"GatherBytes":    func() error { _, err := distributed.GatherBytes(ctx, rt, nil, nil, 0); return err },
		"ScatterBytes":   func() error { _, err := distributed.ScatterBytes(ctx, rt, nil, nil, 0); return err },
		"AllGatherBytes": func() error { _, err := distributed.AllGatherBytes(ctx, rt, nil, nil); return err },
		"AverageMetrics": func() error { _, err := distributed.AverageMetrics(ctx, rt, nil, 1); return err },
		"NewSampler":     func() error { _, err := distributed.NewSampler(nil, 1, distributed.SamplerConfig{}); return err },
		"sparse.New":     newSparse,
		"ddp.New":        newGradientSync,
		"NewMesh":        newMesh,
		"JoinMesh":       func() error { _, err := distributed.JoinMesh([]string{"data"}, []comm.Communicator{nil}); return err },
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			require.NotPanics(t, func() { err = call() })
			assert.ErrorIs(t, err, comm.ErrArgument)
			assert.ErrorContains(t, err, "communicator is nil")
		})
	}
	standin.Free(t, tensors)
	require.NoError(t, rt.Close())
}

// TestClosed checks that errors say what was closed, which is not the communicator.
func TestClosed(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		g := standin.Gradients(t, rt, 1)
		s, err := sparse.New(rt, c, 100, sparse.Config{Pattern: "topkA", Density: 0.1})
		require.NoError(t, err)
		require.NoError(t, s.Close())
		all, err := ddp.New(ctx, rt, c, g, ddp.Config{})
		require.NoError(t, err)
		require.NoError(t, all.Close())
		_, stateErr := s.State(ctx)
		_, residualErr := s.Residual()
		for what, errs := range map[string][]error{
			"the Reducer is closed": {s.AllReduce(ctx, g[0]), s.Rebind(c), s.Restore(ctx, nil), s.ScaleResidual(1),
				stateErr, residualErr},
			"the Gradients is closed": {all.ReduceAll(ctx, g), all.Rebind(ctx, c), all.Restore(ctx, nil)},
		} {
			for _, err := range errs {
				assert.ErrorIs(t, err, comm.ErrClosed)
				assert.ErrorContains(t, err, what)
				assert.NotContains(t, err.Error(), "communicator")
			}
		}
		standin.Free(t, g)
		return c.Barrier(ctx)
	})
}

// named returns a Reducer whose settings are name.
func named(settings string) func(ddp.Bucket) (ddp.Reducer, error) {
	return func(b ddp.Bucket) (ddp.Reducer, error) {
		r, err := newAlternating(b)
		return struct {
			ddp.Reducer
			fmt.Stringer
		}{r, text(settings)}, err
	}
}

type text string

func (t text) String() string { return string(t) }

// TestBucketsDisagree has the last rank reduce other buckets than the others, or in
// another way, also where all are plain allreduces, which some backends do not compare.
func TestBucketsDisagree(t *testing.T) {
	const ranks = 3
	type config = ddp.Config
	topk := sparse.Config{Pattern: "topkA", Density: 0.1}
	failing := topk
	failing.NonFinite = sparse.FailNonFinite
	for what, k := range map[string]struct {
		cfg, other config
		want       string
	}{
		"wire":     {config{}, config{Wire: dtype.BF16}, "200 of f32 as bf16, dense"},
		"buckets":  {config{}, config{BucketBytes: 400}, "100 of f32 as f32, dense"},
		"sum":      {config{}, config{Sum: true}, "sum, uneven false"},
		"sparse":   {config{}, config{Config: topk, DenseUpTo: -1}, "topkA, density 0.1"},
		"uneven":   {config{Uneven: true}, config{}, "uneven false"},
		"views":    {config{}, config{BucketViews: true}, "views true"},
		"reducer":  {config{Reducer: named("rank 4")}, config{Reducer: named("rank 8")}, "reduced by rank 8"},
		"overflow": {config{Config: topk, DenseUpTo: -1}, config{Config: failing, DenseUpTo: -1}, "NonFinite:3"},
	} {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			cfg := k.cfg
			if c.Rank() == ranks-1 {
				cfg = k.other
			}
			all := standin.Gradients(t, rt, 2)
			g, err := ddp.New(ctx, rt, c, all, cfg)
			require.NoError(t, err, what)
			err = g.ReduceAll(ctx, all)
			assert.ErrorIs(t, err, comm.ErrMismatch, what)
			assert.ErrorContains(t, err, k.want, what)
			require.NoError(t, g.Close())
			standin.Free(t, all)
			return nil
		})
	}
}

// TestManyBucketsDisagree has the ranks compare also what comes behind many buckets, and which gradients of a bucket
// have what length. The first difference is named.
func TestManyBucketsDisagree(t *testing.T) {
	const ranks, params = 2, 60
	type config = ddp.Config
	clip := func(norm float64) config {
		return config{BucketBytes: 400, Config: sparse.Config{ClipNorm: norm}}
	}
	for what, k := range map[string]struct {
		cfgs [ranks]config
		lens [ranks]int // of gradient 58; of the last one what is left of 200
		want string
	}{
		"clip":    {[ranks]config{clip(1), clip(2)}, [ranks]int{100, 100}, "ClipNorm:2"},
		"sum":     {[ranks]config{{BucketBytes: 400}, {BucketBytes: 400, Sum: true}}, [ranks]int{100, 100}, `rank 1 has "sum, `},
		"lengths": {[ranks]config{}, [ranks]int{100, 150}, `rank 0 has "gradient 58: 100 of f32", rank 1 has "gradient 58: 150 of f32"`},
	} {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			all := standin.Gradients(t, rt, params)
			for i, n := range []int{k.lens[c.Rank()], 200 - k.lens[c.Rank()]} {
				last := params - 2 + i
				require.NoError(t, all[last].Free())
				var err error
				all[last], err = runtime.New(rt, dtype.F32, n)
				require.NoError(t, err)
			}
			g, err := ddp.New(ctx, rt, c, all, k.cfgs[c.Rank()])
			require.NoError(t, err, what)
			err = g.ReduceAll(ctx, all)
			assert.ErrorIs(t, err, comm.ErrMismatch, what)
			assert.ErrorContains(t, err, k.want, what)
			require.NoError(t, g.Close())
			standin.Free(t, all)
			return nil
		})
	}
}
