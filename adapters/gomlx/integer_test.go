package gomlx_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/optimizer"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/adapters/gomlx"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/examples/digits"
)

// forgetful is the perceptron with dropout, and with a count of batches that is marked trainable.
func forgetful(scope *model.Scope, images *graph.Node) *graph.Node {
	g := images.Graph()
	batches := scope.VariableWithValue("batches", int32(0))
	batches.SetNodeValue(graph.AddScalar(batches.NodeValue(g), 1))
	hidden := activation.Relu(layers.Dense(scope.In("hidden"), images, true, 16))
	hidden = layers.DropoutStatic(scope, hidden, 0.3)
	return layers.Dense(scope.In("logits"), hidden, true, digits.Classes)
}

// attached is an optimizer of the adapter.
type attached interface {
	optimizer.Interface
	Attach(loop *train.Loop)
	Close() error
}

// TestDropoutResumes checks a training with dropout. GoMLX's loader marks everything that it loads trainable, even
// the state of the random numbers (u64), which has no gradient. The training continues from its checkpoint, and the
// integers keep counting.
func TestDropoutResumes(t *testing.T) {
	const steps = 4
	kinds := map[string]func(ctx context.Context, c comm.Communicator, inner optimizer.Interface) (attached, error){
		"gradients": func(ctx context.Context, c comm.Communicator, inner optimizer.Interface) (attached, error) {
			return gomlx.New(ctx, c, inner, ddp.Config{})
		},
		"sparse": func(ctx context.Context, c comm.Communicator, inner optimizer.Interface) (attached, error) {
			return gomlx.New(ctx, c, inner, ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}})
		},
		"outer": func(ctx context.Context, c comm.Communicator, inner optimizer.Interface) (attached, error) {
			return gomlx.NewOuter(ctx, c, inner, outer.Config{Every: 2}), nil
		},
	}
	for kind, makes := range kinds {
		for name, inner := range inner {
			for _, ranks := range []int{1, 2} {
				for _, accumulate := range []int{1, 2} {
					if kind == "outer" && accumulate > 1 {
						continue
					}
					t.Run(fmt.Sprintf("%s/%s/ranks=%d/accumulate=%d", kind, name, ranks, accumulate), func(t *testing.T) {
						dir := t.TempDir()
						for run := range 2 {
							require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
								o, err := makes(ctx, c, inner())
								if err != nil {
									return err
								}
								defer o.Close()
								x, err := newTrainingIn(model.NewStore(), c, o, 16, accumulate, forgetful, dir) // no seed
								if err != nil {
									return err
								}
								if random := x.variables.GetVariable("/" + model.RNGStateVariableName); run > 0 {
									require.True(t, random.Trainable, "as the loader marks it")
								}
								o.Attach(x.loop)
								if _, err := x.loop.RunSteps(x.data.Infinite(true), steps); err != nil {
									return err
								}
								batches := tensors.MustCopyFlatData[int32](x.variables.GetVariable("/batches").MustValue())
								assert.Equal(t, []int32{int32((run + 1) * steps)}, batches)
								assert.True(t, x.variables.GetVariable("/"+model.RNGStateVariableName).HasValue())
								if c.Rank() > 0 {
									return nil
								}
								return x.saved.Save()
							}))
						}
					})
				}
			}
		}
	}
}

// TestDropoutBits checks that a resumed training with dropout has the bits of an uninterrupted one, because the
// checkpoint has the state of the random numbers. It does not if a seed is set before loading, which GoMLX then
// keeps. README.md says so.
func TestDropoutBits(t *testing.T) {
	for name, inner := range inner {
		for _, ranks := range []int{1, 2, 4} {
			want := droppedOut(t, inner, ranks, 8, t.TempDir(), true)
			for rank := range ranks {
				assert.Equal(t, want[0], want[rank])
			}
			for _, seeds := range []bool{false, true} {
				dir := t.TempDir()
				droppedOut(t, inner, ranks, 4, dir, true)
				got := droppedOut(t, inner, ranks, 4, dir, seeds)
				assert.Equal(t, !seeds, slices.Equal(want[0], got[0]), "%s, %d ranks, seed set: %v", name, ranks, seeds)
			}
		}
	}
}

// droppedOut makes steps, from a checkpoint in dir if there is one, and returns the ranks' parameters.
func droppedOut(t *testing.T, inner func() optimizer.Interface, ranks, steps int, dir string, seeds bool) (parameters [][]float32) {
	parameters = make([][]float32, ranks)
	require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
		o, err := gomlx.New(ctx, c, inner(), ddp.Config{})
		if err != nil {
			return err
		}
		defer o.Close()
		variables := model.NewStore()
		if seeds {
			if err := variables.SetRNGStateFromSeed(5); err != nil {
				return err
			}
		}
		x, err := newTrainingIn(variables, c, o, 16, 1, forgetful, dir)
		if err != nil {
			return err
		}
		if err := x.data.Infinite(true).Seek(0, x.loop.LoopStep); err != nil {
			return err
		}
		o.Attach(x.loop)
		if _, err := x.loop.RunSteps(x.data, steps); err != nil {
			return err
		}
		parameters[c.Rank()] = x.parameters()
		if c.Rank() > 0 {
			return nil
		}
		return x.saved.Save()
	}))
	return parameters
}

// An error about a variable whose type cannot be averaged names it with its scope.
func TestErrorsNameVariables(t *testing.T) {
	double := func(scope *model.Scope, images *graph.Node) *graph.Node {
		wide := layers.Dense(scope.In("wide"), graph.ConvertDType(images, dtypes.Float64), true, 16)
		return layers.Dense(scope.In("logits"), graph.ConvertDType(wide, dtypes.Float32), true, digits.Classes)
	}
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		compressing, err := gomlx.New(ctx, c, optimizer.StochasticGradientDescent(), ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}})
		require.NoError(t, err)
		for _, o := range []attached{compressing, gomlx.NewOuter(ctx, c, optimizer.StochasticGradientDescent(), outer.Config{Every: 1})} {
			x, err := newTrainingOf(c, o, 16, 1, double, "")
			require.NoError(t, err)
			o.Attach(x.loop)
			_, err = x.loop.RunSteps(x.data.Infinite(true), 1)
			assert.ErrorIs(t, err, comm.ErrUnsupported)
			assert.ErrorContains(t, err, "/wide/dense/")
			require.NoError(t, o.Close())
		}
		return nil
	}))
}
