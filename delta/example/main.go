// Command delta trains a network on one rank. After every few steps it sends the changes of its bf16 weights to other
// ranks, which classify digits with them. All ranks have the first version, as if from a file.
//
//	go run ./delta/example                             # 153,610 weights
//	go run ./delta/example -hidden 16384 -rate 1e-6    # 1.2 million
//
// Its ranks are goroutines, or processes of a launcher: tutti launch -n 3 ./delta. The same works through files.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/delta"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/examples/digits"
	"github.com/tutti-go/tutti/runtime"
)

const versions = 5 // the first included

func main() {
	hidden := flag.Int("hidden", 2048, "units of the hidden layer")
	rate := flag.Float64("rate", 1e-5, "Adam's learning rate, after 100 steps of 1e-3")
	steps := flag.Int("steps", 12, "steps from one version to the next")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	if *hidden < 1 {
		log.Fatalf("-hidden is %d, want 1 or more", *hidden)
	}
	if *steps < 1 {
		log.Fatalf("-steps is %d, want 1 or more", *steps)
	}
	if !(*rate > 0 && *rate < 1) { // NaN as well
		log.Fatalf("-rate is %v, want a number above 0 and below 1", *rate)
	}
	err := tutti.Run(context.Background(), func(ctx context.Context, r tutti.Rank) error {
		if r.Comm.Rank() == 0 {
			return train(ctx, r.Runtime, r.Comm, *hidden, *steps, *rate)
		}
		return serve(ctx, r.Runtime, r.Comm, *hidden)
	})
	if err != nil {
		log.Fatal(err)
	}
}

// train publishes versions of a network.
func train(ctx context.Context, rt runtime.Runtime, c comm.Communicator, hidden, steps int, rate float64) error {
	n, err := pretrained(hidden)
	if err != nil {
		return err
	}
	publisher := delta.NewPublisher(rt, c)
	if err := publisher.Commit(ctx, 1, n.tensors()); err != nil {
		return err
	}
	for version := uint64(2); version <= versions; version++ {
		n.train(steps, rate)
		if err := publisher.Publish(ctx, version, n.tensors()); err != nil {
			return err
		}
		s := publisher.Stat()
		fmt.Printf("version %d: %.2f %% of %d weights changed, %d bytes: %.3f a changed weight\n", version,
			100*float64(s.Changed)/float64(s.Weights), s.Weights, s.Bytes, float64(s.Bytes)/float64(s.Changed))
	}
	return nil
}

