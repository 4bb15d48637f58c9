package gomlx_test

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/backends"
	_ "github.com/gomlx/gomlx/backends/simplego"
	"github.com/gomlx/gomlx/pkg/core/graph"
	"github.com/gomlx/gomlx/pkg/core/tensors"
	mlctx "github.com/gomlx/gomlx/pkg/ml/context"
	"github.com/gomlx/gomlx/pkg/ml/layers"
	"github.com/gomlx/gomlx/pkg/ml/layers/activations"
	"github.com/gomlx/gomlx/pkg/ml/train"
	"github.com/gomlx/gomlx/pkg/ml/train/losses"
	"github.com/gomlx/gomlx/pkg/ml/train/optimizers"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/adapters/gomlx"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/examples/digits"
	"github.com/tutti-go/tutti/internal/jobtest"
)

// TestDigits trains over goroutines, Open MPI and MPICH, to the same bits, also
// with accumulated gradients and with a sparse exchange.
func TestDigits(t *testing.T) {
	program := jobtest.Build(t, "./digits")
	for _, args := range [][]string{nil, {"-accumulate", "2"}, {"-density", "0.1"}} {
		t.Run(strings.Join(args, "="), func(t *testing.T) { jobtest.SameEverywhere(t, program, args...) })
	}
}

func model(ctx *mlctx.Context, _ any, inputs []*graph.Node) []*graph.Node {
	hidden := activations.Relu(layers.Dense(ctx.In("hidden"), inputs[0], true, 16))
	return []*graph.Node{layers.Dense(ctx.In("logits"), hidden, true, digits.Classes)}
}

// training is what a rank needs to train.
type training struct {
	variables *mlctx.Context
	loop      *train.Loop
	data      *gomlx.Dataset
}

// newTraining prepares one on a rank; the first variables of every rank are others.
func newTraining(c comm.Communicator, optimizer optimizers.Interface, batch, accumulate int) (*training, error) {
	set, _, err := digits.Split(1)
	if err != nil {
		return nil, err
	}
	labels := make([]int32, set.Len())
	for i, label := range set.Labels {
		labels[i] = int32(label)
	}
	data, err := gomlx.NewDataset(c, "digits",
		[]*tensors.Tensor{tensors.FromFlatDataAndDimensions(set.Inputs, set.Len(), digits.Pixels)},
		[]*tensors.Tensor{tensors.FromFlatDataAndDimensions(labels, set.Len(), 1)}, batch, distributed.SamplerConfig{Seed: 1})
	if err != nil {
		return nil, err
	}
	backend, err := backends.NewWithConfig("go")
	if err != nil {
		return nil, err
	}
	variables := mlctx.New()
	if err := variables.SetRNGStateFromSeed(int64(c.Rank())); err != nil {
		return nil, err
	}
	trainer := train.NewTrainer(backend, variables, model, losses.SparseCategoricalCrossEntropyLogits, optimizer, nil, nil)
	if accumulate > 1 {
		if err := trainer.AccumulateGradients(accumulate); err != nil {
			return nil, err
		}
	}
	return &training{variables, train.NewLoop(trainer), data}, nil
}

// parameters returns the trainable variables, one after the other.
func (x *training) parameters() []float32 {
	var all []float32
	for v := range x.variables.IterVariables() {
		if v.Trainable {
			tensors.MustConstFlatData(v.MustValue(), func(flat []float32) { all = append(all, flat...) })
		}
	}
	return all
}

// inner are optimizers that keep more or less state.
var inner = map[string]func() optimizers.Interface{
	"sgd":  func() optimizers.Interface { return optimizers.StochasticGradientDescent() },
	"adam": func() optimizers.Interface { return optimizers.Adam().LearningRate(0.01).Done() },
}

