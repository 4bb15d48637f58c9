package main

import (
	"fmt"
	"hash/crc32"

	"github.com/gomlx/gomlx/backends"
	"github.com/gomlx/gomlx/pkg/core/graph"
	"github.com/gomlx/gomlx/pkg/core/tensors"
	mlctx "github.com/gomlx/gomlx/pkg/ml/context"

	"github.com/tutti-go/tutti/examples/digits"
)

// load returns images to train with and their labels, and images for the test.
func load() (images, labels *tensors.Tensor, test digits.Set, err error) {
	training, test, err := digits.Split(1)
	if err != nil {
		return nil, nil, test, err
	}
	numbers := make([]int32, training.Len())
	for i, label := range training.Labels {
		numbers[i] = int32(label)
	}
	images = tensors.FromFlatDataAndDimensions(training.Inputs, training.Len(), digits.Pixels)
	return images, tensors.FromFlatDataAndDimensions(numbers, training.Len(), 1), test, nil
}

// evaluate returns the share of test images whose digit has the highest logit.
func evaluate(backend backends.Backend, variables *mlctx.Context, test digits.Set) (float64, error) {
	images := tensors.FromFlatDataAndDimensions(test.Inputs, test.Len(), digits.Pixels)
	exec, err := mlctx.NewExec(backend, variables.Reuse(), func(ctx *mlctx.Context, images *graph.Node) *graph.Node {
		return graph.ArgMax(model(ctx, nil, []*graph.Node{images})[0], -1)
	})
	if err != nil {
		return 0, err
	}
	out, err := exec.Exec(images)
	if err != nil {
		return 0, err
	}
	right := 0
	for i, digit := range out[0].Value().([]int32) {
		if digit == int32(test.Labels[i]) {
			right++
		}
	}
	return float64(right) / float64(test.Len()), nil
}

// checksum is of the bits of the trainable variables, for comparing runs.
func checksum(variables *mlctx.Context) uint32 {
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
