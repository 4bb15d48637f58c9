package main

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reference"
	"github.com/tutti-go/tutti/runtime"
)

// contributions is the number of gradients that a step averages, for any number of ranks.
const contributions = 12

// parameters are the lengths of the parameters of a small model.
var parameters = []int{50000, 64, 7000, 3, 1000, 65}

// reproducible prints a line for each type of gradients: the hash of the averages over contributions that the ranks
// share. The hash is the same for any number of ranks, each of three bucket sizes, and each of three orders of
// gradients. Before that, it compares the results of random inputs with those of big integers.
func (b *bits) reproducible(inputs int) error {
	for _, dt := range []dtype.DType{dtype.F32, dtype.F16, dtype.BF16} {
		if err := b.random(dt, inputs); err != nil {
			return err
		}
		var first string
		for _, bucketBytes := range []int{1, 64 << 10, 4 << 20} {
			for order := range 3 {
				data, err := b.averages(dt, bucketBytes, order)
				if err != nil {
					return err
				}
				if sum := hash(data); first == "" {
					first = sum
				} else if sum != first {
					return fmt.Errorf("with buckets of %d bytes and order %d, %v has hash %s, and before %s",
						bucketBytes, order, dt, sum, first)
				}
			}
		}
		fmt.Fprintf(b.out, "reproducible %-27v %s\n", dt, first)
	}
	return nil
}

// averages makes a step and returns its results.
func (b *bits) averages(dt dtype.DType, bucketBytes, order int) (all []byte, err error) {
	var tensors []*runtime.Tensor
	for _, n := range parameters {
		t, err := runtime.New(b.Runtime, dt, n)
		if err != nil {
			return nil, err
		}
		defer t.Free() //nolint:errcheck // the program ends
		tensors = append(tensors, t)
	}
	cfg := ddp.Config{Reproducible: contributions, BucketBytes: bucketBytes}
	g, err := ddp.New(b.ctx, b.Runtime, b.Comm, tensors, cfg)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	ranks := b.Comm.WorldSize()
	rank := b.Comm.Rank()
	end := (rank + 1) * contributions / ranks
	for c := rank * contributions / ranks; c < end; c++ {
		for _, i := range b.order(order) {
			if err := b.write(tensors[i], contribution(dt, c, i)); err != nil {
				return nil, err
			}
			if c < end-1 {
				err = g.Accumulate(i, tensors[i])
			} else {
				err = g.Ready(b.ctx, i, tensors[i])
			}
			if err != nil {
				return nil, err
			}
		}
	}
	if err := g.Wait(b.ctx); err != nil {
		return nil, err
	}
	if err := b.Comm.Sync(b.ctx); err != nil {
		return nil, err
	}
	for i := range tensors {
		data, err := b.read(g.Result(i))
		if err != nil {
			return nil, err
		}
		all = append(all, data...)
	}
	return all, nil
}

// order returns the order of the parameters: forward, backward, or different on each rank.
func (b *bits) order(number int) []int {
	all := rand.New(rand.NewPCG(1, uint64(b.Comm.Rank()))).Perm(len(parameters))
	for i := range all {
		switch number {
		case 0:
			all[i] = i
		case 1:
			all[i] = len(all) - 1 - i
		}
	}
	return all
}

// contribution draws a contribution to a parameter, with magnitudes that differ between blocks.
func contribution(dt dtype.DType, number, parameter int) []byte {
	random := rand.New(rand.NewPCG(uint64(number), uint64(parameter)))
	values := make([]float64, parameters[parameter])
	scale := 1.0
	for i := range values {
		if i%64 == 0 {
			scale = math.Ldexp(1, random.IntN(12))
		}
		values[i] = (random.Float64() - 0.5) * scale
	}
	return reference.Encode(dt, values...)
}
