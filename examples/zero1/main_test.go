package main

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/examples/digits/softmax"
	"github.com/tutti-go/tutti/runtime"
)

// whole is Adam with all moments, on averages of whole gradients.
type whole []moments

func (o *whole) Update(_ context.Context, step int, _ *ddp.Gradients, params, gradients []*runtime.Tensor) error {
	if *o == nil {
		*o = make([]moments, len(params))
	}
	for i := range params {
		if err := (*o)[i].adam(step, params[i], gradients[i]); err != nil {
			return err
		}
	}
	return nil
}

func (*whole) Close() error { return nil }

// TestBits checks that Adam with sharded state gives the parameters the same bits as a whole Adam on each rank, with
// one bucket and with two.
func TestBits(t *testing.T) {
	want := train(t, func() softmax.Optimizer { return new(whole) }, ddp.Config{})
	assert.Greater(t, want.Accuracy, 0.9)
	for _, bytes := range []int{0, 100} {
		cfg := ddp.Config{Shard: true, BucketBytes: bytes}
		got := train(t, func() softmax.Optimizer { return new(sharded) }, cfg)
		assert.Equal(t, want.Checksum, got.Checksum, "buckets of %d bytes", bytes)
		assert.Equal(t, want.Accuracy, got.Accuracy)
	}
}

// TestUneven checks uneven batches: ranks without a batch still take part in the others' steps, so all have the same
// parameters.
func TestUneven(t *testing.T) {
	const ranks = 44 // 29 of them have 33 images, three batches, and the others two
	results := make([]softmax.Result, ranks)
	world := tutti.Config{Backend: tutti.Local, Ranks: ranks}
	require.NoError(t, world.Run(t.Context(), func(ctx context.Context, r tutti.Rank) (err error) {
		results[r.Comm.Rank()], err = softmax.Train(ctx, r, &sharded{}, ddp.Config{Shard: true, Uneven: true})
		return err
	}))
	for rank, result := range results {
		assert.Equal(t, results[0].Checksum, result.Checksum, "rank %d", rank)
		assert.Equal(t, 30, result.Curve[9].Step)
	}
	assert.Greater(t, results[0].Accuracy, 0.85)
}

// train returns rank 0's result. Each rank has its own optimizer.
func train(t *testing.T, optimizer func() softmax.Optimizer, cfg ddp.Config) softmax.Result {
	var first softmax.Result
	require.NoError(t, tutti.Run(t.Context(), func(ctx context.Context, r tutti.Rank) error {
		result, err := softmax.Train(ctx, r, optimizer(), cfg)
		if r.Comm.Rank() == 0 {
			first = result
		}
		return err
	}))
	return first
}
