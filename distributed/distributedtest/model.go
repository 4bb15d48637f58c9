package distributedtest

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// testGradientSync runs a small model's gradients through buckets: dense and
// sparse, in backward and in random order.
func testGradientSync(r *rank) error {
	for _, k := range []struct {
		name   string
		cfg    ddp.Config
		sparse bool
	}{
		{name: "one bucket"},
		{name: "small buckets", cfg: ddp.Config{BucketBytes: 3000}},
		{name: "each its own", cfg: ddp.Config{BucketBytes: 1}},
		{name: "sums", cfg: ddp.Config{BucketBytes: 3000, Sum: true}},
		{name: "sparse", cfg: ddp.Config{BucketBytes: 3000, Config: often(sparse.Oktopk, 0.9), DenseUpTo: -1}, sparse: true},
		{name: "large ones sparse", cfg: ddp.Config{BucketBytes: 3000, Config: often(sparse.Oktopk, 0.9), DenseUpTo: 400}, sparse: true},
		{name: "mixed", cfg: ddp.Config{BucketBytes: 3000, PerBucket: func(bucket, _ int) sparse.Config {
			return often(sparse.Patterns()[bucket%10], 1)
		}}, sparse: true},
		{name: "in the buckets", cfg: ddp.Config{BucketBytes: 3000, BucketViews: true}},
		{name: "sparse, in the buckets", cfg: ddp.Config{BucketBytes: 3000, BucketViews: true, Config: often("oktopk", 0.9)}, sparse: true},
		{name: "mixed, no undo", cfg: ddp.Config{BucketBytes: 3000, Config: sparse.Config{NoUndo: true},
			PerBucket: func(bucket, _ int) sparse.Config {
				c := often(sparse.Patterns()[(bucket+5)%10], 1)
				c.NoUndo = true
				return c
			}}, sparse: true},
	} {
		if k.sparse && !r.hasKernels() {
			continue
		}
		if err := errors.Join(r.trainSteps(k.cfg), r.free()); err != nil {
			return fmt.Errorf("%s: %w", k.name, err)
		}
	}
	return testGradientMisuse(r)
}

// trainSteps runs steps and compares the averages with a float64 reference.
// All configurations send everything, so that they are exact.
func (r *rank) trainSteps(cfg ddp.Config) error {
	lengths := []int{500, 10, 0, 300, 400, 1, 700}
	types := []dtype.DType{dtype.F32, dtype.F32, dtype.F32, dtype.BF16, dtype.F32, dtype.F32, dtype.F32}
	var sets [2][]*runtime.Tensor // gradients move from step to step
	for s := range sets {
		for i, n := range lengths {
			t, err := r.tensor(types[i], make([]float32, n))
			if err != nil {
				return err
			}
			sets[s] = append(sets[s], t)
		}
	}
	g, err := ddp.New(r.ctx, r.rt, r.c, sets[0], cfg)
	if err != nil {
		return err
	}
	if cfg.BucketViews {
		sets[0], sets[1] = g.Views(), g.Views()
	}
	for step := range 5 {
		params := slices.Clone(sets[step%2])
		for i, n := range lengths {
			if err := r.write(params[i], r.gradient(families[0], n, r.rank, r.size, 10*step+i)); err != nil {
				return err
			}
		}
		order := rand.New(rand.NewPCG(r.seed, uint64(r.rank))).Perm(len(params))
		if step == 0 {
			for i := range order {
				order[i] = len(params) - 1 - i
			}
		}
		// In the last steps all ranks but the last leave a gradient out.
		leftOut := -1
		if step >= 3 {
			leftOut = 2 + step%3
			if r.rank < r.size-1 {
				params[leftOut] = nil
			}
		}
		if step == 4 {
			if err := g.ReduceAll(r.ctx, params); err != nil {
				return err
			}
		} else {
			for _, i := range order {
				if params[i] == nil {
					continue
				}
				if err := g.Ready(r.ctx, i, params[i]); err != nil {
					return err
				}
			}
			if err := g.Wait(r.ctx); err != nil {
				return err
			}
		}
		for i, n := range lengths {
			if params[i] != nil && g.Result(i) != params[i] {
				return fmt.Errorf("step %d: the result of gradient %d is not where it was given", step, i)
			}
			got, err := r.read(g.Result(i))
			if err != nil {
				return err
			}
			want, scale := r.average(families[0], n, 10*step+i)
			if i == leftOut {
				for j, v := range r.gradient(families[0], n, r.size-1, r.size, 10*step+i) {
					want[j], scale[j] = float64(v)/float64(r.size), math.Abs(float64(v))
				}
			}
			if cfg.Sum {
				for j := range want {
					want[j] *= float64(r.size)
					scale[j] *= float64(r.size)
				}
			}
			tolerance := 1e-6
			if types[i] == dtype.BF16 {
				tolerance = halfRoundings(r.size) * 0x1p-8
			}
			for j := range got {
				if math.Abs(float64(got[j])-want[j]) > scale[j]*tolerance {
					return fmt.Errorf("step %d: gradient %d is %v at %d, want %v", step, i, got[j], j, want[j])
				}
			}
		}
		stats, err := g.Stats(r.ctx)
		if err != nil {
			return err
		}
		if stats.Step != step || stats.Buckets != len(g.Buckets()) || (stats.SentElements > 0) != (r.size > 1) {
			return fmt.Errorf("step %d: stats %+v", step, stats)
		}
	}
	return errors.Join(g.Close(), g.Close())
}

