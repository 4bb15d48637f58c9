package gomlx_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/gomlx/compute"
	_ "github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/layers/norm"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/checkpoint"
	"github.com/gomlx/gomlx/ml/model/initializer"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/optimizer"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/adapters/gomlx"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/examples/digits"
	"github.com/tutti-go/tutti/internal/jobtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestDigits trains over goroutines, Open MPI and MPICH to the same bits, also with accumulated gradients and with a
// sparse exchange.
func TestDigits(t *testing.T) {
	program := jobtest.Build(t, "./digits")
	for _, args := range [][]string{nil, {"-accumulate", "2"}, {"-density", "0.1"}} {
		t.Run(strings.Join(args, "="), func(t *testing.T) { jobtest.SameEverywhere(t, program, args...) })
	}
}

func perceptron(scope *model.Scope, images *graph.Node) *graph.Node {
	hidden := activation.Relu(layers.Dense(scope.In("hidden"), images, true, 16))
	return layers.Dense(scope.In("logits"), hidden, true, digits.Classes)
}

// training is the state that a rank trains with.
type training struct {
	variables *model.Store
	loop      *train.Loop
	data      *gomlx.Dataset
	saved     *checkpoint.Handler
}

// newTraining prepares a training on a rank. Initial variables differ between ranks.
func newTraining(c comm.Communicator, o optimizer.Interface, batch, accumulate int) (*training, error) {
	return newTrainingOf(c, o, batch, accumulate, perceptron, "")
}

// newTrainingOf trains another model, and resumes from the checkpoint in dir if dir is set.
func newTrainingOf(c comm.Communicator, o optimizer.Interface, batch, accumulate int, f func(*model.Scope, *graph.Node) *graph.Node, dir string) (*training, error) {
	variables := model.NewStore()
	if err := variables.SetRNGStateFromSeed(int64(c.Rank())); err != nil {
		return nil, err
	}
	return newTrainingIn(variables, c, o, batch, accumulate, f, dir)
}

// newTrainingIn trains given variables.
func newTrainingIn(variables *model.Store, c comm.Communicator, o optimizer.Interface, batch, accumulate int, f func(*model.Scope, *graph.Node) *graph.Node, dir string) (*training, error) {
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
	backend, err := compute.NewWithConfig("go")
	if err != nil {
		return nil, err
	}
	var saved *checkpoint.Handler
	if dir != "" { // before the loop, which reads the step
		if saved, err = checkpoint.Build(variables).Dir(dir).Immediate().Done(); err != nil {
			return nil, err
		}
	}
	trainer := train.NewTrainer(backend, variables, f, loss.SparseCategoricalCrossEntropyLogits, o, nil, nil)
	if accumulate > 1 {
		if err := trainer.AccumulateGradients(accumulate); err != nil {
			return nil, err
		}
	}
	return &training{variables, train.NewLoop(trainer), data, saved}, nil
}

// parameters returns the trainable variables in the order of their paths.
func (x *training) parameters() []float32 {
	of := map[string][]float32{}
	for v := range x.variables.IterVariables() {
		if strings.HasPrefix(v.Path(), "/hidden") || strings.HasPrefix(v.Path(), "/logits") { // a loaded variable is always marked trainable
			of[v.Path()] = tensors.MustCopyFlatData[float32](v.MustValue())
		}
	}
	var all []float32
	for _, path := range slices.Sorted(maps.Keys(of)) {
		all = append(all, of[path]...)
	}
	return all
}

// inner are optimizers with different amounts of state.
var inner = map[string]func() optimizer.Interface{
	"sgd":  func() optimizer.Interface { return optimizer.StochasticGradientDescent() },
	"adam": func() optimizer.Interface { return optimizer.Adam().LearningRate(0.01).Done() },
}

// TestSameTraining checks that two ranks compute the same as GoMLX alone with batches twice as large, apart from
// rounding.
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

