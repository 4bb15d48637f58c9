package train

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/examples/digits"
)

// Config says what to train and how.
type Config struct {
	// Backend and Network, an emulated network, are copied into results.
	Backend, Network string
	// Patterns are trained one after the other from the same start, each with every codec in Values (package sparse).
	Patterns, Values []string
	// Density is the fraction of the gradient that a sparse pattern selects, in (0, 1].
	Density float64
	// Hosts is the number of hosts that the ranks run on, see [backend.NewReducer]; 0 treats all ranks alike.
	Hosts int
	// NoErrorFeedback discards entries that were not selected. By default they are kept for the next step.
	NoErrorFeedback bool
	// WarmupSteps is the number of steps at the beginning that exchange dense gradients.
	WarmupSteps int

	// Outer, if Every is set, has each rank train on its own part of the batches with its own optimizer. Every few
	// steps the ranks average their parameters by pattern and density (package outer), instead of gradients in every
	// step. With Hosts, the ranks of a host average their gradients in every step.
	Outer outer.Config
	// Beside are patterns that average gradients in every step. They run before the patterns of Outer.
	Beside []string

	// Reproducible, if not 0, makes the weights the same to the last bit for any number of ranks: a step has this
	// number of microbatches, which the ranks divide among themselves, and one momentum for all ranks.
	// ReproducibleBits is the precision of each microbatch, see [ddp.Config].
	Reproducible, ReproducibleBits int
	// Elastic lets members come and go ([RunElastic]).
	Elastic bool
	// Patience is how long a live member may keep the others waiting, see [elastic.Config].
	Patience time.Duration

	// Text is a file whose bytes the model predicts, each from the bytes before it. "" trains on digits.
	Text string
	// Turned makes the task harder: images are turned and mirrored at random, and noise is added.
	Turned bool
	// Epochs is the number of passes over the training images.
	Epochs int
	// Batch is the number of images in one step over all ranks.
	Batch int
	// Hidden is the width of the hidden layer.
	Hidden int
	// LearningRate is the highest step size, after the first epoch; see
	// [schedule].
	LearningRate float64
	// Momentum of each rank's velocity, in [0, 1).
	Momentum float64
	// Target is a test accuracy in percent, 0 for none. Results say when it was reached.
	Target float64
	// Seed determines the division and order of the images, and the initial weights. Equal seeds give equal results.
	Seed uint64
}

// Default is the configuration of `tutti train` without flags, for the given patterns.
func Default(patterns ...string) Config {
	return Config{
		Patterns:     patterns,
		Values:       []string{sparse.F32},
		Density:      0.01,
		Epochs:       40,
		Batch:        32,
		Hidden:       256,
		LearningRate: 0.05,
		Momentum:     0.9,
		Seed:         1,
		Outer:        outer.Config{LearningRate: 1, Decay: 1, Fragments: 1},
	}
}

// Validate returns an error that names the first invalid setting.
func (c Config) Validate() error {
	bad := func(name string, value any, want string) error {
		return fmt.Errorf("%s %v is not %s", name, value, want)
	}
	fragments := max(1, c.Outer.Fragments)
	switch {
	case len(c.Patterns) == 0:
		return errors.New("no pattern was given")
	case len(c.Values) == 0:
		return errors.New("no codec of values was given")
	case !(c.Density > 0 && c.Density <= 1):
		return bad("density", c.Density, "in (0, 1]")
	case c.Hosts < 0:
		return bad("number of hosts", c.Hosts, "0 or more")
	case c.Outer.Every < 0:
		return bad("outer window", c.Outer.Every, "1 step or more")
	case c.Outer.Every > 0 && (c.NoErrorFeedback || c.WarmupSteps > 0):
		return errors.New("an outer loop has error feedback and no warm-up")
	case c.Outer.Every > 0 && fragments > c.Outer.Every:
		return fmt.Errorf("an outer window of %d steps is too short for %d fragments", c.Outer.Every, fragments)
	case c.Outer.Every > 0 && c.Outer.Delay > c.Outer.Every/fragments:
		return fmt.Errorf("delay %d exceeds the %d steps between two of %d fragments",
			c.Outer.Delay, c.Outer.Every/fragments, fragments)
	case c.Elastic && (len(c.Patterns) != 1 || len(c.Values) != 1):
		return errors.New("--elastic takes one pattern, such as --pattern dense, and one codec of values")
	case c.Elastic && c.Patience < 0:
		return bad("patience", c.Patience, "0 s or more")
	case c.Elastic && (c.Outer.Every > 0 || c.Hosts > 0):
		return errors.New("--elastic excludes --outer and --hosts")
	case c.Reproducible == 0 && c.ReproducibleBits != 0:
		return errors.New("--reproducible-bits needs --reproducible")
	case c.Reproducible < 0 || c.Reproducible > c.Batch:
		return bad("number of microbatches", c.Reproducible, fmt.Sprintf("in [1, %d], the batch", c.Batch))
	case c.Reproducible > 0 && !slices.Equal(slices.Concat(c.Patterns, c.Values), []string{sparse.Dense, sparse.F32}):
		return errors.New("a reproducible training is dense, with values of f32: what a rank selects or rounds depends on " +
			"what it has")
	case c.Reproducible > 0 && (c.Outer.Every > 0 || c.Hosts > 0 || c.WarmupSteps > 0):
		return errors.New("a reproducible training has no outer loop, hosts or warm-up")
	case c.Outer.Every == 0 && len(c.Beside) > 0:
		return errors.New("--beside needs an outer loop (--outer)")
	case c.WarmupSteps < 0:
		return bad("warm-up steps", c.WarmupSteps, "0 or more")
	case c.Hidden < 1 || c.Hidden > maxHidden:
		return bad("hidden width", c.Hidden, fmt.Sprintf("in [1, %d]", maxHidden))
	case !(c.LearningRate > 0) || math.IsInf(c.LearningRate, 0):
		return bad("learning rate", c.LearningRate, "a positive number")
	case !(c.Momentum >= 0 && c.Momentum < 1):
		return bad("momentum", c.Momentum, "in [0, 1)")
	case c.Target != 0 && !(c.Target >= 1 && c.Target <= 100):
		return bad("target accuracy", c.Target, "in [1, 100] percent")
	case c.Text != "" && c.Turned:
		return errors.New("a text cannot be turned")
	case c.Text == "":
		return c.validateSize(trainingImages)
	}
	return nil
}

