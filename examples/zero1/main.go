// Command zero1 trains with an optimizer whose state is sharded, with one shard on each rank (ZeRO-1, Rajbhandari et
// al., SC 2020). Adam has moments for a part of the parameters only. It updates that part by the averages from a
// reduce-scatter, and an allgather collects the parameters.
//
//	go run ./examples/zero1
//
// The parameters have the same bits as with a whole Adam on each rank: main_test.go compares them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"math"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/examples/digits/softmax"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// moments are the moments of a shard or of a whole gradient.
type moments struct{ first, second []float32 }

// adam updates parameters by their gradient in a step, the first of which is 0 (Kingma and Ba, 2015).
func (m *moments) adam(step int, params, gradient *runtime.Tensor) error {
	const rate, beta1, beta2, epsilon = 0.01, 0.9, 0.999, 1e-8
	x, err := cpu.Slice[float32](params)
	dx, failed := cpu.Slice[float32](gradient)
	if m.first == nil {
		m.first = make([]float32, len(dx))
		m.second = make([]float32, len(dx))
	}
	size := rate * math.Sqrt(1-math.Pow(beta2, float64(step+1))) / (1 - math.Pow(beta1, float64(step+1)))
	for i, d := range dx {
		m.first[i] = float32(beta1*m.first[i]) + float32((1-beta1)*d)
		m.second[i] = float32(beta2*m.second[i]) + float32(float32((1-beta2)*d)*d)
		x[i] -= float32(size * float64(m.first[i]) / (math.Sqrt(float64(m.second[i])) + epsilon))
	}
	return errors.Join(err, failed)
}

// sharded holds moments and parameters of this rank's shard of each bucket.
type sharded struct {
	moments []moments         // by bucket
	params  []*runtime.Tensor // this rank's shards, by bucket
}

// Update implements [softmax.Optimizer].
func (o *sharded) Update(ctx context.Context, step int, g *ddp.Gradients, params, _ []*runtime.Tensor) error {
	shards, err := g.Shards()
	if err != nil {
		return err
	}
	if o.params == nil {
		if err := o.begin(shards, params); err != nil {
			return err
		}
	}
	for i, s := range shards.Buckets {
		if err := o.moments[i].adam(step, o.params[i], s.Tensor); err != nil {
			return err
		}
	}
	return shards.Gather(ctx, params, o.params)
}

// begin copies this rank's shards of the parameters.
func (o *sharded) begin(shards *ddp.Shards, params []*runtime.Tensor) error {
	o.moments = make([]moments, len(shards.Buckets))
	for _, s := range shards.Buckets {
		t, err := runtime.New(s.Tensor.Runtime(), s.Tensor.DType(), s.Tensor.Len())
		if err != nil {
			return err
		}
		o.params = append(o.params, t)
	}
	return shards.Scatter(o.params, params)
}

// Close implements [softmax.Optimizer].
func (o *sharded) Close() (err error) {
	for _, t := range o.params {
		err = errors.Join(err, t.Free())
	}
	return err
}

func main() {
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	err := tutti.Run(context.Background(), func(ctx context.Context, r tutti.Rank) error {
		result, err := softmax.Train(ctx, r, &sharded{}, ddp.Config{Shard: true, Uneven: true})
		if err == nil && r.Comm.Rank() == 0 {
			fmt.Println(result)
		}
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}