func testGradientMisuse(r *rank) error {
	a, err := r.tensor(dtype.F32, make([]float32, 4))
	if err != nil {
		return err
	}
	i32, err := runtime.New(r.rt, dtype.I32, 4)
	if err != nil {
		return err
	}
	r.live = append(r.live, i32)
	g, err := ddp.New(r.ctx, r.rt, r.c, []*runtime.Tensor{a}, ddp.Config{})
	if err != nil {
		return err
	}
	_, nilGradient := ddp.New(r.ctx, r.rt, r.c, []*runtime.Tensor{a, nil}, ddp.Config{})
	_, integers := ddp.New(r.ctx, r.rt, r.c, []*runtime.Tensor{i32}, ddp.Config{})
	_, bytes := ddp.New(r.ctx, r.rt, r.c, nil, ddp.Config{BucketBytes: -1})
	_, sum := ddp.New(r.ctx, r.rt, r.c, []*runtime.Tensor{a}, ddp.Config{Sum: true, Config: sparse.Config{ClipNorm: 1}})
	_, pattern := ddp.New(r.ctx, r.rt, r.c, []*runtime.Tensor{a}, ddp.Config{Config: sparse.Config{Pattern: "none"}})
	long, err := r.tensor(dtype.F32, make([]float32, 5))
	if err != nil {
		return err
	}
	number := g.Ready(r.ctx, 1, a)
	none := g.Ready(r.ctx, 0, nil)
	length := g.Ready(r.ctx, 0, long)
	typed := g.Ready(r.ctx, 0, i32)
	many := g.ReduceAll(r.ctx, []*runtime.Tensor{a, a})
	first := g.Ready(r.ctx, 0, a)
	twice := g.Ready(r.ctx, 0, a)
	wait := g.Wait(r.ctx)
	if err := errors.Join(first, wait, g.Close()); err != nil {
		return err
	}
	closed := g.Ready(r.ctx, 0, a)
	return unexpected([]expectation{
		{"nil gradient", nilGradient, comm.ErrArgument},
		{"integers", integers, comm.ErrUnsupported},
		{"bucket bytes", bytes, comm.ErrArgument},
		{"pattern", pattern, comm.ErrArgument},
		{"sum and clipping", sum, comm.ErrArgument},
		{"no tensor", none, comm.ErrArgument},
		{"another length", length, runtime.ErrShape},
		{"another type", typed, runtime.ErrDType},
		{"too many", many, comm.ErrArgument},
		{"number", number, comm.ErrArgument},
		{"twice", twice, comm.ErrArgument},
		{"closed", closed, comm.ErrClosed},
	})
}