// TestOuter checks that at the end of a window the variables are the mean of the ranks' separate results. A training
// resumed within a window, from each rank's checkpoint and state, has the bits of an uninterrupted one.
func TestOuter(t *testing.T) {
	const ranks, window = 2, 7
	// run makes steps in windows of this length, after the first, from each rank's checkpoint and state if there are
	// any. It returns the ranks' parameters and states.
	sent := int64(0)
	cfg := outer.Config{}
	run := func(every, steps int, dirs []string, states [][]byte) (parameters [][]float32, now [][]byte) {
		parameters, now = make([][]float32, ranks), make([][]byte, ranks)
		cfg := cfg
		cfg.Every = every
		require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			sgd := optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.1)
			o := gomlx.NewOuter(ctx, c, sgd, cfg)
			defer o.Close()
			x, err := newTrainingOf(c, o, 16, 1, perceptron, dirs[c.Rank()])
			if err != nil {
				return err
			}
			if states != nil {
				o.Restore(states[c.Rank()])
			}
			if err := x.data.Infinite(true).Seek(0, x.loop.LoopStep); err != nil {
				return err
			}
			o.Attach(x.loop)
			if _, err := x.loop.RunSteps(x.data, steps); err != nil {
				return err
			}
			assert.Equal(t, (x.loop.LoopStep-1)/every, o.Loop().Stats().Rounds, "the first step makes the variables")
			parameters[c.Rank()] = x.parameters()
			if c.Rank() == 0 {
				sent = o.Loop().Stats().SentElements
			}
			if now[c.Rank()], err = o.State(); err == nil && x.saved != nil {
				err = x.saved.Save()
			}
			return errors.Join(err, o.Adopt())
		}))
		return parameters, now
	}
	dirs := func() []string { return []string{t.TempDir(), t.TempDir()} }
	none := make([]string, ranks)
	want, _ := run(window, 1+window, none, nil)
	require.Equal(t, want[0], want[1], "the same bits on all ranks")
	alone, _ := run(100, 1+window, none, nil)
	require.NotEqual(t, alone[0], alone[1])
	for i := range want[0] {
		assert.InDelta(t, (alone[0][i]+alone[1][i])/2, want[0][i], 1e-6)
	}
	saved := dirs()
	_, states := run(window, 4, saved, nil)
	got, _ := run(window, window+1-4, saved, states)
	assert.Equal(t, want, got)
	dense := sent
	cfg.Reduce.Config = sparse.Config{Pattern: sparse.TopkA, Density: 0.01}
	run(window, 1+window, none, nil)
	assert.Less(t, sent, dense/2, "matrices are sparse, as with gradients: they keep their shapes")
}

// checkpointed trains for some steps on a number of ranks, from a checkpoint in dir if there is one, and writes a
// checkpoint. It returns the parameters, and each rank's state of the reduction.
func checkpointed(t *testing.T, dir string, ranks, steps int, states [][]byte, cfg ddp.Config) (parameters []uint64, now [][]byte) {
	parameters, now = make([]uint64, ranks), make([][]byte, ranks)
	require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
		o, err := gomlx.New(ctx, c, optimizer.StochasticGradientDescent().WithDecay(false), cfg)
		if err != nil {
			return err
		}
		defer o.Close()
		if states != nil {
			var mine [][]byte
			for _, rank := range sparse.RestoreRanks(len(states), ranks, c.Rank()) {
				mine = append(mine, states[rank])
			}
			if err := o.Restore(mine...); err != nil {
				return err
			}
		}
		x, err := newTrainingOf(c, o, 24/ranks, 1, perceptron, dir)
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
		h := fnv.New64a()
		if err := binary.Write(h, binary.LittleEndian, x.parameters()); err != nil {
			return err
		}
		parameters[c.Rank()] = h.Sum64()
		if now[c.Rank()], err = o.State(); err != nil || c.Rank() > 0 {
			return err
		}
		stats, err := o.Stats()
		assert.False(t, stats.Skipped)
		return errors.Join(err, x.saved.Save())
	}))
	return parameters, now
}

// TestResume checks that a sparse training resumed from its checkpoint has the bits of an uninterrupted run, and
// would not without the state of the reduction. It continues, with the same bits on all ranks, on more and on fewer
// ranks.
func TestResume(t *testing.T) {
	const ranks, before, after = 2, 5, 7
	cfg := ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.05}}
	want, _ := checkpointed(t, t.TempDir(), ranks, before+after, nil, cfg)
	dir := t.TempDir()
	_, states := checkpointed(t, dir, ranks, before, nil, cfg)
	again := func(ranks int, states [][]byte) []uint64 {
		here := t.TempDir()
		require.NoError(t, os.CopyFS(here, os.DirFS(dir)))
		got, _ := checkpointed(t, here, ranks, after, states, cfg)
		for rank := range ranks {
			require.Equal(t, got[0], got[rank])
		}
		return got
	}
	assert.Equal(t, want[0], again(ranks, states)[0])
	assert.NotEqual(t, want[0], again(ranks, nil)[0])
	for _, other := range []int{1, 3, 4} {
		again(other, states)
	}
}

// normalized subtracts the mean of the batch and stores it where norm.BatchNorm does, which GoMLX's Go backend cannot
// train.
func normalized(scope *model.Scope, x *graph.Node) *graph.Node {
	mean := graph.ReduceMean(x, 0)
	scope.In(norm.BatchNormalizationScopeName).WithInitializer(initializer.Zero).
		VariableWithShape("mean", mean.Shape()).SetTrainable(false).SetNodeValue(mean)
	return graph.Sub(x, graph.InsertAxes(mean, 0))
}

