package train

import (
	"context"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/examples/digits"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
)

// collector is an observer that keeps results by pattern.
type collector struct {
	results map[string]Result
	onStep  func(step int)
}

func (c *collector) Step(_ string, step, _ int) {
	if c.onStep != nil {
		c.onStep(step)
	}
}

func (c *collector) Finished(r Result) { c.results[r.Pattern] = r }

// trainLocal trains on ranks in this process.
func trainLocal(t *testing.T, ranks int, cfg Config) map[string]Result {
	t.Helper()
	local, err := backend.Find("local")
	require.NoError(t, err)
	c := &collector{results: map[string]Result{}}
	err = local.Run(t.Context(), backend.Options{Ranks: ranks}, func(ctx context.Context, r backend.Rank) error {
		return Run(ctx, r, cfg, c)
	})
	require.NoError(t, err, "seed %d", cfg.Seed)
	return c.results
}

// finalLoss is the mean loss of the last tenth of the steps.
func finalLoss(r Result) float64 {
	tail := r.Curve[len(r.Curve)*9/10:]
	var sum float64
	for _, p := range tail {
		sum += p.Loss
	}
	return sum / float64(len(tail))
}

// Sparse patterns that send a hundredth of the gradient reach the accuracy of dense gradients within one point.
func TestEveryPatternReachesDenseAccuracy(t *testing.T) {
	if testing.Short() {
		t.Skip("trains for minutes under the race detector")
	}
	cfg := brief(sparsity.Patterns()...)
	results := trainLocal(t, 4, cfg)
	require.Len(t, results, len(cfg.Patterns))
	dense := results[sparse.Dense]
	assert.Greater(t, dense.Accuracy, 97.0, "seed %d", cfg.Seed)
	assert.InDelta(t, 1, dense.RatioToDense, 1e-6, "and once what the ranks compare before the first step")
	assert.Equal(t, 1.0, dense.Density)
	for _, pattern := range cfg.Patterns {
		r := results[pattern]
		assert.GreaterOrEqual(t, r.Accuracy, dense.Accuracy-1, "%s, seed %d", pattern, cfg.Seed)
		assert.Equal(t, 4, r.Ranks)
		if pattern != sparse.Dense {
			assert.Less(t, r.RatioToDense, 0.06, pattern)
		}
	}
	// topkA gathers k indices and k values from every other rank. oktopk guarantees at most 6k(P-1)/P.
	k, p := 192.0, 4.0
	assert.InDelta(t, 2*k*(p-1), results["topkA"].SentElements, 0.01)
	assert.LessOrEqual(t, results["oktopk"].SentElements, 6*k*(p-1)/p)
}

func TestErrorFeedbackMatters(t *testing.T) {
	if testing.Short() {
		t.Skip("trains for minutes under the race detector")
	}
	cfg := brief("topkA")
	cfg.Seed = 2
	with := trainLocal(t, 4, cfg)["topkA"]
	cfg.NoErrorFeedback = true
	without := trainLocal(t, 4, cfg)["topkA"]
	assert.Greater(t, with.Accuracy, without.Accuracy, "seed %d", cfg.Seed)
	assert.Greater(t, finalLoss(without), 3*finalLoss(with), "seed %d", cfg.Seed)
}

// brief is the default training if TUTTI_EXTENDED is set, and otherwise a third of it, in which patterns come as
// close to each other.
func brief(patterns ...string) Config {
	cfg := Default(patterns...)
	if os.Getenv("TUTTI_EXTENDED") == "" {
		cfg.Epochs = 12
	}
	return cfg
}

// An outer loop learns as much as averaging gradients in each step, with few exchanges. All ranks end with the same
// weights (otherwise Run fails), in the middle of a window too.
func TestOuterLoop(t *testing.T) {
	cfg := Default(sparse.Dense, "topkA")
	cfg.Epochs, cfg.Hidden, cfg.Density, cfg.Target = 8, 128, 0.05, 90
	steps := cfg.Epochs * (trainingImages / cfg.Batch)
	for _, o := range []outer.Config{
		{Every: 11, LearningRate: 1},
		{Every: 10, LearningRate: 0.7, Momentum: 0.5, Nesterov: true, Decay: 0.95, Fragments: 2, Delay: 3},
	} {
		cfg.Outer = o
		for pattern, r := range trainLocal(t, 4, cfg) {
			assert.Greater(t, r.Accuracy, 93.0, "%s, seed %d", pattern, cfg.Seed)
			assert.Equal(t, steps/o.Every, r.Rounds)
			assert.Equal(t, o.Every, r.Outer)
			require.NotNil(t, r.TargetRounds)
			assert.Less(t, *r.TargetRounds, r.Rounds)
			assert.Less(t, *r.TargetSentBytes, r.Curve[len(r.Curve)-1].SentBytes)
			assert.Less(t, r.RatioToDense, 1.1/float64(o.Every), pattern)
		}
	}
	// Two ranks that form a host average their gradients, which then come from twice as many images.
	cfg.Patterns, cfg.Hosts, cfg.Outer = []string{sparse.Dense}, 2, outer.Config{Every: 11, LearningRate: 1}
	r := trainLocal(t, 4, cfg)[sparse.Dense]
	assert.Greater(t, r.Accuracy, 93.0, "seed %d", cfg.Seed)
	assert.InDelta(t, 1.0/3/11, r.RatioToDense, 0.01) // half a model to one other host instead of one and a half
	// In a window that never ends the ranks share only the initial weights.
	cfg.Hosts, cfg.Outer.Every = 0, steps+1
	r = trainLocal(t, 4, cfg)[sparse.Dense]
	assert.Zero(t, r.Rounds)
	assert.Less(t, r.Accuracy, 30.0)
	assert.Nil(t, r.TargetRounds)
	cfg.Outer.Every, cfg.WarmupSteps = 1, 3
	assert.ErrorContains(t, cfg.Validate(), "outer loop")
}

