// Package softmax is the training that the examples of compression and of sharded optimizers share: a softmax
// regression that recognizes digits.
package softmax

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"time"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/examples/digits"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Result is the outcome of a training.
type Result struct {
	Accuracy float64 // on test images
	Sent     int64   // bytes, by this rank
	Checksum uint32  // of the parameters
	Curve    []Point // after each epoch
}

// Point is a measurement during a training, in the form that tutti plot reads.
type Point struct {
	Name      string  `json:"name"`
	Step      int     `json:"step"`
	Seconds   float64 `json:"s"`
	SentBytes int64   `json:"sent_bytes"` // by this rank
	Accuracy  float64 `json:"accuracy"`   // on test images, in percent
}

// String implements [fmt.Stringer].
func (r Result) String() string {
	return fmt.Sprintf("test accuracy %.1f %%, a rank sent %d KiB", 100*r.Accuracy, r.Sent>>10)
}

// Optimizer updates a rank's parameters.
type Optimizer interface {
	// Update makes a step; the first step is 0. The averages are in gradients or, with shards, in g.
	Update(ctx context.Context, step int, g *ddp.Gradients, params, gradients []*runtime.Tensor) error
	// Close frees the optimizer's memory.
	Close() error
}

// descent subtracts the gradient from the parameters.
type descent struct{}

func (descent) Update(_ context.Context, _ int, _ *ddp.Gradients, params, gradients []*runtime.Tensor) error {
	const rate = 0.5
	for i := range params {
		x, err := cpu.Slice[float32](params[i])
		dx, failed := cpu.Slice[float32](gradients[i])
		if err := errors.Join(err, failed); err != nil {
			return err
		}
		for j, d := range dx {
			x[j] -= float32(rate * d)
		}
	}
	return nil
}

func (descent) Close() error { return nil }

// Train trains a softmax regression for ten epochs, as one rank of a program. cfg says how to average the gradients
// of a matrix of [digits.Pixels]×[digits.Classes] and of a vector. With Uneven an epoch uses each image once. A nil
// optimizer is gradient descent. Train closes the optimizer.
func Train(ctx context.Context, r tutti.Rank, optimizer Optimizer, cfg ddp.Config) (Result, error) {
	if optimizer == nil {
		optimizer = descent{}
	}
	result, err := train(ctx, r, optimizer, cfg)
	return result, errors.Join(err, optimizer.Close())
}

func train(ctx context.Context, r tutti.Rank, optimizer Optimizer, cfg ddp.Config) (result Result, err error) {
	training, test, err := digits.Split(1)
	if err != nil {
		return result, err
	}
	const matrix = digits.Pixels * digits.Classes
	gradient := make([]float32, matrix+digits.Classes)
	weights := make([]float32, matrix+digits.Classes)
	var gradients, params []*runtime.Tensor
	for _, x := range [][]float32{gradient, weights} {
		w, wrong := cpu.Wrap(r.Runtime, x[:matrix], digits.Pixels, digits.Classes)
		bias, failed := cpu.Wrap(r.Runtime, x[matrix:])
		if err := errors.Join(wrong, failed); err != nil {
			return result, err
		}
		defer w.Free()
		defer bias.Free()
		params = append(params, w, bias)
	}
	gradients = params[:2]
	params = params[2:]
	meter := metered.New(r.Comm)
	sync, err := ddp.New(ctx, r.Runtime, meter, gradients, cfg)
	if err != nil {
		return result, err
	}
	defer sync.Close()
	order := distributed.SamplerConfig{Seed: 1, Uneven: cfg.Uneven}
	sampler, err := distributed.NewSampler(r.Comm, training.Len(), order)
	if err != nil {
		return result, err
	}
	const batch = 16
	began := time.Now()
	step := 0
	update := func() error {
		defer func() { step++ }()
		return optimizer.Update(ctx, step, sync, params, gradients)
	}
	for epoch := range 10 {
		for _, images := range sampler.Batches(epoch, batch) {
			clear(gradient)
			for _, i := range images {
				digits.Descend(gradient, weights, training.Image(i), training.Labels[i], 1./batch)
			}
			if err := sync.ReduceAll(ctx, gradients); err != nil {
				return result, err
			}
			if err := update(); err != nil {
				return result, err
			}
		}
		if cfg.Uneven { // other ranks may have another batch
			if err := sync.Join(ctx, gradients, update); err != nil {
				return result, err
			}
		}
		result.Curve = append(result.Curve, Point{
			Step:      step,
			Seconds:   time.Since(began).Seconds(),
			SentBytes: meter.Totals().SentBytes,
			Accuracy:  100 * digits.Accuracy(weights, test),
		})
	}
	result.Accuracy = digits.Accuracy(weights, test)
	result.Sent = meter.Totals().SentBytes
	result.Checksum, err = checksum(weights)
	return result, err
}

// checksum hashes the bits, for a comparison of runs.
func checksum(values []float32) (uint32, error) {
	h := fnv.New32a()
	err := binary.Write(h, binary.LittleEndian, values)
	return h.Sum32(), err
}
