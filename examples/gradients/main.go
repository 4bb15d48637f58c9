// Command gradients trains a softmax regression on digits, data parallel. Its ranks are goroutines, processes of
// several machines, or members that come and go, and the weights are the same to the last bit: docs/tutorial.md
// explains it.
//
//	go run ./examples/gradients                                      # four ranks, goroutines
//	go run ./examples/gradients -pattern oktopk                      # the largest entries of gradients only
//	tutti launch --hosts a:2,b:2 ./gradients                         # processes of two machines
//	tutti launch --hosts a:2,b:2 --min 2 --restarts 3 ./gradients    # members: kill any of them, it joins again
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"io"
	"log"
	"math/rand/v2"
	"os"
	"time"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/examples/digits"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

var (
	pattern = flag.String("pattern", sparse.Dense, "how gradients are exchanged")
	steps   = flag.Uint64("steps", 200, "steps of the training")
)

func main() {
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	if *steps < 1 {
		log.Fatalf("-steps is %d, want 1 or more", *steps)
	}
	ctx := context.Background()
	var err error
	if os.Getenv("TUTTI_MIN") != "" { // set by tutti launch --min
		err = member(ctx)
	} else {
		err = tutti.Run(ctx, rank)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// A batch is shared by all ranks, so nothing depends on their number. Each of its microbatches is for one rank.
const (
	batch        = 60
	microbatches = 12
	rate         = 0.5
)

// training is the state of one rank.
type training struct {
	weights    []float32       // of the regression
	gradient   []float32       // of a microbatch
	parameters *runtime.Tensor // of weights
	tensor     *runtime.Tensor // of gradient
	sync       *ddp.Gradients  // averages gradients
	set, test  digits.Set      // training images and test images
	order      []int           // of images
}

// newTraining begins a training on the ranks of a communicator.
func newTraining(ctx context.Context, rt runtime.Runtime, c comm.Communicator) (t *training, err error) {
	size := digits.Pixels * digits.Classes
	t = &training{weights: make([]float32, size), gradient: make([]float32, size)}
	if t.set, t.test, err = digits.Split(1); err != nil {
		return nil, err
	}
	t.order = rand.New(rand.NewPCG(1, 0)).Perm(t.set.Len())
	// Wrap a matrix with its shape: vectors are always reduced densely.
	if t.parameters, err = cpu.Wrap(rt, t.weights, digits.Pixels, digits.Classes); err != nil {
		return nil, err
	}
	if t.tensor, err = cpu.Wrap(rt, t.gradient, digits.Pixels, digits.Classes); err != nil {
		return nil, err
	}
	cfg := ddp.Config{Config: sparse.Config{Pattern: *pattern, Density: 0.1}, Weighted: true}
	if *pattern == sparse.Dense {
		cfg.Reproducible = microbatches // the same bits for any number of ranks
	}
	t.sync, err = ddp.New(ctx, rt, c, []*runtime.Tensor{t.parameters}, cfg)
	return t, err
}

// images returns the images of a microbatch. They depend only on the step, so a member that joins needs no other
// state.
func (t *training) images(step uint64, microbatch int) (list []int) {
	for i := range batch / microbatches {
		next := step*batch + uint64(microbatch*batch/microbatches+i)
		list = append(list, t.order[next%uint64(len(t.order))])
	}
	return list
}

// step computes this rank's share of a batch, averages the gradient over all ranks, and updates the weights.
func (t *training) step(ctx context.Context, c comm.Communicator, step uint64) error {
	first := c.Rank() * microbatches / c.WorldSize()
	end := (c.Rank() + 1) * microbatches / c.WorldSize()
	last := []*runtime.Tensor{nil} // for a rank without a microbatch
	for k := first; k < end; k++ {
		if k > first {
			if err := t.sync.Accumulate(0, t.tensor); err != nil {
				return err
			}
		}
		images := t.images(step, k)
		if err := t.sync.Weigh(float64(len(images))); err != nil {
			return err
		}
		clear(t.gradient)
		for _, i := range images {
			digits.Descend(t.gradient, t.weights, t.set.Image(i), t.set.Labels[i], 1/float64(len(images)))
		}
		last[0] = t.tensor
	}
	if err := t.sync.ReduceAll(ctx, last); err != nil {
		return err
	}
	mean, err := cpu.Slice[float32](t.sync.Result(0))
	if err != nil {
		return err
	}
	for i, g := range mean { // the average over all images of the batch
		t.weights[i] -= rate * g
	}
	return nil
}

// report prints the result of the training.
func (t *training) report(name string) {
	hash := crc32.ChecksumIEEE(fmt.Append(nil, t.weights))
	fmt.Printf("%s: test accuracy %.1f %%, weights %08x\n", name, 100*digits.Accuracy(t.weights, t.test), hash)
}

// close frees the training's memory.
func (t *training) close() {
	t.sync.Close()
	t.tensor.Free()
	t.parameters.Free()
}

// rank trains as one of a fixed number of ranks.
func rank(ctx context.Context, r tutti.Rank) error {
	r.Comm = comm.Limit(r.Comm, time.Minute, nil) // a wait ends after one minute
	t, err := newTraining(ctx, r.Runtime, r.Comm)
	if err != nil {
		return err
	}
	defer t.close()
	for step := range *steps {
		if err := t.step(ctx, r.Comm, step); err != nil {
			return err
		}
	}
	t.report(fmt.Sprint("rank ", r.Comm.Rank()))
	return nil
}

// member trains as a member of a job whose members come and go.
func member(ctx context.Context) error {
	cfg, err := elastic.FromEnv(elastic.Config{Terms: "digits 1"})
	if err != nil {
		return err
	}
	t, m, err := join(ctx, cfg, "")
	if err != nil {
		return err
	}
	defer t.close()
	defer m.Close()
	err = m.Run(ctx, func(ctx context.Context, e *elastic.Epoch) error {
		if err := t.step(ctx, e.Comm, m.Steps()); err != nil {
			return err // the step has not happened and is repeated
		}
		if m.Steps() >= *steps {
			return io.EOF // that was the last step
		}
		return nil
	})
	if errors.Is(err, elastic.ErrEnded) {
		log.Print(err) // the others have the job's weights, and this member must not report
		return nil
	}
	if err != nil {
		return err
	}
	t.report(cfg.Name)
	return nil
}

// join makes the training a member. ddp moves to the communicator of each epoch, and another member sends the
// weights.
func join(ctx context.Context, cfg elastic.Config, listen string) (*training, *elastic.Member, error) {
	rt := cpu.New()
	t, err := newTraining(ctx, rt, noop.New(rt))
	if err != nil {
		return nil, nil, err
	}
	config := cfg.TLS
	cfg.Form = func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
		return tcp.New(ctx, kv, tcp.Config{
			Rank:      p.Rank,
			WorldSize: p.Size,
			World:     p.World,
			TLS:       config,
			Listen:    listen,
			Silence:   elastic.DefaultSilence,
		})
	}
	cfg.Runtime = rt
	cfg.Tensors = []*runtime.Tensor{t.parameters}
	m, err := elastic.Join(ctx, cfg, t.sync)
	return t, m, err
}
