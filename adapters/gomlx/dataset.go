package gomlx

import (
	"fmt"
	"io"
	"slices"

	"github.com/gomlx/gomlx/pkg/core/tensors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
)

// Dataset is a rank's share of a data set in memory, in batches. It implements
// train.Dataset, for loops over epochs: each Reset begins the next one, in another
// order.
type Dataset struct {
	name           string
	inputs, labels []*tensors.Tensor
	sampler        *distributed.Sampler
	size           int
	epoch          int
	batches        [][]int
}

// NewDataset returns the share of c's rank of examples: the first axis of each
// tensor numbers them. size is how many a batch has, on each rank. A last batch with
// fewer is left out, because GoMLX would compile another graph for it; cfg says
// what becomes of examples that the ranks cannot share equally, and may not be
// [distributed.TailKeep], with which ranks would have unequal numbers of batches.
func NewDataset(c comm.Communicator, name string, inputs, labels []*tensors.Tensor, size int, cfg distributed.SamplerConfig) (*Dataset, error) {
	d := &Dataset{name: name, inputs: inputs, labels: labels, size: size}
	n := -1
	for _, t := range slices.Concat(inputs, labels) {
		if t.Shape().IsScalar() || n >= 0 && t.Shape().Dimensions[0] != n {
			return nil, fmt.Errorf("gomlx: data set %s: %w: a tensor of shape %s beside %d examples", name, comm.ErrArgument, t.Shape(), n)
		}
		n = t.Shape().Dimensions[0]
	}
	if n < 0 || size < 1 || cfg.Tail == distributed.TailKeep {
		return nil, fmt.Errorf("gomlx: data set %s: %w: %d tensors, batches of %d, Tail %d", name, comm.ErrArgument, len(inputs)+len(labels), size, cfg.Tail)
	}
	var err error
	if d.sampler, err = distributed.NewSampler(c, n, cfg); err != nil {
		return nil, err
	}
	d.SetEpoch(0)
	return d, nil
}

// SetEpoch begins an epoch, for runs that go on from a checkpoint.
func (d *Dataset) SetEpoch(epoch int) {
	d.epoch = epoch
	d.batches = slices.DeleteFunc(d.sampler.Batches(epoch, d.size), func(b []int) bool { return len(b) < d.size })
}

// Name implements train.Dataset.
func (d *Dataset) Name() string { return d.name }

// Reset implements train.Dataset: it begins the next epoch.
func (d *Dataset) Reset() { d.SetEpoch(d.epoch + 1) }

// Yield implements train.Dataset.
func (d *Dataset) Yield() (spec any, inputs, labels []*tensors.Tensor, err error) {
	if len(d.batches) == 0 {
		return nil, nil, nil, io.EOF
	}
	examples := d.batches[0]
	d.batches = d.batches[1:]
	if inputs, err = gather(d.inputs, examples); err == nil {
		labels, err = gather(d.labels, examples)
	}
	return nil, inputs, labels, err
}

// gather returns tensors with some examples of others.
func gather(from []*tensors.Tensor, examples []int) ([]*tensors.Tensor, error) {
	var batch []*tensors.Tensor
	for _, all := range from {
		shape := all.Shape().Clone()
		row := int(shape.Memory()) / shape.Dimensions[0]
		shape.Dimensions[0] = len(examples)
		picked := tensors.FromShape(shape)
		var err error
		access := all.ConstBytes(func(src []byte) {
			err = picked.MutableBytes(func(dst []byte) {
				for i, example := range examples {
					copy(dst[i*row:], src[example*row:][:row])
				}
			})
		})
		if access != nil {
			return nil, access
		}
		if err != nil {
			return nil, err
		}
		batch = append(batch, picked)
	}
	return batch, nil
}