// serve classifies the test images with each version.
func serve(ctx context.Context, rt runtime.Runtime, c comm.Communicator, hidden int) error {
	_, test, err := digits.Split(1)
	if err != nil {
		return err
	}
	first, err := pretrained(hidden)
	if err != nil {
		return err
	}
	config := delta.Config{Tensors: first.tensors(), Version: 1, Together: true}
	subscriber, err := delta.NewSubscriber(ctx, rt, c, config)
	if err != nil {
		return err
	}
	defer subscriber.Close()
	for range versions - 1 {
		if _, err := subscriber.Update(ctx); err != nil {
			return err
		}
		err := subscriber.View(func(version uint64, tensors []delta.Tensor) error {
			bits := make([]byte, 2*len(first.weights))
			if _, err := tensors[0].Memory.ReadAt(bits, 0); err != nil {
				return err
			}
			n := network{weights: make([]float32, len(first.weights))}
			if err := dtype.ToFloat32(n.weights, bits, dtype.BF16); err != nil {
				return err
			}
			right := 0
			for i, label := range test.Labels {
				if _, all := n.scores(test.Image(i)); all[label] == slices.Max(all[:]) {
					right++
				}
			}
			accuracy := 100 * float64(right) / float64(test.Len())
			fmt.Printf("rank %d has version %d: test accuracy %.1f %%\n", c.Rank(), version, accuracy)
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// perUnit is the number of weights of a unit of the hidden layer: from the pixels, and to the classes.
const perUnit = digits.Pixels + digits.Classes

// network has one hidden layer of rectified linear units.
type network struct {
	training      digits.Set // images
	weights       []float32  // of all units
	mean, square  []float32  // moments of the gradients, for Adam
	gradient      []float32  // of the weights
	step, samples int        // step of Adam; number of images used so far
}

// pretrained returns the network that all ranks have, the same on each.
func pretrained(hidden int) (*network, error) {
	n, err := newNetwork(hidden)
	if err == nil {
		n.train(100, 1e-3)
	}
	return n, err
}

func newNetwork(hidden int) (*network, error) {
	training, _, err := digits.Split(1)
	size := hidden * perUnit
	n := &network{
		training: training,
		weights:  make([]float32, size),
		mean:     make([]float32, size),
		square:   make([]float32, size),
		gradient: make([]float32, size),
	}
	r := rand.New(rand.NewPCG(1, 1))
	for i := range n.weights {
		n.weights[i] = float32(r.NormFloat64() * math.Sqrt(2/float64(digits.Pixels)))
		if i%perUnit >= digits.Pixels {
			n.weights[i] = float32(r.NormFloat64() * math.Sqrt(1/float64(hidden)))
		}
	}
	return n, err
}

// tensors returns a copy of the weights, rounded.
func (n *network) tensors() []delta.Tensor {
	weights := delta.Tensor{
		Name:   "network",
		DType:  dtype.BF16,
		Shape:  []int{len(n.weights) / perUnit, perUnit},
		Memory: delta.Host(n.bf16()),
	}
	return []delta.Tensor{weights}
}

// bf16 returns the weights, rounded.
func (n *network) bf16() []byte {
	b := make([]byte, 2*len(n.weights))
	_ = dtype.FromFloat32(b, dtype.BF16, n.weights) // the lengths are right
	return b
}

// scores returns the activations of the hidden units, and the scores of the classes.
func (n *network) scores(image []float32) (units []float32, all [digits.Classes]float32) {
	units = make([]float32, len(n.weights)/perUnit)
	for u := range units {
		w := n.weights[u*perUnit : (u+1)*perUnit]
		sum := float32(0)
		for i, x := range image {
			sum += w[i] * x
		}
		if units[u] = max(sum, 0); sum > 0 {
			for k := range all {
				all[k] += sum * w[digits.Pixels+k]
			}
		}
	}
	return units, all
}

// train takes steps of Adam with 16 images each.
func (n *network) train(steps int, rate float64) {
	const batch, beta1, beta2 = 16, 0.9, 0.999
	for range steps {
		clear(n.gradient)
		for range batch {
			i := n.samples % n.training.Len()
			n.samples++
			n.learn(n.training.Image(i), n.training.Labels[i])
		}
		n.step++
		down := float32(rate / (1 - math.Pow(beta1, float64(n.step))))
		up := float32(1 / (1 - math.Pow(beta2, float64(n.step))))
		for i, g := range n.gradient {
			g /= batch
			n.mean[i] += (1 - beta1) * (g - n.mean[i])
			n.square[i] += (1 - beta2) * (g*g - n.square[i])
			n.weights[i] -= down * n.mean[i] / (float32(math.Sqrt(float64(n.square[i]*up))) + 1e-8)
		}
	}
}

// learn adds the gradient of the cross entropy of an image.
func (n *network) learn(image []float32, label uint8) {
	units, p := n.scores(image)
	sum := float32(0)
	largest := slices.Max(p[:])
	for k := range p {
		p[k] = float32(math.Exp(float64(p[k] - largest)))
		sum += p[k]
	}
	for k := range p {
		p[k] /= sum
	}
	p[label]--
	for u, x := range units {
		if x == 0 {
			continue
		}
		w := n.weights[u*perUnit : (u+1)*perUnit]
		g := n.gradient[u*perUnit : (u+1)*perUnit]
		back := float32(0)
		for k, d := range p {
			g[digits.Pixels+k] += x * d
			back += w[digits.Pixels+k] * d
		}
		for i, pixel := range image {
			g[i] += back * pixel
		}
	}
}