// Runs returns one configuration per training, each with one pattern and one codec. Dense trainings beside an outer
// loop send f32.
func (c Config) Runs() (runs []Config) {
	add := func(c Config, patterns, values []string) {
		for _, pattern := range patterns {
			for _, v := range values {
				c.Patterns = []string{pattern}
				c.Values = []string{v}
				runs = append(runs, c)
			}
		}
	}
	every := c
	every.Outer.Every = 0
	for _, pattern := range c.Beside {
		values := c.Values
		if pattern == sparse.Dense {
			values = []string{sparse.F32}
		}
		add(every, []string{pattern}, values)
	}
	add(c, c.Patterns, c.Values)
	return runs
}

// validateSize is Validate for n training examples.
func (c Config) validateSize(n int) error {
	if c.Batch < 1 || c.Batch > n {
		return fmt.Errorf("batch %d is not in [1, %d], the number of training examples", c.Batch, n)
	}
	if c.Epochs < 1 || c.Epochs > maxSteps/(n/c.Batch) {
		return fmt.Errorf("epochs %d is not in [1, %d]", c.Epochs, maxSteps/(n/c.Batch))
	}
	return nil
}

// testsPerEpoch is how often an epoch measures the accuracy, if it has as many steps.
const testsPerEpoch = 4

// testEvery is the number of steps between tests. With an outer loop it is a whole number of windows, after which
// ranks have the same parameters.
func (c Config) testEvery(stepsPerEpoch int) int {
	every := max(1, stepsPerEpoch/testsPerEpoch)
	window := max(1, c.Outer.Every)
	return (every + window - 1) / window * window
}

// trainingImages is the size of the training set.
const trainingImages = digits.Images - digits.TestImages

// maxSteps bounds the curve, which has a point for every step, to 240 MB.
const maxSteps = 10_000_000

// maxHidden keeps a mistyped width from allocating all memory: 2^20 units have 75 million parameters.
const maxHidden = 1 << 20

// bytes is the least memory that a rank needs: weights, gradient, velocity, the exchanged tensor and its residual,
// two activations, and the curve.
func (c Config) bytes(examples int) float64 {
	s := c.shape()
	floats := 5*s.parameters() + c.Batch*(s.inputs+2*s.hidden+s.classes)
	if c.Outer.Every > 0 {
		floats += 2 * s.parameters()
	}
	floats += c.Reproducible * s.parameters() // one rank may have all microbatches
	return 4*float64(floats) + 24*float64(c.Epochs)*float64(examples/c.Batch)
}

// schedule is the learning rate of each step. It rises linearly during the first epoch, or the first quarter of the
// training if that is shorter, and then falls along a half cosine to nearly zero (I. Loshchilov, F. Hutter, "SGDR",
// 2017, without restarts). The fall gives error feedback time to deliver its residual.
func (c Config) schedule(step, stepsPerEpoch int) float32 {
	total := stepsPerEpoch * c.Epochs
	rise := min(stepsPerEpoch, (total+3)/4)
	if step < rise {
		return float32(c.LearningRate * float64(step+1) / float64(rise))
	}
	progress := float64(step-rise) / float64(total-rise)
	return float32(c.LearningRate * (1 + math.Cos(math.Pi*progress)) / 2)
}