// testMesh splits the world into a grid and checks who is together with whom,
// and that the communicators work.
func testMesh(r *rank) error {
	for columns := 1; columns <= r.size; columns++ {
		if r.size%columns != 0 {
			continue
		}
		m, err := distributed.NewMesh(r.ctx, r.c,
			distributed.Dim{Name: "data", Size: -1}, distributed.Dim{Name: "tensor", Size: columns})
		if err != nil {
			return err
		}
		row, column := r.rank/columns, r.rank%columns
		for _, k := range []struct {
			name                    string
			coord, size, first, gap int
		}{
			{"data", row, r.size / columns, column, columns},
			{"tensor", column, columns, row * columns, 1},
		} {
			c, err := m.Comm(k.name)
			if err != nil {
				return err
			}
			coord, err := m.Coord(k.name)
			if err != nil {
				return err
			}
			if coord != k.coord || c.Rank() != k.coord || c.WorldSize() != k.size {
				return fmt.Errorf("mesh with %d columns: %s has coordinate %d, rank %d of %d; want %d of %d",
					columns, k.name, coord, c.Rank(), c.WorldSize(), k.coord, k.size)
			}
			var want []float32
			for i := range k.size {
				want = append(want, float32(k.first+i*k.gap))
			}
			src, err := r.tensor(dtype.F32, []float32{float32(r.rank)})
			if err != nil {
				return err
			}
			dst, err := r.tensor(dtype.F32, make([]float32, k.size))
			if err != nil {
				return err
			}
			if err := distributed.AllGather(r.ctx, c, dst, src); err != nil {
				return err
			}
			if got, err := r.read(dst); err != nil || !slices.Equal(got, want) {
				return errors.Join(err, fmt.Errorf("mesh with %d columns: %s joins ranks %v, want %v", columns, k.name, got, want))
			}
		}
		if rank, err := m.Rank(row, column); err != nil || rank != r.rank {
			return errors.Join(err, fmt.Errorf("mesh: coordinates %d, %d are rank %d, want %d", row, column, rank, r.rank))
		}
		if err := errors.Join(m.Close(), m.Close()); err != nil {
			return err
		}
	}
	return testMeshMisuse(r)
}

func testMeshMisuse(r *rank) error {
	for name, dims := range map[string][]distributed.Dim{
		"none":      nil,
		"no name":   {{Size: r.size}},
		"twice":     {{Name: "a", Size: r.size}, {Name: "a", Size: 1}},
		"zero":      {{Name: "a", Size: 0}},
		"too many":  {{Name: "a", Size: r.size + 1}},
		"too few":   {{Name: "a", Size: r.size}, {Name: "b", Size: 2}},
		"two open":  {{Name: "a", Size: -1}, {Name: "b", Size: -1}},
		"remainder": {{Name: "a", Size: -1}, {Name: "b", Size: r.size + 1}},
	} {
		if _, err := distributed.NewMesh(r.ctx, r.c, dims...); !errors.Is(err, comm.ErrArgument) {
			return fmt.Errorf("mesh %s: got error %v, want %v", name, err, comm.ErrArgument)
		}
	}
	m, err := distributed.NewMesh(r.ctx, r.c, distributed.Dim{Name: "data", Size: r.size})
	if err != nil {
		return err
	}
	_, unknown := m.Comm("tensor")
	_, coord := m.Coord("tensor")
	_, tooFew := m.Rank()
	_, outside := m.Rank(r.size)
	for _, err := range []error{unknown, coord, tooFew, outside} {
		if !errors.Is(err, comm.ErrArgument) {
			return fmt.Errorf("mesh: got error %v, want %v", err, comm.ErrArgument)
		}
	}
	return m.Close()
}