// short is a training of a few steps.
func short(patterns ...string) Config {
	cfg := Default(patterns...)
	cfg.Epochs, cfg.Hidden = 2, 32
	return cfg
}

func TestSameSeedSameResult(t *testing.T) {
	cfg := short(sparsity.Patterns()...)
	timeless := func(results map[string]Result) map[string]Result {
		for name, r := range results {
			r.CommSeconds, r.TotalSeconds = 0, 0
			for i := range r.Tests {
				r.Tests[i].Seconds = 0
			}
			for i := range r.Curve {
				r.Curve[i].Seconds = 0
			}
			results[name] = r
		}
		return results
	}
	first := timeless(trainLocal(t, 3, cfg))
	assert.Equal(t, first, timeless(trainLocal(t, 3, cfg)))
	cfg.Seed++
	assert.NotEqual(t, first, timeless(trainLocal(t, 3, cfg)))
}

// Dense data-parallel training computes the same for any number of ranks, including one that does not divide the
// batch.
func TestDenseDoesNotDependOnRanks(t *testing.T) {
	cfg := short("dense")
	alone := trainLocal(t, 1, cfg)["dense"]
	assert.Zero(t, alone.SentBytes, "one rank sends nothing")
	for _, ranks := range []int{2, 3, 5} {
		r := trainLocal(t, ranks, cfg)["dense"]
		require.Len(t, r.Curve, len(alone.Curve))
		for step, p := range r.Curve {
			assert.InEpsilon(t, alone.Curve[step].Loss, p.Loss, 1e-3, "%d ranks, step %d", ranks, step)
		}
	}
}

// With --reproducible the weights are the same to the last bit for any number of ranks, and the curve equals
// the curve of dense training.
func TestReproducibleDoesNotDependOnRanks(t *testing.T) {
	cfg := short("dense")
	cfg.Batch = 48
	dense := trainLocal(t, 2, cfg)["dense"]
	cfg.Reproducible = 12
	alone := trainLocal(t, 1, cfg)["dense"]
	require.Len(t, alone.Curve, len(dense.Curve))
	for step, p := range alone.Curve {
		assert.InEpsilon(t, dense.Curve[step].Loss, p.Loss, 0.1, "step %d", step)
	}
	for _, ranks := range []int{2, 3, 4, 5, 6, 12, 13} {
		r := trainLocal(t, ranks, cfg)["dense"]
		assert.Equal(t, alone.Hash, r.Hash, "%d ranks", ranks)
		assert.LessOrEqual(t, r.RatioToDense, 1.02)
	}
	cfg.ReproducibleBits = 20
	coarse := trainLocal(t, 3, cfg)["dense"]
	assert.NotEqual(t, alone.Hash, coarse.Hash)
	assert.Equal(t, coarse.Hash, trainLocal(t, 4, cfg)["dense"].Hash)
}

// A step that lacks a microbatch is an error.
func TestReproducibleNeedsAllMicrobatches(t *testing.T) {
	cfg := short("dense")
	cfg.Reproducible = 4
	data, test, err := cfg.examples()
	require.NoError(t, err)
	local, err := backend.Find("local")
	require.NoError(t, err)
	require.NoError(t, local.Run(t.Context(), backend.Options{Ranks: 1}, func(ctx context.Context, r backend.Rank) error {
		trainer, err := newTrainer(ctx, r, cfg, data, test)
		require.NoError(t, err)
		require.NoError(t, trainer.fixed.Wait(ctx)) // it allocates the memory of a step without microbatches
		freezer := r.Runtime.(runtime.Freezer)
		freezer.Freeze()
		for err == nil { // until no allocation is left to fail
			var taken *runtime.Tensor
			taken, err = runtime.New(r.Runtime, dtype.F32, trainer.update.Len())
			if err == nil {
				trainer.owned = append(trainer.owned, taken.Free)
			}
		}
		assert.ErrorIs(t, trainer.step(ctx, 0, 1), runtime.ErrFrozen)
		freezer.Unfreeze()
		return trainer.close()
	}))
}

