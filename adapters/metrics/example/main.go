// Command example trains with members that come and go, shows the metrics of one of them at /metrics, and draws them.
//
//	go run ./example -listen localhost:9100 -picture dashboard.png
//
// It does not use tutti.Run, because members of an elastic job form their communicators themselves.
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
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	if *length <= 0 {
		log.Fatalf("-time is %v, want more than 0", *length)
	}
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

// run adds a second member after a quarter of the time and a third one after half. The third one is lost after three
// quarters.
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
	begun := make(chan struct{})
	failed := make(chan error, 3)
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
	features = 4096 // of the pixels, random (Rahimi, Recht, "Random Features for Large-Scale Kernel Machines", 2007)
	batch    = 96   // of all members together
)

// expand computes the features of all images of a set.
func expand(set digits.Set) [][]float32 {
	all := make([][]float32, set.Len())
	random := rand.New(rand.NewPCG(1, 1))
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

// classifier is a softmax regression on the features of images. The weights of each class are one parameter.
type classifier struct {
	inputs     [][]float32       // the features, by image
	labels     []uint8           // by image
	weights    [][]float32       // by class
	gradients  [][]float32       // by class
	parameters []*runtime.Tensor // the weights, as tensors
	slopes     []*runtime.Tensor // the gradients, as tensors
}

func newClassifier(rt runtime.Runtime, set digits.Set) (*classifier, error) {
	c := &classifier{inputs: expand(set), labels: set.Labels}
	for range digits.Classes {
		weights := make([]float32, features)
		parameter, err := cpu.Wrap(rt, weights)
		if err != nil {
			return nil, err
		}
		gradient := make([]float32, features)
		slope, err := cpu.Wrap(rt, gradient)
		if err != nil {
			return nil, err
		}
		c.weights = append(c.weights, weights)
		c.gradients = append(c.gradients, gradient)
		c.parameters = append(c.parameters, parameter)
		c.slopes = append(c.slopes, slope)
	}
	return c, nil
}

// backward computes the gradients of a rank's part of the batch, and calls ready for each class as soon as its
// gradient is complete.
func (c *classifier) backward(step, rank, size int, ready func(class int) error) error {
	var images [][]float32
	var scores [][]float64
	var labels []uint8
	for i := rank * batch / size; i < (rank+1)*batch/size; i++ {
		row := (step*batch + i) % len(c.inputs)
		images = append(images, c.inputs[row])
		labels = append(labels, c.labels[row])
		scores = append(scores, probabilities(c.weights, c.inputs[row]))
	}
	for class := digits.Classes - 1; class >= 0; class-- {
		gradient := c.gradients[class]
		clear(gradient)
		for i, image := range images {
			slope := scores[i][class]
			if int(labels[i]) == class {
				slope--
			}
			scale := float32(slope * 10 * float64(size) / batch)
			for j, x := range image {
				gradient[j] += scale * x
			}
		}
		if err := ready(class); err != nil {
			return err
		}
	}
	return nil
}

// update descends along the gradients, averaged over the members.
func (c *classifier) update() {
	for class := range c.weights {
		for j, g := range c.gradients[class] {
			c.weights[class][j] -= g
		}
	}
}

// train runs one member. The gradient of a class is reduced while the next one is computed.
func train(ctx context.Context, cfg elastic.Config, counts *metrics.Metrics, begun chan<- struct{}) error {
	set, _, err := digits.Split(1)
	if err != nil {
		return err
	}
	rt := cpu.New()
	model, err := newClassifier(rt, set)
	if err != nil {
		return err
	}
	sync, err := ddp.New(ctx, rt, noop.New(rt), model.parameters, ddp.Config{
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
			Rank:      p.Rank,
			WorldSize: p.Size,
			World:     p.World,
			TLS:       tls,
			Listen:    "localhost",
			Silence:   elastic.DefaultSilence,
		})
	}
	cfg.Runtime = rt
	cfg.Tensors = model.parameters
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
		err := model.backward(step, e.Comm.Rank(), len(e.Members), func(class int) error {
			return sync.Ready(ctx, class, model.slopes[class])
		})
		if err != nil {
			return err
		}
		if err := sync.Wait(ctx); err != nil { // it calls m.Commit
			return err
		}
		model.update()
		if ctx.Err() != nil {
			return io.EOF
		}
		return nil
	})
}

// probabilities returns the probabilities of the classes.
func probabilities(weights [][]float32, image []float32) []float64 {
	all := make([]float64, len(weights))
	sum := 0.0
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
