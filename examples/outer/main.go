// Command outer trains with few exchanges. Each rank makes many steps alone, and then the ranks average the movement
// of their parameters, as entries of two bits (DiLoCo, SparseLoCo).
//
//	go run ./examples/outer                                      # four ranks, every 11 steps
//	go run ./examples/outer -every 1 -pattern dense -values f32  # in every step, for comparison
//
// Its ranks are goroutines unless a launcher starts the command. Over slow links, tutti train --outer 11 --backend
// tcp does the same.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/examples/digits"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func main() {
	var cfg outer.Config
	flag.IntVar(&cfg.Every, "every", 11, "steps of a rank between exchanges")
	flag.StringVar(&cfg.Reduce.Pattern, "pattern", "chunked", "what is sent: docs/sparse.md")
	flag.StringVar(&cfg.Reduce.Values, "values", "i2", "as what values travel")
	flag.Float64Var(&cfg.Reduce.Density, "density", 0.05, "share of the entries that is sent")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	if cfg.Every < 1 {
		log.Fatalf("-every is %d, want 1 or more", cfg.Every)
	}
	cfg.Reduce.DenseUpTo = -1 // biases are compressed like the rest
	cfg.Weighted = true       // by the number of images that ranks have used
	err := tutti.Run(context.Background(), func(ctx context.Context, r tutti.Rank) error {
		s, read, err := train(ctx, r, cfg)
		if r.Comm.Rank() == 0 && err == nil {
			fmt.Printf("test accuracy %.1f %% after %d steps in %d rounds; a rank sent %.1f kB\n",
				100*read, s.Steps, s.Rounds, float64(s.SentBytes)/1e3)
		}
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}

// train trains a softmax regression on digits by gradient descent, as one rank. It returns the test accuracy.
func train(ctx context.Context, r tutti.Rank, cfg outer.Config) (done outer.Stats, read float64, err error) {
	const epochs, batch, rate = 10, 16, 0.5
	training, test, err := digits.Split(1)
	if err != nil {
		return done, 0, err
	}
	weights := make([]float32, digits.Pixels*digits.Classes) // zeros on all ranks
	tensor, err := cpu.Wrap(r.Runtime, weights, digits.Pixels, digits.Classes)
	if err != nil {
		return done, 0, err
	}
	defer tensor.Free()
	loop, err := outer.New(ctx, r.Runtime, r.Comm, []*runtime.Tensor{tensor}, cfg)
	if err != nil {
		return done, 0, err
	}
	defer loop.Close()
	sampler, err := distributed.NewSampler(r.Comm, training.Len(), distributed.SamplerConfig{Seed: 1, Uneven: true})
	if err != nil {
		return done, 0, err
	}
	longest := (training.Len() + r.Comm.WorldSize() - 1) / r.Comm.WorldSize() // size of the largest share
	for epoch := range epochs {
		batches := sampler.Batches(epoch, batch)
		for step := range (longest + batch - 1) / batch {
			var images []int // none on ranks that have used all of theirs
			if step < len(batches) {
				images = batches[step]
			}
			for _, i := range images {
				digits.Descend(weights, weights, training.Image(i), training.Labels[i], -rate/batch)
			}
			if cfg.Weighted {
				if err := loop.Weigh(float64(len(images))); err != nil {
					return done, 0, err
				}
			}
			if err := loop.Step(ctx); err != nil {
				return done, 0, err
			}
		}
	}
	if err := loop.Adopt(); err != nil { // ranks differ in the middle of a window
		return done, 0, err
	}
	return loop.Stats(), digits.Accuracy(weights, test), nil
}