// Each test covers the weights at its time on all test images, however the ranks divide them. Its time excludes the
// tests.
func TestAccuracyIsRecordedAgainstTime(t *testing.T) {
	const ranks = 3 // they do not divide the images evenly
	cfg := short("dense", "oktopk")
	cfg.Epochs, cfg.Target = 3, 80
	for pattern, r := range trainLocal(t, ranks, cfg) {
		steps := len(r.Curve)
		every := Default().testEvery(steps / cfg.Epochs)
		require.Len(t, r.Tests, (steps+every-1)/every, "one at the end, and one every %d steps", every)
		previous, reached := 0.0, -1.0
		for _, test := range r.Tests {
			assert.Greater(t, test.Seconds, previous)
			previous = test.Seconds
			images := test.Accuracy / 100 * digits.TestImages
			assert.InDelta(t, math.Round(images), images, 1e-9, "a number of images")
			if reached < 0 && test.Accuracy >= cfg.Target {
				reached = test.Seconds
			}
		}
		assert.Equal(t, r.Accuracy, r.Tests[len(r.Tests)-1].Accuracy)
		assert.Equal(t, r.TotalSeconds, previous)
		require.Greater(t, reached, 0.0, "%s, seed %d", pattern, cfg.Seed)
		assert.Equal(t, reached, *r.TargetSeconds)
	}
	cfg.Target = 100
	assert.Nil(t, trainLocal(t, ranks, cfg)["dense"].TargetSeconds)
	// Training and tests are the same with more ranks.
	alone := trainLocal(t, 1, short("dense"))["dense"]
	for i, test := range trainLocal(t, 4, short("dense"))["dense"].Tests {
		assert.InDelta(t, alone.Tests[i].Accuracy, test.Accuracy, 1, "test %d", i)
	}
}

// plain is a runtime without the kernels of the sparse patterns.
type plain struct{ runtime.Runtime }

func TestDenseNeedsNoKernels(t *testing.T) {
	noop, err := backend.Find("noop")
	require.NoError(t, err)
	err = noop.Run(t.Context(), backend.Options{}, func(ctx context.Context, r backend.Rank) error {
		r.Runtime = plain{r.Runtime}
		c := &collector{results: map[string]Result{}}
		assert.ErrorIs(t, Run(ctx, r, short("topkA"), c), runtime.ErrUnsupported)
		return Run(ctx, r, short("dense"), c)
	})
	assert.NoError(t, err)
}

func TestWarmupStepsAreDense(t *testing.T) {
	cfg := short("topkA")
	cfg.WarmupSteps = 5
	curve := trainLocal(t, 2, cfg)["topkA"].Curve
	n := float64(cfg.shape().parameters())
	const agreement = 8 // bytes of the ranks' comparison of their reductions
	assert.InDelta(t, 5*4*n+agreement, curve[4].SentBytes, 1e-6, "2n(P-1)/P elements in each of 5 steps")
	assert.Less(t, curve[5].SentBytes-curve[4].SentBytes, 0.1*4*n)
}

func TestCancellationEndsTheTraining(t *testing.T) {
	local, err := backend.Find("local")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := &collector{results: map[string]Result{}, onStep: func(step int) {
		if step == 10 {
			cancel()
		}
	}}
	err = local.Run(ctx, backend.Options{Ranks: 3}, func(ctx context.Context, r backend.Rank) error {
		return Run(ctx, r, short("dense", "topkA"), c)
	})
	assert.ErrorIs(t, err, context.Canceled)
	assert.Empty(t, c.results)
}

func TestDenseBesideAnOuterLoopIsUncompressed(t *testing.T) {
	cfg := Default("chunked")
	cfg.Values, cfg.Outer.Every, cfg.Beside = []string{"i4", "i2"}, 10, []string{sparse.Dense, "oktopk"}
	var names []string
	for _, c := range cfg.Runs() {
		names = append(names, Result{Pattern: c.Patterns[0], Values: c.Values[0], Outer: c.Outer.Every}.Name())
	}
	assert.Equal(t, []string{"dense", "oktopk i4", "oktopk i2", "chunked i4, every 10", "chunked i2, every 10"}, names)
	cfg.Outer.Every = 0
	assert.ErrorContains(t, cfg.Validate(), "needs an outer loop")
}

