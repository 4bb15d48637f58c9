// Command data-parallel trains a small network to recognize digits on several ranks. It is the smallest program with
// everything that such a training needs. Each rank computes the gradient of its share of a batch, an allreduce
// averages the gradients, and all ranks make the same update.
//
//	go run ./examples/data-parallel                     # four ranks, goroutines of one process
//	go run ./examples/data-parallel -density 0.1        # a tenth of the update is sent
//	go run ./examples/data-parallel -checkpoint run.gob # goes on from there, if it exists
//	mpirun -n 4 data-parallel                           # a process per rank, the same bits
//	tutti launch -n 4 ./data-parallel                   # the same without MPI
package main

import (
	"context"
	"flag"
	"fmt"
	"hash/crc32"
	"log"
	"time"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/examples/digits"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// settings are the same on all ranks.
type settings struct {
	epochs       int     // number of passes over the images
	batch        int     // images of a rank in a step
	learningRate float32 // before the exchange
	momentum     float64 // within the exchange
	pattern      string  // pattern of the exchange
	density      float64 // fraction of the entries that is sent
	clip         float64 // largest norm of an update; 0 means no limit
	checkpoint   string  // file; "" for none
}

func main() {
	s := settings{
		batch:        16,
		learningRate: 0.1,
		momentum:     0.9,
		pattern:      sparse.Dense,
	}
	var world tutti.Config
	flag.StringVar(&world.Backend, "backend", "", "local, tcp, mpi or nccl instead of what the launcher's variables say")
	flag.IntVar(&world.Ranks, "ranks", 0, "goroutines, where no launcher has started processes")
	flag.IntVar(&s.epochs, "epochs", 10, "how often to see all images")
	flag.Float64Var(&s.density, "density", 1, "share of the entries that is sent; below 1 by Ok-Topk")
	flag.Float64Var(&s.clip, "clip", 0, "largest norm of an update, in the root mean square of the ranks; 0 is none")
	flag.StringVar(&s.checkpoint, "checkpoint", "", "`file` to go on from, and to write after each epoch")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	if s.epochs < 1 {
		log.Fatalf("-epochs is %d, want 1 or more", s.epochs)
	}
	if !(s.density > 0 && s.density <= 1) { // NaN as well
		log.Fatalf("-density is %v, want a share above 0 and at most 1", s.density)
	}
	if !(s.clip >= 0) {
		log.Fatalf("-clip is %v, want 0 or more", s.clip)
	}
	if s.density < 1 {
		s.pattern = sparse.Oktopk
	}
	err := world.Run(context.Background(), func(ctx context.Context, r tutti.Rank) error {
		r.Comm = comm.Limit(r.Comm, 10*time.Minute, nil) // a wait ends after ten minutes
		result, err := train(ctx, r, s)
		if err == nil && r.Comm.Rank() == 0 {
			fmt.Println(result)
		}
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}

// result is the outcome of a training.
type result struct {
	ranks      int     // of the world
	epochs     int     // trained epochs
	accuracy   float64 // on test images
	sent       float64 // bytes, averaged over ranks
	parameters uint32  // checksum
}

func (r result) String() string {
	return fmt.Sprintf(
		"world size %d, %d epochs: test accuracy %.1f %%; "+
			"a rank sent %.0f KiB; checksum of the parameters %08x",
		r.ranks,
		r.epochs,
		100*r.accuracy,
		r.sent/1024,
		r.parameters,
	)
}

// train trains as one rank.
func train(ctx context.Context, r tutti.Rank, s settings) (result, error) {
	c := r.Comm
	rt := r.Runtime
	training, test, err := digits.Split(1)
	if err != nil {
		return result{}, err
	}
	model := newModel(uint64(c.Rank())) // models differ between ranks without a common seed
	update := make([]float32, len(model.parameters))
	meter := metered.New(c)

	// The slices themselves are the tensors: nothing is copied.
	var tensors []*runtime.Tensor
	for _, values := range [][]float32{model.parameters, update} {
		t, err := cpu.Wrap(rt, values)
		if err != nil {
			return result{}, err
		}
		defer t.Free()
		tensors = append(tensors, t)
	}
	cfg := sparse.Config{
		Pattern:    s.pattern,
		Density:    s.density,
		Momentum:   s.momentum,
		ClipNorm:   s.clip,
		ClipGlobal: true, // by the same factor on all ranks
	}
	exchange, err := sparse.New(rt, meter, len(update), cfg)
	if err != nil {
		return result{}, err
	}
	defer exchange.Close()
	sampler, err := distributed.NewSampler(c, training.Len(), distributed.SamplerConfig{Seed: 1})
	if err != nil {
		return result{}, err
	}

	// All ranks start from rank 0's checkpoint or, without one, from its parameters.
	first, err := resume(ctx, rt, c, s, model.parameters, exchange)
	if err != nil {
		return result{}, err
	}
	if err := distributed.BroadcastAll(ctx, c, tensors[:1], 0); err != nil {
		return result{}, err
	}

	for epoch := first; epoch < s.epochs; epoch++ {
		for _, images := range sampler.Batches(epoch, s.batch) {
			// Learning rate and momentum come before the exchange, so that entries that are sent later keep the size
			// that they had when they arose.
			for i, g := range model.gradient(training, images) {
				update[i] = s.learningRate * g
			}
			if err := exchange.AllReduce(ctx, tensors[1]); err != nil {
				return result{}, err
			}
			for i, u := range update {
				model.parameters[i] -= u
			}
		}
		if err := save(ctx, rt, c, s, epoch+1, model.parameters, exchange); err != nil {
			return result{}, err
		}
	}

	total, err := summarize(ctx, r, model, test, meter.Totals().SentBytes)
	total.epochs = s.epochs
	return total, err
}

// summarize returns the combined result of the ranks: the accuracy of the model, and the average number of bytes sent.
func summarize(ctx context.Context, r tutti.Rank, m *model, test digits.Set, sentBytes int64) (result, error) {
	accuracy, err := testShares(ctx, r, m, test)
	if err != nil {
		return result{}, err
	}
	sent, err := distributed.AverageMetrics(ctx, r.Runtime, r.Comm, 1, float64(sentBytes))
	if err != nil {
		return result{}, err
	}
	return result{
		ranks:      r.Comm.WorldSize(),
		accuracy:   accuracy,
		sent:       sent[0],
		parameters: checksum(m.parameters),
	}, nil
}

// testShares returns the accuracy of a model. Each rank tests its share, and the shares weight the average over
// ranks.
func testShares(ctx context.Context, r tutti.Rank, m *model, test digits.Set) (float64, error) {
	share, err := distributed.NewSampler(
		r.Comm,
		test.Len(),
		distributed.SamplerConfig{InOrder: true, Uneven: true},
	)
	if err != nil {
		return 0, err
	}
	accuracy, err := distributed.AverageMetrics(
		ctx,
		r.Runtime,
		r.Comm,
		float64(share.Len()),
		m.accuracy(test, share.Epoch(0)),
	)
	if err != nil {
		return 0, err
	}
	return accuracy[0], nil
}

// checksum hashes the bits, for a comparison of runs.
func checksum(values []float32) uint32 {
	sum := crc32.NewIEEE()
	for _, v := range values {
		fmt.Fprintf(sum, "%x ", v)
	}
	return sum.Sum32()
}
