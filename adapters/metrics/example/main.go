// Command example trains with members that come and go, shows the metrics of one of them at /metrics, and draws them.
//
//	go run ./example -listen localhost:9100 -picture dashboard.png
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/tutti-go/tutti/adapters/metrics"
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
	listen  = flag.String("listen", "localhost:9100", "address of /metrics")
	picture = flag.String("picture", "", "file of a picture of the metrics, to end with")
	length  = flag.Duration("time", 12*time.Second, "how long to train")
)

func main() {
	flag.Parse()
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

// run has a second member join after a quarter of the time, and a third one after a half, which is lost after three quarters.
func run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, *length)
	defer cancel()
	listener, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.Handler())
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Second}
	defer server.Close()
	go func() { _ = server.Serve(listener) }()
	log.Printf("metrics are at http://%v/metrics", listener.Addr())

	conf, err := store.TLS([]byte(fmt.Sprint(rand.Uint64())), "example")
	if err != nil {
		return err
	}
	first, err := metrics.New(prometheus.DefaultRegisterer, prometheus.Labels{"member": "a"})
	if err != nil {
		return err
	}
	kv := store.NewServer(store.Options{})
	defer kv.Close() //nolint:errcheck // the members have ended
	begun, failed := make(chan struct{}), make(chan error, 3)
	member := func(name string, m *metrics.Metrics, end time.Duration) {
		ctx, cancel := context.WithTimeout(ctx, end)
		defer cancel()
		cfg := elastic.Config{Name: name, Min: 1, Terms: "example", TLS: conf}
		cfg.Dial = func(context.Context) (store.Store, error) { return kv.Local(name), nil }
		err := train(ctx, cfg, m, begun)
		if ctx.Err() != nil {
			err = nil // its time is over
		}
		failed <- err
	}
	go member("a", first, *length)
	go func() {
		<-begun
		time.Sleep(*length / 4)
		go member("b", nil, *length)
		time.Sleep(*length / 4)
		go member("c", nil, *length/4)
	}()
	if *picture != "" {
		go func() { failed <- drawMetrics(ctx, "http://"+listener.Addr().String()+"/metrics", *picture) }()
		err = <-failed
	}
	for range 3 {
		err = errors.Join(err, <-failed)
	}
	return err
}

const (
	features = 4096 // random ones of the pixels (Rahimi, Recht, "Random Features for Large-Scale Kernel Machines", 2007)
	batch    = 96   // of all members together
)

// expand computes the features of all images of a set.
func expand(set digits.Set) [][]float32 {
	all, random := make([][]float32, set.Len()), rand.New(rand.NewPCG(1, 1))
	for i := range all {
		all[i] = make([]float32, features)
	}
	var direction [digits.Pixels]float32
	for feature := range features {
		for pixel := range direction {
			direction[pixel] = float32(0.5 * random.NormFloat64())
		}
		phase := 2 * math.Pi * random.Float64()
		for i := range all {
			var dot float32
			for pixel, x := range set.Image(i) {
				dot += direction[pixel] * x
			}
			all[i][feature] = float32(math.Cos(phase+float64(dot)) * math.Sqrt(2.0/features))
		}
	}
	return all
}

// train is one member. The weights of a class are a parameter, whose gradient is reduced while that of the next one is computed.
func train(ctx context.Context, cfg elastic.Config, counts *metrics.Metrics, begun chan<- struct{}) error {
	set, _, err := digits.Split(1)
	if err != nil {
		return err
	}
	inputs := expand(set)
	rt := cpu.New()
	weights, gradients := make([][]float32, digits.Classes), make([][]float32, digits.Classes)
	var parameters, slopes []*runtime.Tensor
	for class := range weights {
		weights[class], gradients[class] = make([]float32, features), make([]float32, features)
		w, err := cpu.Wrap(rt, weights[class])
		g, failed := cpu.Wrap(rt, gradients[class])
		if err := errors.Join(err, failed); err != nil {
			return err
		}
		parameters, slopes = append(parameters, w), append(slopes, g)
	}
	sync, err := ddp.New(ctx, rt, noop.New(rt), parameters, ddp.Config{
		Config:      sparse.Config{Pattern: sparse.TopkA, Density: 0.05, Values: sparse.I8},
		BucketBytes: 4 * features,
		DenseUpTo:   -1,
	})
	if err != nil {
		return err
	}
	defer sync.Close()
	if counts != nil {
		sync.OnStep(counts.Step)
	}
	tls := cfg.TLS
	cfg.Form = func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
		return tcp.New(ctx, kv, tcp.Config{
			Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: tls, Listen: "localhost", Silence: elastic.DefaultSilence,
		})
	}
	cfg.Runtime = rt
	cfg.Tensors = parameters
	m, err := elastic.Join(ctx, cfg, sync)
	if err != nil {
		return err
	}
	defer m.Close()
	var epoch uint64
	return m.Run(ctx, func(ctx context.Context, e *elastic.Epoch) error {
		if e.Number != epoch {
			epoch = e.Number
			log.Printf("%s: epoch %d, members %v", cfg.Name, e.Number, e.Members)
			if counts != nil {
				counts.Epoch(e)
			}
		}
		step := int(m.Steps())
		if step == 10 && cfg.Name == "a" {
			close(begun)
		}
		size, rank := len(e.Members), e.Comm.Rank()
		var images [][]float32
		var scores [][]float64
		var labels []uint8
		for i := rank * batch / size; i < (rank+1)*batch/size; i++ {
			row := (step*batch + i) % len(inputs)
			images, labels = append(images, inputs[row]), append(labels, set.Labels[row])
			scores = append(scores, probabilities(weights, inputs[row]))
		}
		for class := digits.Classes - 1; class >= 0; class-- { // the backward pass
			clear(gradients[class])
			for i, image := range images {
				slope := scores[i][class]
				if int(labels[i]) == class {
					slope--
				}
				scale := float32(slope * 10 * float64(size) / batch)
				for j, x := range image {
					gradients[class][j] += scale * x
				}
			}
			if err := sync.Ready(ctx, class, slopes[class]); err != nil {
				return err
			}
		}
		if err := sync.Wait(ctx); err != nil { // which calls m.Commit
			return err
		}
		for class := range weights {
			for j, g := range gradients[class] {
				weights[class][j] -= g
			}
		}
		if ctx.Err() != nil {
			return io.EOF
		}
		return nil
	})
}

// probabilities are those of the classes.
func probabilities(weights [][]float32, image []float32) []float64 {
	all, sum := make([]float64, len(weights)), 0.0
	for class, row := range weights {
		for j, x := range image {
			all[class] += float64(row[j]) * float64(x)
		}
		all[class] = math.Exp(all[class])
		sum += all[class]
	}
	for class := range all {
		all[class] /= sum
	}
	return all
}
