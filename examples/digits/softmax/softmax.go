// Package softmax is the training that examples of compression share: a softmax regression that reads
// digits.
package softmax

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/examples/digits"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Result is what a training came to.
type Result struct {
	Accuracy float64 // on test images
	Sent     int64   // bytes by rank 0
}

// String implements [fmt.Stringer].
func (r Result) String() string {
	return fmt.Sprintf("%.1f %% of the test images read, a rank sent %d KiB", 100*r.Accuracy, r.Sent>>10)
}

// Train trains a softmax regression on four ranks, goroutines of this process, for ten epochs. cfg says
// how gradients are averaged: those of a matrix of [digits.Classes]×[digits.Pixels] and of a vector.
func Train(ctx context.Context, cfg ddp.Config) (result Result, err error) {
	err = local.Run(ctx, 4, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		r, err := train(ctx, rt, c, cfg)
		if c.Rank() == 0 {
			result = r
		}
		return errors.Join(err, rt.Close())
	})
	return result, err
}

func train(ctx context.Context, rt *cpu.Runtime, c comm.Communicator, cfg ddp.Config) (result Result, err error) {
	training, test, err := digits.Split(1)
	if err != nil {
		return result, err
	}
	weights, bias := make([]float32, digits.Classes*digits.Pixels), make([]float32, digits.Classes)
	dw, db := make([]float32, len(weights)), make([]float32, len(bias))
	w, err := cpu.Wrap(rt, dw, digits.Classes, digits.Pixels)
	if err != nil {
		return result, err
	}
	defer w.Free()
	b, err := cpu.Wrap(rt, db)
	if err != nil {
		return result, err
	}
	defer b.Free()
	meter := comm.NewMeter(c)
	gradients := []*runtime.Tensor{w, b}
	sync, err := ddp.New(ctx, rt, meter, gradients, cfg)
	if err != nil {
		return result, err
	}
	defer sync.Close()
	sampler, err := distributed.NewSampler(c, training.Len(), distributed.SamplerConfig{Seed: 1})
	if err != nil {
		return result, err
	}
	const batch, rate = 16, 0.5
	for epoch := range 10 {
		for _, images := range sampler.Batches(epoch, batch) {
			clear(dw)
			clear(db)
			for _, i := range images {
				p := probabilities(weights, bias, training.Image(i))
				p[training.Labels[i]]--
				for k, d := range p {
					d /= batch
					db[k] += d
					for j, x := range training.Image(i) {
						dw[k*digits.Pixels+j] += float32(d * x)
					}
				}
			}
			if err := sync.ReduceAll(ctx, gradients); err != nil {
				return result, err
			}
			for i, d := range dw {
				weights[i] -= float32(rate * d)
			}
			for i, d := range db {
				bias[i] -= float32(rate * d)
			}
		}
	}
	right := 0
	for i, label := range test.Labels {
		p := probabilities(weights, bias, test.Image(i))
		best := 0
		for k := range p {
			if p[k] > p[best] {
				best = k
			}
		}
		if best == int(label) {
			right++
		}
	}
	return Result{float64(right) / float64(test.Len()), meter.Totals().SentBytes}, nil
}

// probabilities returns that of each digit.
func probabilities(weights, bias, image []float32) []float32 {
	p := make([]float32, digits.Classes)
	var sum float32
	for k := range p {
		z := bias[k]
		for j, x := range image {
			z += float32(weights[k*digits.Pixels+j] * x)
		}
		p[k] = float32(math.Exp(float64(z)))
		sum += p[k]
	}
	for k := range p {
		p[k] /= sum
	}
	return p
}