// TestSyncBatchNorm checks that the statistics of batch normalization are the same on all ranks on request, and are
// the ranks' average.
func TestSyncBatchNorm(t *testing.T) {
	const ranks = 3
	remembered := func(sync bool) [ranks]map[string][]float32 {
		var all [ranks]map[string][]float32
		require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			o, err := gomlx.New(ctx, c, optimizer.Adam().Done(), ddp.Config{})
			if err != nil {
				return err
			}
			defer o.Close()
			if sync {
				o.SyncBatchNorm()
			}
			x, err := newTrainingOf(c, o, 16, 1, func(scope *model.Scope, images *graph.Node) *graph.Node {
				return perceptron(scope, normalized(scope, images))
			}, "")
			if err != nil {
				return err
			}
			o.Attach(x.loop)
			if _, err := x.loop.RunSteps(x.data, 1); err != nil {
				return err
			}
			all[c.Rank()] = map[string][]float32{}
			for v := range x.variables.IterVariables() {
				if strings.Contains(v.Path(), norm.BatchNormalizationScopeName) && !v.Trainable && !strings.HasPrefix(v.Path(), "/tutti") {
					all[c.Rank()][v.Name()] = tensors.MustCopyFlatData[float32](v.MustValue())
				}
			}
			return nil
		}))
		return all
	}
	apart, together := remembered(false), remembered(true)
	require.Len(t, together[0], 1)
	for name := range together[0] {
		mean := make([]float32, len(together[0][name]))
		for rank := range ranks {
			assert.Equal(t, together[0][name], together[rank][name], name)
			for i, x := range apart[rank][name] {
				mean[i] += x / ranks
			}
		}
		assert.InDeltaSlice(t, mean, together[0][name], 1e-5, name)
	}
	assert.NotEqual(t, apart[0]["mean"], apart[1]["mean"])
}

// TestDataset checks the examples that all ranks get in an epoch, and where iterations end and continue.
func TestDataset(t *testing.T) {
	numbers := tensors.FromFlatDataAndDimensions([]int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 10)
	squares := tensors.FromFlatDataAndDimensions([]int64{0, 1, 4, 9, 16, 25, 36, 49, 64, 81}, 10, 1)
	both := []*tensors.Tensor{numbers, squares}
	seen, shared, alone := make([][]int64, 2), make([][]int64, 2), make([][]int64, 2)
	require.NoError(t, local.Run(t.Context(), 2, func(_ context.Context, c comm.Communicator) error {
		d, err := gomlx.NewDataset(c, "numbers", both, both[:1], 2, distributed.SamplerConfig{})
		require.NoError(t, err)
		take := func(most int) (got []int64) {
			for b, err := range d.Iter() {
				require.NoError(t, err)
				assert.Equal(t, []int{2, 1}, b.Inputs[1].Shape().Dimensions)
				x := tensors.MustCopyFlatData[int64](b.Inputs[0])
				assert.Equal(t, []int64{x[0] * x[0], x[1] * x[1]}, tensors.MustCopyFlatData[int64](b.Inputs[1]))
				assert.Equal(t, x, tensors.MustCopyFlatData[int64](b.Labels[0]))
				if got = append(got, x...); len(got) >= most {
					break
				}
			}
			return got
		}
		first, second := take(100), take(100)
		seen[c.Rank()] = first
		assert.Len(t, first, 4, "five of ten, in batches of two")
		assert.NotEqual(t, first, second)
		epoch, batch := d.Position()
		assert.Equal(t, [2]int{2, 0}, [2]int{epoch, batch})

		require.NoError(t, d.Infinite(true).Seek(0, 1))
		assert.Equal(t, slices.Concat(first[2:], second[:2]), take(4), "from the middle of an epoch into the next")
		epoch, batch = d.Position()
		assert.Equal(t, [2]int{1, 1}, [2]int{epoch, batch})
		d.Infinite(false)
		assert.Equal(t, second[2:], take(100), "to the end of the epoch")
		for _, wrong := range [][2]int{{-1, 0}, {0, -1}, {0, 3}} {
			assert.ErrorIs(t, d.Seek(wrong[0], wrong[1]), comm.ErrArgument)
		}
		_, err = gomlx.NewDataset(c, "numbers", both, nil, 2, distributed.SamplerConfig{Uneven: true})
		assert.ErrorIs(t, err, comm.ErrArgument)

		require.NoError(t, d.Seek(0, 0))
		shared[c.Rank()] = take(2)
		require.NoError(t, d.Rebind(noop.New(cpu.New())))
		epoch, batch = d.Position()
		assert.Equal(t, [2]int{0, 2}, [2]int{epoch, batch}, "of one rank")
		alone[c.Rank()] = take(100)
		return nil
	}))
	assert.Equal(t, alone[0], alone[1])
	assert.Len(t, slices.Compact(slices.Sorted(slices.Values(slices.Concat(shared[0], shared[1], alone[0])))), 10, "ten of eleven, each once")
	all := slices.Sorted(slices.Values(slices.Concat(seen...)))
	assert.Len(t, slices.Compact(all), 8)
}

