// Command elastic trains a softmax regression on digits with members that come and go.
//
//	tutti launch -n 4 --min 2 --max 8 --restarts 10 ./elastic   # kill any of them: it joins again
//	go run ./examples/elastic                                   # goroutines, of which one is killed, and others join
package main

import (
	"context"
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
	"github.com/tutti-go/tutti/distributed/sparse"
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

// demonstrate has three members, of which the first is killed when all are there. The store is this process's.
func demonstrate(ctx context.Context) error {
	conf, err := store.TLS([]byte(fmt.Sprint(rand.Uint64())), "example")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var members sync.WaitGroup
	var killed atomic.Bool
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // the members have ended
	errs := make([]error, 3)
	for i := range errs {
		members.Go(func() {
			cfg := elastic.Config{Name: fmt.Sprint("member ", i), Min: 1, Max: 8, Terms: "digits 1", TLS: conf}
			cfg.Dial = func(context.Context) (store.Store, error) { return server.Local(cfg.Name), nil }
			errs[i] = train(ctx, cfg, "localhost", func(m *elastic.Member, e *elastic.Epoch) bool {
				if i == 0 && len(e.Members) == 3 { // and the others know it: they have made a step with it
					killed.Store(true)
					_ = m.Close()
				}
				return killed.Load() // before that they do not end
			})
		})
	}
	members.Wait()
	return errors.Join(errs[1:]...)
}

// finished reports whether the training may end after a step.
type finished func(m *elastic.Member, e *elastic.Epoch) bool

// train is one member. It calls done after each step, unless that is nil.
func train(ctx context.Context, cfg elastic.Config, listen string, done finished) error {
	const batch, rate = 48, 0.5 // of all members together, so that neither depends on how many there are
	training, test, err := digits.Split(1)
	if err != nil {
		return err
	}
	rt := cpu.New()
	order := rand.New(rand.NewPCG(1, 0)).Perm(training.Len())
	weights := make([]float32, digits.Pixels*digits.Classes)
	update := make([]float32, len(weights))
	parameters, err := cpu.Wrap(rt, weights)
	if err != nil {
		return err
	}
	gradient, err := cpu.Wrap(rt, update)
	if err != nil {
		return err
	}
	gradients := []*runtime.Tensor{gradient}
	reduce := ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}, DenseUpTo: -1}
	reducer, err := ddp.New(ctx, rt, noop.New(rt), gradients, reduce)
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
		clear(update)
		step := int(m.Steps())
		size := len(e.Members)
		rank := e.Comm.Rank()
		for i := rank * batch / size; i < (rank+1)*batch/size; i++ {
			image := order[(step*batch+i)%len(order)] // a function of the step, so that members need no sampler's state
			digits.Descend(update, weights, training.Image(image), training.Labels[image], rate*float64(size)/batch)
		}
		if err := reducer.ReduceAll(ctx, gradients); err != nil { // which calls m.Commit
			return err // nothing has happened: the step is made again
		}
		for i, u := range update {
			weights[i] -= u
		}
		if (done == nil || done(m, e)) && m.Steps() >= *steps {
			return io.EOF // that was the last step
		}
		return nil
	})
	if err != nil {
		return err
	}
	read := 100 * digits.Accuracy(weights, test)
	fmt.Printf("%s: %.1f %% of the test images read after %d steps\n", cfg.Name, read, m.Steps())
	return nil
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
