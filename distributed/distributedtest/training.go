package distributedtest

import (
	"bytes"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// testMany reduces and broadcasts tensors of several types together, and moves bytes
// and metrics.
func testMany(r *rank) {
	var tensors []*runtime.Tensor
	for i, dt := range []dtype.DType{dtype.F32, dtype.I32, dtype.BF16, dtype.F32, dtype.U8} {
		tensors = append(tensors, r.tensor(dt, make([]float32, []int{1, 0, 1000, 30, 7}[i])))
	}
	check := func(operation string, move func() error, want func(i int) int) {
		for i, t := range tensors {
			must(t.Fill(float64(i + r.rank)))
		}
		must(move())
		must(r.c.Sync(r.ctx))
		for i, t := range tensors {
			for j, x := range r.read(t) {
				if x != float32(want(i)) {
					fail("%s: tensor %d has %v at %d, want %d", operation, i, x, j, want(i))
				}
			}
		}
	}
	check("allreduce", func() error {
		return distributed.AllReduceAll(r.ctx, r.c, tensors, comm.Sum)
	},
		func(i int) int { return r.size*i + r.size*(r.size-1)/2 })
	text := func(rank int) []byte {
		return bytes.Repeat([]byte{byte(rank)}, rank*100%301)
	}
	for root := range r.size {
		check("broadcast", func() error {
			return distributed.BroadcastAll(r.ctx, r.c, tensors, root)
		},
			func(i int) int { return i + root })
		if one := got(distributed.BroadcastBytes(r.ctx, r.rt, r.c, text(r.rank), root)); !bytes.Equal(one, text(root)) {
			fail("broadcast of %d bytes from %d: %d bytes", len(text(root)), root, len(one))
		}
		all := got(distributed.GatherBytes(r.ctx, r.rt, r.c, text(r.rank), root))
		everywhere := got(distributed.AllGatherBytes(r.ctx, r.rt, r.c, text(r.rank)))
		if r.rank != root && all == nil {
			all = everywhere
		}
		if len(all) != r.size {
			fail("gathered bytes of %d ranks", len(all))
		}
		for rank, b := range all {
			if !bytes.Equal(b, text(rank)) {
				fail("gathered %d bytes of rank %d, want %d", len(b), rank, len(text(rank)))
			}
		}
	}
	average := got(distributed.AverageMetrics(r.ctx, r.rt, r.c, float64(r.rank), 1, float64(r.rank)))
	if r.size > 1 && (average[0] != 1 || math.Abs(average[1]-float64(2*r.size-1)/3) > 1e-12) {
		fail("averages %v", average)
	}
}

// testTraining has ranks with fewer and fewer batches, each of three passes.
func testTraining(r *rank) {
	for _, cfg := range []ddp.Config{
		{},
		{BucketBytes: 5000},
		{Wire: dtype.BF16},
		{Config: sparse.Config{Pattern: sparse.TopkA, Density: 1}, DenseUpTo: -1},
	} {
		cfg.Uneven = true
		r.part(fmt.Sprintf("%+v", cfg), func() { r.unevenEpochs(cfg) })
	}
	for _, cfg := range []ddp.Config{
		{},
		{Wire: dtype.BF16},
		{Shard: true},
		{Config: sparse.Config{ClipNorm: 1e9}},
		{Config: sparse.Config{Pattern: sparse.TopkA, Density: 1}, DenseUpTo: -1},
	} {
		for _, dt := range []dtype.DType{dtype.F32, dtype.F16} {
			cfg := cfg
			cfg.Weighted = true
			cfg.Uneven = !cfg.Shard
			r.part(fmt.Sprintf("%+v, %v", cfg, dt), func() { r.weightedSteps(cfg, dt) })
		}
	}
}

// weightedSteps has passes with different numbers of samples on each rank, the last of several ranks without any, whose
// gradients are not finite, and means over the samples of all ranks.
func (r *rank) weightedSteps(cfg ddp.Config, dt dtype.DType) {
	var gradients []*runtime.Tensor
	for _, n := range []int{1, 3000, 40, 0} {
		gradients = append(gradients, r.tensor(dt, make([]float32, n)))
	}
	g := got(ddp.New(r.ctx, r.rt, r.c, gradients, cfg))
	value := func(rank, step, pass int) float64 {
		return float64(1 + rank + 2*step + 5*pass)
	}
	weight := func(rank, step, pass int) float64 {
		switch {
		case rank == r.size-1 && r.size > 1:
			return 0
		case step == 1:
			return 8 // on all ranks but one
		}
		return float64(1 + rank + pass)
	}
	for step := range 3 {
		sum := 0.0
		total := 0.0
		for rank := range r.size {
			for pass := range 2 {
				sum += weight(rank, step, pass) * value(rank, step, pass)
				total += weight(rank, step, pass)
			}
		}
		for pass := range 2 {
			w := weight(r.rank, step, pass)
			must(g.Weigh(w))
			x := value(r.rank, step, pass)
			if w == 0 {
				x = math.NaN()
			}
			for i, t := range gradients {
				must(t.Fill(x))
				if pass == 0 {
					must(g.Accumulate(i, t))
				}
			}
		}
		must(g.ReduceAll(r.ctx, gradients))
		must(r.c.Sync(r.ctx))
		results := gradients
		if cfg.Shard {
			results = nil
			for _, s := range got(g.Shards()).Buckets {
				for _, p := range s.Parts {
					results = append(results, got(s.Tensor.Slice(0, p.Offset, p.Offset+p.To-p.From)))
				}
			}
		}
		for i, t := range results {
			for j, x := range r.read(t) {
				if math.Abs(float64(x)-sum/total) > sum/total/50 {
					fail("step %d: result %d has %v at %d, want %v", step, i, x, j, sum/total)
				}
			}
		}
		if stats := got(g.Stats(r.ctx)); stats.Skipped || stats.Weight != total {
			fail("step %d: %+v, want the weight %v", step, stats, total)
		}
	}
	must(g.Close())
}

func (r *rank) unevenEpochs(cfg ddp.Config) {
	var gradients []*runtime.Tensor
	for _, n := range []int{1, 3000, 40, 0} {
		gradients = append(gradients, r.tensor(dtype.F32, make([]float32, n)))
	}
	g := got(ddp.New(r.ctx, r.rt, r.c, gradients, cfg))
	updates := 0
	update := func() error { // in step s, the ranks before size-s have three times s+1
		step := updates % r.size
		updates++
		must(r.c.Sync(r.ctx))
		want := float64((r.size - step) * 3 * (step + 1))
		for i := range gradients {
			for j, x := range r.read(g.Result(i)) {
				if math.Abs(float64(x)*float64(r.size)-want) > want/100 {
					fail("update %d: gradient %d has %v at %d, want %v", updates, i, x, j, want/float64(r.size))
				}
			}
		}
		return nil
	}
	const epochs = 2
	for range epochs {
		for step := range r.size - r.rank {
			for pass := range 3 {
				for i, t := range gradients {
					must(t.Fill(float64(step + 1)))
					if pass < 2 {
						must(g.Accumulate(i, t))
					}
				}
			}
			must(g.ReduceAll(r.ctx, gradients))
			must(update())
		}
		must(g.Join(r.ctx, gradients, update))
	}
	if updates != epochs*r.size {
		fail("%d updates, want %d", updates, epochs*r.size)
	}
	must(g.Close())
}
