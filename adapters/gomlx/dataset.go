package gomlx

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"iter"
	"slices"

	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/train"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
)

// Dataset is a rank's share of a data set in memory, in batches. It implements train.Dataset. An iteration continues
// where the last one ended, up to the end of the epoch. The next one begins the next epoch, in another order. The
// position, for checkpoints, is the number of epochs and of batches taken.
type Dataset struct {
	name           string                    // in errors
	inputs, labels []*tensors.Tensor         // batches are cut from them
	cfg            distributed.SamplerConfig // as passed
	sampler        *distributed.Sampler      // shares the examples among the ranks
	n              int                       // number of examples
	size           int                       // size of a batch
	ranks          int                       // number of ranks that share the examples
	infinite       bool                      // epochs follow each other without end
	epoch, batch   int                       // current epoch and its next batch
	batches        [][]int                   // of the epoch
	compared       bool                      // all ranks are known to have these examples
}

// NewDataset returns the share of c's rank of examples, which the first axis of each tensor numbers. All ranks have
// all examples in the same order: when a training starts, their checksums are compared. size is the number of
// examples in a batch on each rank. A smaller last batch is left out, because GoMLX would compile another graph for
// it. cfg decides about examples that the ranks cannot share equally. Uneven is an error, because ranks would have
// unequal numbers of batches.
func NewDataset(
	c comm.Communicator,
	name string,
	inputs, labels []*tensors.Tensor,
	size int,
	cfg distributed.SamplerConfig,
) (*Dataset, error) {
	d := &Dataset{
		name:   name,
		inputs: inputs,
		labels: labels,
		cfg:    cfg,
		size:   size,
	}
	n := -1
	for _, t := range slices.Concat(inputs, labels) {
		if t.Shape().IsScalar() || n >= 0 && t.Shape().Dimensions[0] != n {
			return nil, fmt.Errorf("gomlx: data set %s: %w: a tensor of shape %s beside %d examples",
				name, comm.ErrArgument, t.Shape(), n)
		}
		n = t.Shape().Dimensions[0]
	}
	if n < 0 || size < 1 || cfg.Uneven {
		return nil, fmt.Errorf("gomlx: data set %s: %w: %d tensors, batches of %d, uneven %t",
			name, comm.ErrArgument, len(inputs)+len(labels), size, cfg.Uneven)
	}
	d.n = n
	if err := d.Rebind(c); err != nil {
		return nil, err
	}
	return d, nil
}

// Rebind divides the examples among the ranks of another communicator. The epoch continues after the batches that the
// ranks have taken together, rounded down to a multiple of the new number of ranks.
func (d *Dataset) Rebind(c comm.Communicator) error {
	sampler, err := distributed.NewSampler(c, d.n, d.cfg)
	if err != nil {
		return err
	}
	taken := d.batch * d.ranks
	d.sampler = sampler
	d.ranks = c.WorldSize()
	err = d.Seek(d.epoch, 0)
	d.batch = min(taken/d.ranks, len(d.batches))
	return err
}

// Infinite makes an iteration continue with the next epoch instead of ending, for train.Loop.RunSteps. It returns d.
func (d *Dataset) Infinite(on bool) *Dataset {
	d.infinite = on
	return d
}

// Position returns the epoch and the number of its batches taken.
func (d *Dataset) Position() (epoch, batch int) { return d.epoch, d.batch }

// Batches returns the number of batches in an epoch.
func (d *Dataset) Batches() int { return len(d.batches) }

// Seek continues at a position returned by [Dataset.Position], for a run that resumes from a checkpoint. A position
// that does not exist is [comm.ErrArgument].
func (d *Dataset) Seek(epoch, batch int) error {
	batches := slices.DeleteFunc(d.sampler.Batches(epoch, d.size), func(b []int) bool {
		return len(b) < d.size
	})
	if epoch < 0 || batch < 0 || batch > len(batches) {
		return fmt.Errorf("gomlx: data set %s: %w: epoch %d, batch %d of %d",
			d.name, comm.ErrArgument, epoch, batch, len(batches))
	}
	d.epoch = epoch
	d.batch = batch
	d.batches = batches
	return nil
}

// Name implements train.Dataset.
func (d *Dataset) Name() string { return d.name }

// Iter implements train.Dataset.
func (d *Dataset) Iter() iter.Seq2[train.Batch, error] {
	return func(yield func(train.Batch, error) bool) {
		for {
			for d.batch < len(d.batches) {
				examples := d.batches[d.batch]
				d.batch++
				var b train.Batch
				var err error
				if b.Inputs, err = gather(d.inputs, examples); err == nil {
					b.Labels, err = gather(d.labels, examples)
				}
				if !yield(b, err) || err != nil {
					return
				}
			}
			if err := d.Seek(d.epoch+1, 0); err != nil || !d.infinite || len(d.batches) == 0 {
				return
			}
		}
	}
}

// checksum returns a checksum of the examples.
func (d *Dataset) checksum() (uint32, error) {
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	for _, t := range slices.Concat(d.inputs, d.labels) {
		fmt.Fprintln(sum, t.Shape())
		if err := t.ConstBytes(func(data []byte) { sum.Write(data) }); err != nil {
			return 0, err
		}
	}
	return sum.Sum32(), nil
}

// compare returns the same error on all ranks unless they have the same examples. Processes that draw their data at
// random, or number it in the order of a map, would otherwise silently train on different examples.
func (o world) compare(d *Dataset) error {
	if d.compared {
		return nil
	}
	sum, err := d.checksum()
	if err != nil {
		return err
	}
	sums, err := distributed.AllGatherBytes(o.ctx, o.rt, o.c, binary.LittleEndian.AppendUint32(nil, sum))
	if err != nil {
		return err
	}
	var different []int
	for rank, sum := range sums {
		if !slices.Equal(sum, sums[0]) {
			different = append(different, rank)
		}
	}
	if different != nil {
		return fmt.Errorf("gomlx: data set %s: %w: ranks %v have other examples than rank 0: each process makes its data "+
			"by itself, from the same files in the same order or from the same seed", d.name, comm.ErrMismatch, different)
	}
	d.compared = true
	return nil
}

// gather returns tensors with the examples of given indices.
func gather(from []*tensors.Tensor, examples []int) ([]*tensors.Tensor, error) {
	var batch []*tensors.Tensor
	for _, all := range from {
		shape := all.Shape().Clone()
		row := int(shape.ByteSize()) / shape.Dimensions[0]
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