// TestSameTraining: two ranks make what GoMLX alone makes of batches twice as
// large, but for rounding.
func TestSameTraining(t *testing.T) {
	const steps, batch = 20, 32
	for name, optimizer := range inner {
		for _, accumulate := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s/accumulate=%d", name, accumulate), func(t *testing.T) {
				var want []float32
				require.NoError(t, local.Run(t.Context(), 1, func(_ context.Context, c comm.Communicator) error {
					x, err := newTraining(c, optimizer(), batch, 1)
					if err != nil {
						return err
					}
					_, err = x.loop.RunSteps(x.data, steps)
					want = x.parameters()
					return err
				}))
				got := make([][]float32, 2)
				require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
					o, err := gomlx.New(ctx, c, optimizer(), ddp.Config{})
					if err != nil {
						return err
					}
					x, err := newTraining(c, o, batch/2/accumulate, accumulate)
					if err != nil {
						return err
					}
					o.Attach(x.loop)
					if _, err := x.loop.RunSteps(x.data, steps*accumulate); err != nil {
						return err
					}
					got[c.Rank()] = x.parameters()
					return o.Close()
				}))
				assert.Equal(t, got[0], got[1], "the same bits on all ranks")
				assert.InDeltaSlice(t, want, got[0], 1e-3)
			})
		}
	}
}

// TestDataset: what all ranks get in an epoch.
func TestDataset(t *testing.T) {
	numbers := tensors.FromFlatDataAndDimensions([]int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 11)
	squares := tensors.FromFlatDataAndDimensions([]int64{0, 1, 4, 9, 16, 25, 36, 49, 64, 81, 100}, 11, 1)
	both := []*tensors.Tensor{numbers, squares}
	seen := make([][]int64, 2)
	require.NoError(t, local.Run(t.Context(), 2, func(_ context.Context, c comm.Communicator) error {
		d, err := gomlx.NewDataset(c, "numbers", both, both[:1], 2, distributed.SamplerConfig{Tail: distributed.TailDrop})
		require.NoError(t, err)
		for epoch := range 2 {
			var got []int64
			for {
				_, inputs, labels, err := d.Yield()
				if err == io.EOF {
					break
				}
				require.NoError(t, err)
				assert.Equal(t, []int{2, 1}, inputs[1].Shape().Dimensions)
				x := tensors.MustCopyFlatData[int64](inputs[0])
				assert.Equal(t, []int64{x[0] * x[0], x[1] * x[1]}, tensors.MustCopyFlatData[int64](inputs[1]))
				assert.Equal(t, x, tensors.MustCopyFlatData[int64](labels[0]))
				got = append(got, x...)
			}
			assert.Len(t, got, 4, "five of eleven, in batches of two")
			if epoch == 0 {
				seen[c.Rank()] = got
			} else {
				assert.NotEqual(t, seen[c.Rank()], got)
			}
			d.Reset()
		}
		_, err = gomlx.NewDataset(c, "numbers", both, nil, 2, distributed.SamplerConfig{Tail: distributed.TailKeep})
		assert.ErrorIs(t, err, comm.ErrArgument)
		return nil
	}))
	all := slices.Sorted(slices.Values(slices.Concat(seen...)))
	assert.Len(t, slices.Compact(all), 8)
}

// TestMisuse: an optimizer that makes its gradients itself.
func TestMisuse(t *testing.T) {
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		_, err := gomlx.New(ctx, c, struct{ optimizers.Interface }{}, ddp.Config{})
		assert.ErrorIs(t, err, comm.ErrArgument)
		_, err = gomlx.New(ctx, nil, optimizers.StochasticGradientDescent(), ddp.Config{})
		assert.ErrorIs(t, err, comm.ErrArgument)
		return nil
	}))
}

// TestReadme: what the README adds to a program is what the example has.
func TestReadme(t *testing.T) { jobtest.Readme(t, "README.md", "digits/main.go", 10) }

// BenchmarkStep is a training step on one rank, of GoMLX alone and with the
// optimizer around its own.
func BenchmarkStep(b *testing.B) {
	for _, wrapped := range []bool{false, true} {
		b.Run(map[bool]string{false: "alone", true: "tutti"}[wrapped], func(b *testing.B) {
			require.NoError(b, local.Run(b.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
				optimizer := inner["adam"]()
				o, err := gomlx.New(ctx, c, optimizer, ddp.Config{})
				if err != nil {
					return err
				}
				defer o.Close()
				if wrapped {
					optimizer = o
				}
				x, err := newTraining(c, optimizer, 64, 1)
				if err != nil {
					return err
				}
				if wrapped {
					o.Attach(x.loop)
				}
				if _, err := x.loop.RunSteps(x.data, 3); err != nil {
					return err
				}
				b.ResetTimer()
				for range b.N {
					_, err := x.loop.RunSteps(x.data, 1)
					if err != nil {
						return err
					}
					x.data.SetEpoch(0)
				}
				return nil
			}))
		})
	}
}
