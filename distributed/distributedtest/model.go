package distributedtest

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
)

// testGradientSync runs a small model's gradients through buckets: dense and
// sparse, in backward and in random order.
func testGradientSync(r *rank) {
	type model struct {
		name   string
		cfg    ddp.Config
		sparse bool
		hosts  int // of a mesh; 0: there is none
	}
	reduction := sparse.Config(config(sparse.Oktopk, 0.9))
	models := []model{
		{name: "one bucket"},
		{name: "small buckets", cfg: ddp.Config{BucketBytes: 3000}},
		{name: "each its own", cfg: ddp.Config{BucketBytes: 1}},
		{name: "sums", cfg: ddp.Config{BucketBytes: 3000, Sum: true}},
		{name: "sparse", cfg: ddp.Config{BucketBytes: 3000, Config: reduction, DenseUpTo: -1}, sparse: true},
		{name: "large ones sparse", cfg: ddp.Config{BucketBytes: 3000, Config: reduction, DenseUpTo: 400}, sparse: true},
		{name: "in the buckets", cfg: ddp.Config{BucketBytes: 3000, BucketViews: true}},
		{
			name:   "sparse, in the buckets",
			cfg:    ddp.Config{BucketBytes: 3000, BucketViews: true, Config: reduction, DenseUpTo: -1},
			sparse: true,
		},
	}
	for i, pattern := range sparsity.Patterns() {
		cfg := ddp.Config{
			BucketBytes: 3000,
			Config:      sparse.Config(config(pattern, 1)),
			DenseUpTo:   -1,
		}
		cfg.NoUndo = i%2 == 1
		models = append(models, model{name: fmt.Sprintf("%s, no undo %v", pattern, cfg.NoUndo), cfg: cfg, sparse: true})
	}
	for hosts := 1; hosts <= r.size; hosts++ {
		if r.size%hosts != 0 {
			continue
		}
		mesh := func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
			return distributed.NewMesh(ctx, c, distributed.Dim{Name: "host",
				Size: hosts}, distributed.Dim{Name: "rank", Size: -1})
		}
		for _, pattern := range []string{sparse.Dense, sparse.TopkA, sparse.Oktopk} {
			cfg := ddp.Config{
				BucketBytes: 3000,
				Config:      sparse.Config(config(pattern, 1)),
				DenseUpTo:   -1,
				Mesh:        mesh,
			}
			models = append(models, model{name: fmt.Sprintf("%s, %d hosts",
				pattern, hosts), cfg: cfg, sparse: true, hosts: hosts})
		}
	}
	for _, k := range models {
		if k.sparse && !r.hasKernels() {
			continue
		}
		r.part(k.name, func() { r.trainSteps(k.cfg, cmp.Or(k.hosts, r.size)) })
	}
}

// The gradients of trainSteps.
var (
	modelLengths = []int{500, 10, 0, 300, 400, 1, 700}
	modelTypes   = []dtype.DType{dtype.F32, dtype.F32, dtype.F32, dtype.BF16, dtype.F32, dtype.F32, dtype.F32}
)

// trainSteps runs steps and compares the averages with a float64 reference.
// All configurations send everything, so that they are exact. counted is among how
// many ranks the traffic is that [ddp.Stats] counts.
func (r *rank) trainSteps(cfg ddp.Config, counted int) {
	var sets [2][]*runtime.Tensor // gradients move from step to step
	for s := range sets {
		for i, n := range modelLengths {
			sets[s] = append(sets[s], r.tensor(modelTypes[i], make([]float32, n)))
		}
	}
	g := got(ddp.New(r.ctx, r.rt, r.c, sets[0], cfg))
	if cfg.BucketViews {
		sets[0] = g.Views()
		sets[1] = g.Views()
	}
	for step := range 5 {
		params := slices.Clone(sets[step%2])
		for i, n := range modelLengths {
			r.write(params[i], r.gradient(families[0], n, r.rank, r.size, 10*step+i))
		}
		order := rand.New(rand.NewPCG(seed, uint64(r.rank))).Perm(len(params))
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
			must(g.ReduceAll(r.ctx, params))
		} else {
			for _, i := range order {
				if params[i] != nil {
					must(g.Ready(r.ctx, i, params[i]))
				}
			}
			must(g.Wait(r.ctx))
		}
		for i := range params {
			if params[i] != nil && g.Result(i) != params[i] {
				fail("step %d: the result of gradient %d is not where it was given", step, i)
			}
			r.exactAverage(g, cfg, step, i, i == leftOut)
		}
		stats := got(g.Stats(r.ctx))
		sends := counted > 1
		if cfg.Pattern == sparse.Gtopk && r.rank == 0 {
			sends = false // the root of its tree receives, and a broadcast counts at the others
		}
		if stats.Step != step || stats.Buckets != len(g.Buckets()) || (stats.SentElements > 0) != sends {
			fail("step %d: stats %+v", step, stats)
		}
	}
	must(g.Close(), g.Close())
}

// exactAverage compares the result of gradient i with the average in float64. alone: only the last rank had one.
func (r *rank) exactAverage(g *ddp.Gradients, cfg ddp.Config, step, i int, alone bool) {
	n := modelLengths[i]
	want, scale := r.average(families[0], n, 10*step+i)
	if alone {
		for j, v := range r.gradient(families[0], n, r.size-1, r.size, 10*step+i) {
			want[j] = float64(v) / float64(r.size)
			scale[j] = math.Abs(float64(v))
		}
	}
	if cfg.Sum {
		for j := range want {
			want[j] *= float64(r.size)
			scale[j] *= float64(r.size)
		}
	}
	tolerance := 1e-6
	if modelTypes[i] == dtype.BF16 {
		tolerance = halfRoundings(r.size) * 0x1p-8
	}
	for j, x := range r.read(g.Result(i)) {
		if math.Abs(float64(x)-want[j]) > scale[j]*tolerance {
			fail("step %d: gradient %d is %v at %d, want %v", step, i, x, j, want[j])
		}
	}
}

// testMesh splits the world into a grid and checks who is together with whom,
// and that the communicators work.
func testMesh(r *rank) {
	for columns := 1; columns <= r.size; columns++ {
		if r.size%columns != 0 {
			continue
		}
		m := got(distributed.NewMesh(r.ctx, r.c,
			distributed.Dim{Name: "data", Size: -1}, distributed.Dim{Name: "tensor", Size: columns}))
		row := r.rank / columns
		column := r.rank % columns
		for _, k := range []struct {
			name                    string
			coord, size, first, gap int
		}{
			{"data", row, r.size / columns, column, columns},
			{"tensor", column, columns, row * columns, 1},
		} {
			c := got(m.Comm(k.name))
			coord := got(m.Coord(k.name))
			if coord != k.coord || c.Rank() != k.coord || c.WorldSize() != k.size {
				fail("mesh with %d columns: %s has coordinate %d, rank %d of %d; want %d of %d",
					columns, k.name, coord, c.Rank(), c.WorldSize(), k.coord, k.size)
			}
			var want []float32
			for i := range k.size {
				want = append(want, float32(k.first+i*k.gap))
			}
			dst := r.tensor(dtype.F32, make([]float32, k.size))
			must(distributed.AllGather(r.ctx, c, dst, r.tensor(dtype.F32, []float32{float32(r.rank)})))
			r.holds(dst, want, fmt.Sprintf("ranks that %s joins in a mesh with %d columns", k.name, columns))
		}
		if rank := got(m.Rank(row, column)); rank != r.rank {
			fail("mesh: coordinates %d, %d are rank %d, want %d", row, column, rank, r.rank)
		}
		must(m.Close(), m.Close())
	}
}