func TestRunNamesBadSettings(t *testing.T) {
	for want, change := range map[string]func(*Config){
		"no pattern":           func(c *Config) { c.Patterns = nil },
		"density":              func(c *Config) { c.Density = 0 },
		"epochs":               func(c *Config) { c.Epochs = 0 },
		"batch":                func(c *Config) { c.Batch = trainingImages + 1 },
		"hidden":               func(c *Config) { c.Hidden = 0 },
		"learning rate":        func(c *Config) { c.LearningRate = -1 },
		"momentum":             func(c *Config) { c.Momentum = 1 },
		"warm-up":              func(c *Config) { c.WarmupSteps = -1 },
		"target":               func(c *Config) { c.Target = 0.97 },
		"microbatches":         func(c *Config) { c.Reproducible = 33 },
		"is dense":             func(c *Config) { c.Reproducible, c.Patterns = 4, []string{"topkA"} },
		"no outer loop":        func(c *Config) { c.Reproducible, c.WarmupSteps = 4, 1 },
		"needs --reproducible": func(c *Config) { c.ReproducibleBits = 24 },
	} {
		cfg := Default("dense")
		change(&cfg)
		assert.ErrorContains(t, cfg.Validate(), want)
	}
}

func TestScheduleRisesAndFalls(t *testing.T) {
	cfg := Config{LearningRate: 2, Epochs: 5}
	const perEpoch = 10
	assert.InDelta(t, 0.2, cfg.schedule(0, perEpoch), 1e-6)
	assert.InDelta(t, 2, cfg.schedule(perEpoch-1, perEpoch), 1e-6)
	for step := perEpoch; step < 5*perEpoch; step++ {
		assert.Less(t, cfg.schedule(step+1, perEpoch), cfg.schedule(step, perEpoch), "step %d", step)
	}
	assert.InDelta(t, 1, cfg.schedule(3*perEpoch, perEpoch), 1e-6, "half way")
	assert.Less(t, cfg.schedule(5*perEpoch-1, perEpoch), float32(0.01))
}

// A learning rate far too high ends the training with an error.
func TestDivergenceIsAnError(t *testing.T) {
	cfg := Default(sparse.Dense)
	cfg.Epochs, cfg.LearningRate, cfg.Hidden = 3, 1e30, 16
	local, err := backend.Find("local")
	require.NoError(t, err)
	for _, ranks := range []int{1, 3} {
		err := local.Run(t.Context(), backend.Options{Ranks: ranks}, func(ctx context.Context, r backend.Rank) error {
			return Run(ctx, r, cfg, &collector{results: map[string]Result{}})
		})
		assert.ErrorIs(t, err, ErrDiverged)
		assert.ErrorContains(t, err, "the loss is NaN after 44 steps; lower --lr or --momentum")
	}
}

// A lack of memory is reported before memory is allocated.
func TestMemoryIsCheckedBeforeTraining(t *testing.T) {
	cfg := Default(sparse.Dense)
	cfg.Backend, cfg.Hidden = "local", maxHidden
	err := Run(t.Context(), backend.Rank{HostRanks: 1 << 20}, cfg, nil)
	var option *backend.OptionError
	require.ErrorAs(t, err, &option)
	assert.ErrorContains(t, err, "of 1048576 ranks are")
	assert.ErrorContains(t, err, "lower --hidden")
}

func TestLimits(t *testing.T) {
	for change, want := range map[string]func(*Config){
		"epochs":       func(c *Config) { c.Epochs = math.MaxInt },
		"batch":        func(c *Config) { c.Batch = math.MaxInt },
		"hidden width": func(c *Config) { c.Hidden = math.MaxInt },
	} {
		cfg := Default(sparse.Dense)
		want(&cfg)
		assert.ErrorContains(t, cfg.Validate(), change+" 9223372036854775807 is not in [1, ")
	}
}

// TestTurn checks that a turned image has its original pixels, up to noise, in another order.
func TestTurn(t *testing.T) {
	const seed = 1
	set, _, err := digits.Split(seed)
	require.NoError(t, err)
	turned := turn(set, rand.New(rand.NewPCG(seed, 0)))
	assert.Equal(t, set.Labels, turned.Labels)
	moved := 0
	for i := range set.Len() {
		before, after := slices.Clone(set.Image(i)), slices.Clone(turned.Image(i))
		var distance, sum float64
		for j := range before {
			distance += math.Abs(float64(before[j] - after[j]))
			sum += float64(after[j] - before[j])
		}
		if distance > 2*noise*digits.Pixels {
			moved++
		}
		assert.InDelta(t, 0, sum, 6*noise*math.Sqrt(digits.Pixels), "image %d, seed %d", i, seed)
	}
	assert.Greater(t, moved, set.Len()/2)
}
