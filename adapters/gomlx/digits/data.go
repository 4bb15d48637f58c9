package main

import (
	"fmt"
	"hash/crc32"

	"github.com/gomlx/compute"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/tutti-go/tutti/examples/digits"
)

// load returns training images with their labels, and test images.
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

// evaluate returns the fraction of test images whose digit has the highest logit.
func evaluate(backend compute.Backend, variables *model.Store, test digits.Set) (float64, error) {
	images := tensors.FromFlatDataAndDimensions(test.Inputs, test.Len(), digits.Pixels)
	exec, err := model.NewExec(backend, variables, func(scope *model.Scope, images *graph.Node) *graph.Node {
		return graph.ArgMax(perceptron(scope, images), -1)
	})
	if err != nil {
		return 0, err
	}
	out, err := exec.Call(images)
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
