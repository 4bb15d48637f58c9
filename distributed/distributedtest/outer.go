package distributedtest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// testOuter trains by an outer loop, and compares the common parameters, bit for bit, with those over the other
// backend, if there is one.
func testOuter(r *rank) {
	reduce := func(cfg sparse.Config) ddp.Config {
		return ddp.Config{Config: cfg, DenseUpTo: -1}
	}
	for _, cfg := range []outer.Config{
		{Every: 1},
		{Every: 4, LearningRate: 0.5, Momentum: 0.5, Nesterov: true, Fragments: 2, Delay: 2, Mix: 0.5},
		{Every: 3, Delay: 3, Decay: 0.5, Reduce: reduce(sparse.Config{Pattern: sparse.TopkA, Density: 0.1})},
		{Every: 4, Fragments: 2, Weighted: true,
			Reduce: reduce(sparse.Config{
				Pattern: sparse.Chunked,
				Density: 0.1,
				Values:  sparse.I2,
			})},
		{Every: 4, Delay: 1, Reduce: reduce(sparse.Config{Values: sparse.I8})},
	} {
		r.part(fmt.Sprintf("%+v", cfg), func() {
			hash := r.trainOuter(cfg)
			if r.reference == nil {
				return
			}
			must(r.reference(r.ctx, r.size, func(ctx context.Context, cr commtest.Rank) error {
				return newRank(ctx, &suite{}, cr).run(func(o *rank) {
					if want := o.trainOuter(cfg); o.rank == r.rank && hash != want {
						fail("common parameters have hash %x, over the other backend %x", hash, want)
					}
				})
			}))
		})
	}
}

// trainOuter moves parameters by multiples of 2^-6, and returns the hash of the common ones.
func (r *rank) trainOuter(cfg outer.Config) uint64 {
	ones := func(n int) []float32 {
		return slices.Repeat([]float32{1}, n)
	}
	params := []*runtime.Tensor{
		r.tensor(dtype.F32, ones(500)),
		r.tensor(dtype.BF16, ones(7)),
		r.tensor(dtype.F32, ones(1300)),
	}
	l := got(outer.New(r.ctx, r.rt, r.c, params, cfg))
	for step := range 13 {
		rng := rand.New(rand.NewPCG(uint64(step), uint64(r.rank)))
		for _, t := range params {
			values := r.read(t)
			for i := range values {
				values[i] += float32(rng.IntN(17)-8) / 64
			}
			r.write(t, values)
		}
		must(l.Step(r.ctx))
	}
	hash := got(l.Hash(r.ctx))
	must(l.Close())
	return hash
}
