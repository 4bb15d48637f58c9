// Command data-parallel trains a small network to read digits, on several ranks:
// the smallest program with everything that such a training needs. Each rank
// computes the gradient of its share of a batch, an allreduce averages what the
// ranks computed, and all make the same update.
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
	epochs       int     // how often to see all images
	batch        int     // images of a rank in a step
	learningRate float32 // before the exchange
	momentum     float64 // within the exchange
	pattern      string  // what is sent
	density      float64 // share of the entries that is sent
	clip         float64 // largest norm of an update; 0 is none
	checkpoint   string  // file, none if empty
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
		r.Comm = comm.Limit(r.Comm, 10*time.Minute, nil) // no wait takes longer
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

// result is what a training came to.
type result struct {
	ranks      int     // of the world
	epochs     int     // that were trained
	accuracy   float64 // on images that it was not trained on
	sent       float64 // bytes, the average of the ranks
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

// train is one rank.
func train(ctx context.Context, r tutti.Rank, s settings) (result, error) {
	c := r.Comm
	rt := r.Runtime
	training, test, err := digits.Split(1)
	if err != nil {
		return result{}, err
	}
	model := newModel(uint64(c.Rank())) // as a rank that reads no seed would: they differ
	update := make([]float32, len(model.parameters))
	meter := metered.New(c)

	// Tensors are the slices themselves: nothing is copied.
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
		ClipGlobal: true, // by one factor for all ranks
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

	// All ranks start from the checkpoint that rank 0 has, or from its parameters.
	first, err := resume(ctx, rt, c, s, model.parameters, exchange)
	if err != nil {
		return result{}, err
	}
	if err := distributed.BroadcastAll(ctx, c, tensors[:1], 0); err != nil {
		return result{}, err
	}

	for epoch := first; epoch < s.epochs; epoch++ {
		for _, images := range sampler.Batches(epoch, s.batch) {
			// Learning rate and momentum come before the exchange, so that entries that
			// are sent later are of the size they had when they arose.
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

// summarize returns what the ranks have reached together: the accuracy of the model, and the average of what they sent.
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

// testShares returns the accuracy of a model. Each rank tests its share, and the average over the ranks
// weighs them.
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

// checksum is of the bits, for comparing runs.
func checksum(values []float32) uint32 {
	sum := crc32.NewIEEE()
	for _, v := range values {
		fmt.Fprintf(sum, "%x ", v)
	}
	return sum.Sum32()
}
