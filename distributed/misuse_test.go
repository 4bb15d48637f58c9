package distributed_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

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

// TestNilCommunicator checks that every function names what is missing.
func TestNilCommunicator(t *testing.T) {
	rt := cpu.New()
	tensors := gradients(t, rt, 2)
	a, b, ctx := tensors[0], tensors[1], t.Context()
	newSparse := func() error {
		_, err := distributed.NewSparse(rt, nil, 100, distributed.Config{})
		return err
	}
	newGradientSync := func() error {
		_, err := distributed.NewGradientSync(t.Context(), rt, nil, tensors, distributed.GradientConfig{})
		return err
	}
	newMesh := func() error {
		_, err := distributed.NewMesh(ctx, nil, distributed.Dim{Name: "data", Size: 1})
		return err
	}
	for name, call := range map[string]func() error{
		"AllReduce":       func() error { return distributed.AllReduce(ctx, nil, a, comm.Sum) },
		"Broadcast":       func() error { return distributed.Broadcast(ctx, nil, a, 0) },
		"Reduce":          func() error { return distributed.Reduce(ctx, nil, a, comm.Sum, 0) },
		"AllGather":       func() error { return distributed.AllGather(ctx, nil, a, b) },
		"AllGatherV":      func() error { return distributed.AllGatherV(ctx, nil, a, b, []int{100}) },
		"ReduceScatter":   func() error { return distributed.ReduceScatter(ctx, nil, a, b, comm.Sum) },
		"AllToAll":        func() error { return distributed.AllToAll(ctx, nil, a, b) },
		"AllToAllV":       func() error { return distributed.AllToAllV(ctx, nil, a, []int{100}, b, []int{100}) },
		"Gather":          func() error { return distributed.Gather(ctx, nil, a, b, 0) },
		"Scatter":         func() error { return distributed.Scatter(ctx, nil, a, b, 0) },
		"Send":            func() error { return distributed.Send(ctx, nil, a, 0, 1) },
		"Recv":            func() error { return distributed.Recv(ctx, nil, a, 0, 1) },
		"SendRecv":        func() error { return distributed.SendRecv(ctx, nil, a, 0, b, 0, 1) },
		"AllReduceAll":    func() error { return distributed.AllReduceAll(ctx, nil, tensors, comm.Sum) },
		"BroadcastAll":    func() error { return distributed.BroadcastAll(ctx, nil, tensors, 0) },
		"BroadcastBytes":  func() error { _, err := distributed.BroadcastBytes(ctx, rt, nil, nil, 0); return err },
		"GatherBytes":     func() error { _, err := distributed.GatherBytes(ctx, rt, nil, nil, 0); return err },
		"AllGatherBytes":  func() error { _, err := distributed.AllGatherBytes(ctx, rt, nil, nil); return err },
		"AverageMetrics":  func() error { _, err := distributed.AverageMetrics(ctx, rt, nil, 1); return err },
		"NewSampler":      func() error { _, err := distributed.NewSampler(nil, 1, distributed.SamplerConfig{}); return err },
		"NewSparse":       newSparse,
		"NewGradientSync": newGradientSync,
		"NewMesh":         newMesh,
		"JoinMesh":        func() error { _, err := distributed.JoinMesh(distributed.Line{Name: "data"}); return err },
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			require.NotPanics(t, func() { err = call() })
			assert.ErrorIs(t, err, comm.ErrArgument)
			assert.ErrorContains(t, err, "communicator is nil")
		})
	}
	free(t, tensors)
	require.NoError(t, rt.Close())
}

