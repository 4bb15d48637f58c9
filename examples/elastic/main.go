// Command elastic trains a softmax regression on digits with members that come and go. After each step, the weights
// are the same to the last bit as those of an undisturbed job, whatever members there were.
//
//	tutti launch -n 4 --min 2 --max 8 --restarts 10 ./elastic   # kill any of them: it joins again
//	go run ./examples/elastic                                   # goroutines, of which one is killed, and others join
package main

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/examples/digits"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

var (
	steps = flag.Uint64("steps", 400, "steps of the training")
	pause = flag.Duration("pause", 0, "what each step takes longer")
)

func main() {
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	cfg, err := elastic.FromEnv(elastic.Config{Terms: "digits 1"})
	if os.Getenv("TUTTI_MIN") == "" {
		err = demonstrate(context.Background())
	} else if err == nil {
		err = train(context.Background(), cfg, "", nil)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// demonstrate has three members, of which the first is killed when all are there, and then one that is alone: after
// each step, all of them have the same weights.
func demonstrate(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var killed atomic.Bool
	var hashes hashes
	err := run(ctx, 3, func(i int, m *elastic.Member, e *elastic.Epoch, weights []float32) bool {
		hashes.add(m.Steps(), weights)
		if i == 0 && len(e.Members) == 3 { // and the others know it: they have made a step with it
			killed.Store(true)
			_ = m.Close()
		}
		return killed.Load() // before that they do not end
	})
	if err != nil {
		return err
	}
	err = run(ctx, 1, func(_ int, m *elastic.Member, _ *elastic.Epoch, weights []float32) bool {
		hashes.add(m.Steps(), weights)
		return true
	})
	if err != nil {
		return err
	}
	if hashes.differ > 0 {
		return fmt.Errorf("%d times, members had other weights than others had after the same step", hashes.differ)
	}
	fmt.Printf("one hash after each of %d steps, the last one %x\n", *steps, hashes.steps[*steps])
	return nil
}

// run runs members, and returns the errors of all but the first of several. The store is this process's.
func run(
	ctx context.Context,
	count int,
	done func(i int, m *elastic.Member, e *elastic.Epoch, weights []float32) bool,
) error {
	conf, err := store.TLS([]byte(fmt.Sprint(rand.Uint64())), "example")
	if err != nil {
		return err
	}
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // the members have ended
	var members sync.WaitGroup
	errs := make([]error, count)
	for i := range errs {
		members.Go(func() {
			cfg := elastic.Config{
				Name:  fmt.Sprint("member ", i),
				Min:   1,
				Max:   8,
				Terms: "digits 1",
				TLS:   conf,
			}
			cfg.Dial = func(context.Context) (store.Store, error) { return server.Local(cfg.Name), nil }
			errs[i] = train(ctx, cfg, "localhost", func(m *elastic.Member, e *elastic.Epoch, weights []float32) bool {
				return done(i, m, e, weights)
			})
		})
	}
	members.Wait()
	if count > 1 {
		errs[0] = nil // it was killed
	}
	return errors.Join(errs...)
}

// hashes are those of the weights that members have.
type hashes struct {
	mu     sync.Mutex
	steps  map[uint64][sha256.Size]byte // by step; guarded by mu
	differ int                          // how many were others than those before; guarded by mu
}

// add compares the weights after a step with those of other members.
func (h *hashes) add(step uint64, weights []float32) {
	sum := sha256.Sum256(fmt.Append(nil, weights))
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.steps == nil {
		h.steps = make(map[uint64][sha256.Size]byte)
	}
	before, known := h.steps[step]
	if known && before != sum {
		h.differ++
	}
	h.steps[step] = sum
}

// finished reports whether the training may end after a step, which has left weights.
type finished func(m *elastic.Member, e *elastic.Epoch, weights []float32) bool

// Of all members together, so that nothing depends on how many there are. Each microbatch is computed by one of them.
const batch, microbatches, rate = 48, 12, 0.5

// train is one member. It calls done after each step, unless that is nil.
func train(ctx context.Context, cfg elastic.Config, listen string, done finished) error {
	training, test, err := digits.Split(1)
	if err != nil {
		return err
	}
	order := rand.New(rand.NewPCG(1, 0)).Perm(training.Len())
	rt := cpu.New()
	weights, parameters, err := wrapped(rt)
	if err != nil {
		return err
	}
	update, gradient, err := wrapped(rt)
	if err != nil {
		return err
	}
	reduce := ddp.Config{Reproducible: microbatches}
	reducer, err := ddp.New(ctx, rt, noop.New(rt), []*runtime.Tensor{gradient}, reduce)
	if err != nil {
		return err
	}
	defer reducer.Close()
	config := cfg.TLS
	cfg.Form = func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
		return connect(ctx, kv, p, config, listen)
	}
	cfg.Runtime = rt
	cfg.Tensors = []*runtime.Tensor{parameters}
	m, err := elastic.Join(ctx, cfg, reducer)
	if err != nil {
		return err
	}
	defer m.Close()
	var epoch uint64
	err = m.Run(ctx, func(ctx context.Context, e *elastic.Epoch) error {
		if e.Number != epoch {
			epoch = e.Number
			fmt.Printf("%s: epoch %d, %v\n", cfg.Name, e.Number, e.Members)
		}
		time.Sleep(*pause)
		last, err := accumulate(reducer, gradient, e, func(microbatch int) {
			clear(update)
			for _, i := range images(order, int(m.Steps()), microbatch) {
				digits.Descend(update, weights, training.Image(i), training.Labels[i], rate*microbatches/batch)
			}
		})
		if err != nil {
			return err
		}
		if err := reducer.ReduceAll(ctx, last); err != nil { // which calls m.Commit
			return err // nothing has happened: the step is made again
		}
		mean, err := cpu.Slice[float32](reducer.Result(0))
		if err != nil {
			return err
		}
		for i, u := range mean {
			weights[i] -= u
		}
		if (done == nil || done(m, e, weights)) && m.Steps() >= *steps {
			return io.EOF // that was the last step
		}
		return nil
	})
	if err != nil {
		return err
	}
	fmt.Printf("%s: test accuracy %.1f %% after %d steps\n",
		cfg.Name, 100*digits.Accuracy(weights, test), m.Steps())
	return nil
}

// wrapped returns numbers like the weights, and a tensor of them.
func wrapped(rt *cpu.Runtime) ([]float32, *runtime.Tensor, error) {
	values := make([]float32, digits.Pixels*digits.Classes)
	t, err := cpu.Wrap(rt, values)
	return values, t, err
}

// images returns those of a microbatch: a function of the step, so that members need no sampler's state.
func images(order []int, step, microbatch int) (list []int) {
	for i := microbatch * batch / microbatches; i < (microbatch+1)*batch/microbatches; i++ {
		list = append(list, order[(step*batch+i)%len(order)])
	}
	return list
}

// accumulate has compute make the gradient of each microbatch of this member, and keeps all but the last, which it
// returns: nil if there are more members than microbatches.
func accumulate(
	reducer *ddp.Gradients,
	gradient *runtime.Tensor,
	e *elastic.Epoch,
	compute func(microbatch int),
) (last []*runtime.Tensor, err error) {
	size := len(e.Members)
	first := e.Comm.Rank() * microbatches / size
	end := (e.Comm.Rank() + 1) * microbatches / size
	for k := first; k < end; k++ {
		compute(k)
		if k == end-1 {
			return []*runtime.Tensor{gradient}, nil
		}
		if err := reducer.Accumulate(0, gradient); err != nil {
			return nil, err
		}
	}
	return []*runtime.Tensor{nil}, nil
}

// connect makes the communicator of an epoch.
func connect(
	ctx context.Context,
	kv store.Store,
	p elastic.Place,
	config *tls.Config,
	listen string,
) (comm.Communicator, error) {
	return tcp.New(ctx, kv, tcp.Config{
		Rank:      p.Rank,
		WorldSize: p.Size,
		World:     p.World,
		TLS:       config,
		Listen:    listen,
		Silence:   elastic.DefaultSilence,
	})
}