// TestMisuse checks an optimizer that computes its gradients itself.
func TestMisuse(t *testing.T) {
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		_, err := gomlx.New(ctx, c, struct{ optimizer.Interface }{}, ddp.Config{})
		assert.ErrorIs(t, err, comm.ErrArgument)
		_, err = gomlx.New(ctx, nil, optimizer.StochasticGradientDescent(), ddp.Config{})
		assert.ErrorIs(t, err, comm.ErrArgument)
		return nil
	}))
}

// Before the first step there is no loop, no state to save and nothing to adopt.
func TestOuterBeforeTheFirstStep(t *testing.T) {
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		o := gomlx.NewOuter(ctx, c, optimizer.StochasticGradientDescent(), outer.Config{Every: 2})
		state, err := o.State()
		assert.Nil(t, state)
		assert.ErrorIs(t, o.Adopt(), comm.ErrArgument)
		return errors.Join(err, o.Close())
	}))
}

// TestReadme checks that the example contains the code that the README adds to a program.
func TestReadme(t *testing.T) { jobtest.Readme(t, "README.md", "digits/main.go", 10) }

// TestMemory checks that a step reduces gradients in the backend's memory. It allocates about as much as GoMLX's own
// step, without the size of the gradients in addition.
func TestMemory(t *testing.T) {
	const steps, width = 10, 4096
	wide := func(scope *model.Scope, images *graph.Node) *graph.Node {
		return layers.Dense(scope.In("logits"), activation.Relu(layers.Dense(scope.In("hidden"), images, true, width)), true, digits.Classes)
	}
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // the backend's pools keep their contents
	var allocated [2]int64
	for i := range allocated {
		require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
			optimizer := inner["sgd"]()
			o, err := gomlx.New(ctx, c, optimizer, ddp.Config{})
			if err != nil {
				return err
			}
			defer o.Close()
			if i == 1 {
				optimizer = o
			}
			x, err := newTrainingOf(c, optimizer, 4, 1, wide, "")
			if err != nil {
				return err
			}
			if i == 1 {
				o.Attach(x.loop)
			}
			if _, err := x.loop.RunSteps(x.data.Infinite(true), 5); err != nil {
				return err
			}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			if _, err := x.loop.RunSteps(x.data, steps); err != nil {
				return err
			}
			runtime.ReadMemStats(&after)
			allocated[i] = int64(after.TotalAlloc-before.TotalAlloc) / steps
			return nil
		}))
	}
	assert.Less(t, allocated[1]-allocated[0], int64(width*digits.Pixels*4/2), "bytes of a step: %v", allocated)
}

// BenchmarkStep measures a training step on one rank, with GoMLX alone and with the adapter's optimizer.
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
					if err := x.data.Seek(0, 0); err != nil {
						return err
					}
				}
				return nil
			}))
		})
	}
}

// Ranks whose examples, or their order, differ from the first rank's are named on all ranks before any training. If
// all have the same, one comparison is enough.
func TestDifferentData(t *testing.T) {
	start := func(value func(rank int) float32) []error {
		const ranks = 4
		errs := make([]error, ranks)
		require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			o, err := gomlx.New(ctx, c, optimizer.StochasticGradientDescent(), ddp.Config{})
			if err != nil {
				return err
			}
			defer o.Close()
			x, err := newTraining(c, o, 4, 1)
			if err != nil {
				return err
			}
			x.data, err = gomlx.NewDataset(c, "random",
				[]*tensors.Tensor{tensors.FromFlatDataAndDimensions(slices.Repeat([]float32{value(c.Rank()), 1}, 8*digits.Pixels), 16, digits.Pixels)},
				[]*tensors.Tensor{tensors.FromFlatDataAndDimensions(make([]int32, 16), 16, 1)}, 4, distributed.SamplerConfig{Seed: 1})
			if err != nil {
				return err
			}
			o.Attach(x.loop)
			_, errs[c.Rank()] = x.loop.RunSteps(x.data.Infinite(true), 2)
			return nil
		}))
		return errs
	}
	for _, err := range start(func(int) float32 { return 3 }) {
		assert.NoError(t, err)
	}
	for _, err := range start(func(rank int) float32 { return float32(rank % 2) }) {
		assert.ErrorIs(t, err, comm.ErrMismatch)
		assert.ErrorContains(t, err, "data set random")
		assert.ErrorContains(t, err, "ranks [1 3] have other examples than rank 0")
	}
}