// TestClosed checks that errors say what was closed, which is not the communicator.
func TestClosed(t *testing.T) {
	world(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		g := gradients(t, rt, 1)
		s, err := distributed.NewSparse(rt, c, 100, distributed.Config{Pattern: "topkA", Density: 0.1})
		require.NoError(t, err)
		require.NoError(t, s.Close())
		all, err := distributed.NewGradientSync(ctx, rt, c, g, distributed.GradientConfig{})
		require.NoError(t, err)
		require.NoError(t, all.Close())
		mesh, err := distributed.NewMesh(ctx, c, distributed.Dim{Name: "data", Size: 1})
		require.NoError(t, err)
		levels, err := distributed.NewLevels(rt, mesh, 100, distributed.Config{Pattern: "topkA", Density: 0.1})
		require.NoError(t, err)
		require.NoError(t, errors.Join(levels.Close(), mesh.Close()))
		_, stateErr := s.State(ctx)
		_, residualErr := s.Residual()
		for what, errs := range map[string][]error{
			"the Sparse is closed": {s.AllReduce(ctx, g[0]), s.Rebind(c), s.Restore(ctx, nil), s.ScaleResidual(1),
				stateErr, residualErr},
			"the GradientSync is closed": {all.ReduceAll(ctx, g), all.Rebind(ctx, c), all.Restore(ctx, nil)},
			"the Levels is closed":       {levels.AllReduce(ctx, g[0])},
		} {
			for _, err := range errs {
				assert.ErrorIs(t, err, comm.ErrClosed)
				assert.ErrorContains(t, err, what)
				assert.NotContains(t, err.Error(), "communicator")
			}
		}
		free(t, g)
		return c.Barrier(ctx)
	})
}

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
				g, err := runtime.FromSlice(rt, normal(n, c.Rank()), n)
				if err != nil {
					return err
				}
				s, err := distributed.NewSparse(rt, corrupting{c, k.exchange, k.words, k.value}, n, distributed.Config{Pattern: k.pattern, Density: density})
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
		g, err := runtime.FromSlice(rt, normal(mine, c.Rank()), mine)
		if err != nil {
			return err
		}
		defer g.Free()
		s, err := distributed.NewSparse(rt, c, mine, distributed.Config{Pattern: "topkAopt", Density: 0.5})
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
	cfg := distributed.Config{Pattern: "topkA", Density: 0.1}
	with := func(change func(c *distributed.Config)) distributed.Config {
		other := cfg
		change(&other)
		return other
	}
	for what, other := range map[string]struct {
		cfg  distributed.Config
		n    int
		dt   dtype.DType
		want string
	}{
		"pattern":    {with(func(c *distributed.Config) { c.Pattern = "topkA2" }), n, dtype.F32, `rank 0 has "Pattern topkA", rank 2 has "Pattern topkA2"`},
		"density":    {with(func(c *distributed.Config) { c.Density = 0.2 }), n, dtype.F32, `rank 0 has "Density 0.1", rank 2 has "Density 0.2"`},
		"type":       {cfg, n, dtype.BF16, `rank 0 has "f32", rank 2 has "bf16"`},
		"length":     {cfg, n + 1, dtype.F32, `rank 0 has "500 elements", rank 2 has "501 elements"`},
		"clipping":   {with(func(c *distributed.Config) { c.ClipNorm = 1 }), n, dtype.F32, `rank 2 has "ClipNorm 1"`},
		"the policy": {with(func(c *distributed.Config) { c.Overflow = distributed.OverflowError }), n, dtype.F32, `rank 2 has "Overflow 3"`},
	} {
		world(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			mine, length, dt := cfg, n, dtype.F32
			if c.Rank() == ranks-1 {
				mine, length, dt = other.cfg, other.n, other.dt
			}
			s, err := distributed.NewSparse(rt, c, length, mine)
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
				if s, err = distributed.NewSparse(rt, c, n, cfg); err != nil {
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

// TestBucketsDisagree has the last rank reduce other buckets than the others, or in
// another way, also where all are plain allreduces, which some backends do not compare.
func TestBucketsDisagree(t *testing.T) {
	const ranks = 3
	type config = distributed.GradientConfig
	sparse := distributed.Config{Pattern: "topkA", Density: 0.1}
	for what, k := range map[string]struct {
		cfg, other config
		want       string
	}{
		"wire":     {config{}, config{Wire: dtype.BF16}, "200 of f32 as bf16, dense"},
		"buckets":  {config{}, config{BucketBytes: 400}, "100 of f32 as f32, dense"},
		"sum":      {config{}, config{Sum: true}, "sum, uneven false"},
		"sparse":   {config{}, config{Config: sparse, DenseUpTo: -1}, "topkA, density 0.1"},
		"uneven":   {config{Uneven: true}, config{}, "uneven false"},
		"views":    {config{}, config{BucketViews: true}, "views true"},
		"overflow": {config{Config: sparse}, config{Config: distributed.Config{Pattern: "topkA", Density: 0.1, Overflow: distributed.OverflowError}}, "Overflow:3"},
	} {
		world(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			cfg := k.cfg
			if c.Rank() == ranks-1 {
				cfg = k.other
			}
			all := gradients(t, rt, 2)
			g, err := distributed.NewGradientSync(ctx, rt, c, all, cfg)
			require.NoError(t, err, what)
			err = g.ReduceAll(ctx, all)
			assert.ErrorIs(t, err, comm.ErrMismatch, what)
			assert.ErrorContains(t, err, k.want, what)
			require.NoError(t, g.Close())
			free(t, all)
			return nil
		})
	}
}

// TestManyBucketsDisagree has the ranks compare also what is not named, because more
// buckets than an error has room for come before it, or which gradients of a bucket
// have what length.
func TestManyBucketsDisagree(t *testing.T) {
	const ranks, params = 2, 60
	type config = distributed.GradientConfig
	clip := func(norm float64) config {
		return config{BucketBytes: 400, Config: distributed.Config{ClipNorm: norm}}
	}
	for what, k := range map[string]struct {
		cfgs [ranks]config
		lens [ranks]int // of the first gradient; of the second what is left of 200
	}{
		"clip":    {[ranks]config{clip(1), clip(2)}, [ranks]int{100, 100}},
		"sum":     {[ranks]config{{BucketBytes: 400}, {BucketBytes: 400, Sum: true}}, [ranks]int{100, 100}},
		"lengths": {[ranks]config{}, [ranks]int{100, 150}},
	} {
		world(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			all := gradients(t, rt, params)
			for i, n := range []int{k.lens[c.Rank()], 200 - k.lens[c.Rank()]} {
				require.NoError(t, all[i].Free())
				var err error
				all[i], err = runtime.New(rt, dtype.F32, n)
				require.NoError(t, err)
			}
			g, err := distributed.NewGradientSync(ctx, rt, c, all, k.cfgs[c.Rank()])
			require.NoError(t, err, what)
			assert.ErrorIs(t, g.ReduceAll(ctx, all), comm.ErrMismatch, what)
			require.NoError(t, g.Close())
			free(t, all)
			return nil
		})
	}
}
