// Command digits trains a network to recognize digits with graphs that GoMLX itself distributes (SPMD). Its devices
// are the ranks of a job, and the graph of a step contains the AllReduce of its gradients. Like ./digits it is a
// complete program to copy: only the images come from a shared package, so both contain the network, its test and the
// checksum.
//
//	go run ./spmd/digits -ranks 3                             # goroutines of one process
//	go build -o program ./spmd/digits
//	tutti launch -n 3 ./program                        # processes, on one machine or several: the same bits
//	mpirun --bind-to none -n 3 ./program               # under MPI as well
package main

import (
	"context"
	"flag"
	"fmt"
	"hash/crc32"
	"log"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/distributed"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/adapters/gomlx/spmd"
	"github.com/tutti-go/tutti/examples/digits"
)

func main() {
	backend := flag.String("backend", "", "local, tcp or mpi; unset: as the launcher says")
	ranks := flag.Int("ranks", 0, "ranks of the local backend; 0 is 4")
	steps := flag.Int("steps", 200, "steps of the training")
	batch := flag.Int("batch", 48, "images of a step, of all ranks together")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	if *steps < 1 {
		log.Fatalf("-steps is %d, want 1 or more", *steps)
	}
	if *batch < 1 {
		log.Fatalf("-batch is %d, want 1 or more", *batch)
	}
	cfg := tutti.Config{
		Backend: *backend,
		Ranks:   *ranks,
	}
	err := cfg.Run(context.Background(), func(ctx context.Context, r tutti.Rank) error {
		return run(ctx, r, *steps, *batch)
	})
	if err != nil {
		log.Fatal(err)
	}
}

// run trains as one rank.
func run(ctx context.Context, r tutti.Rank, steps, batch int) error {
	inner, err := gobackend.New("")
	if err != nil {
		return err
	}
	backend, err := spmd.New(ctx, r.Comm, inner)
	if err != nil {
		return err
	}
	defer backend.Finalize()
	devices := backend.NumDevices()
	mesh, err := distributed.NewDeviceMesh([]int{devices}, []string{"data"})
	if err != nil {
		return err
	}
	training, test, err := digits.Split(1)
	if err != nil {
		return err
	}
	variables := model.NewStore()
	variables.SetParam(optimizer.ParamLearningRate, 0.5)
	step, err := newStep(backend, variables, devices)
	if err != nil {
		return err
	}
	step.SPMD(mesh)
	if err := variables.SetRNGStateFromSeed(1); err != nil { // after SPMD, from which its variable gets the mesh
		return err
	}
	share := batch / devices
	var last float32
	for i := range steps {
		outputs, err := step.Exec(inputs(training, i*batch, share, devices)...)
		if err != nil {
			return err
		}
		last = outputs[0].Value().(float32) // the same on all devices
	}
	if r.Comm.Rank() > 0 {
		return nil
	}
	accuracy, err := evaluate(backend, variables, test)
	if err != nil {
		return err
	}
	fmt.Printf("world size %d, %d steps: loss %.4f, test accuracy %.1f %%, checksum of the parameters %08x\n",
		devices, steps, last, 100*accuracy, checksum(variables))
	return nil
}

// inputs returns images and labels from begin on, a share for each device.
func inputs(set digits.Set, begin, share, devices int) []any {
	var all []any
	for device := range devices {
		images := make([][]float32, share)
		labels := make([][]int32, share)
		for i := range share {
			k := (begin + device*share + i) % set.Len()
			images[i] = set.Inputs[k*digits.Pixels : (k+1)*digits.Pixels]
			labels[i] = []int32{int32(set.Labels[k])}
		}
		all = append(all, images, labels)
	}
	return all
}

// newStep returns the graph of a step on one device. The graph gets images and labels and returns the loss over all
// devices.
func newStep(backend compute.Backend, variables *model.Store, devices int) (*model.Exec, error) {
	sgd := optimizer.StochasticGradientDescent()
	return model.NewExec(backend, variables, func(scope *model.Scope, images, labels *graph.Node) *graph.Node {
		losses := loss.SparseCategoricalCrossEntropyLogits([]*graph.Node{labels}, []*graph.Node{perceptron(scope, images)})
		mean := graph.ReduceAllMean(losses)
		values := append(scope.BuildTrainableVariablesGradientsGraph(mean), mean)
		if devices > 1 {
			values = mean.Graph().Distributed().AllReduce(values, compute.ReduceOpSum)
		}
		for i, sum := range values {
			values[i] = graph.DivScalar(sum, devices)
		}
		last := len(values) - 1
		sgd.UpdateGraphWithGradients(scope, values[:last], mean.DType())
		return values[last]
	})
}

// perceptron has one hidden layer.
func perceptron(scope *model.Scope, images *graph.Node) *graph.Node {
	hidden := activation.Relu(layers.Dense(scope.In("hidden"), images, true, 32))
	return layers.Dense(scope.In("logits"), hidden, true, digits.Classes)
}

// evaluate returns the fraction of test images whose digit has the highest logit. Its graph is not distributed.
func evaluate(backend compute.Backend, variables *model.Store, test digits.Set) (float64, error) {
	guess, err := model.NewExec(backend, variables, func(scope *model.Scope, images *graph.Node) *graph.Node {
		return graph.ArgMax(perceptron(scope, images), -1)
	})
	if err != nil {
		return 0, err
	}
	outputs, err := guess.Exec(inputs(test, 0, test.Len(), 1)[0])
	if err != nil {
		return 0, err
	}
	right := 0
	for i, digit := range outputs[0].Value().([]int32) {
		if digit == int32(test.Labels[i]) {
			right++
		}
	}
	return float64(right) / float64(test.Len()), nil
}

// checksum hashes the bits of the trainable variables, for a comparison of runs.
func checksum(variables *model.Store) uint32 {
	sum := crc32.NewIEEE()
	for v := range variables.IterVariables() {
		if v.Trainable {
			if err := v.MustValue().ConstBytes(func(data []byte) { sum.Write(data) }); err != nil {
				fmt.Fprint(sum, err)
			}
		}
	}
	return sum.Sum32()
}
