package sparse

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"strings"

	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Config says how a [Reducer] reduces a gradient. The zero value of each field
// but Density is its default. All ranks use the same values.
type Config struct {
	// Pattern is one of [Patterns], "dense" unless set, or [Auto].
	Pattern string
	// Values is as what values travel, one of [Values], F32 unless set. What rounding loses stays in the
	// residual of the rank that has rounded, so it is sent in later steps, and so the dense pattern has
	// a residual as well unless Values is F32. A sum that is rounded again before all ranks get it leaves what that
	// loses with the rank that made it. With NoErrorFeedback it is forgotten. Where dense steps
	// precede sparse ones ([Schedule]), they travel so, too.
	Values string
	// Density is the share of a rank's entries that it selects per step, in
	// (0, 1]: k = Density * n, rounded, at least 1. The dense pattern ignores
	// it.
	Density float64
	// Selector, if set, selects the entries in the place of the pattern's own selection, and the
	// pattern says how they are combined. It is an error with the dense pattern and [Auto].
	Selector Selector
	// NoErrorFeedback discards the residual, instead of adding it to the
	// next step's gradient. It is there for comparison: training with it off
	// usually converges worse.
	NoErrorFeedback bool

	// Momentum, in (0, 1), is momentum correction (Lin et al., "Deep Gradient
	// Compression", ICLR 2018, section 3.1): each rank keeps a velocity v = Momentum*v
	// + gradient, and that is reduced in place of the gradient; what a rank selects
	// becomes 0 in its velocity (momentum factor masking). So entries that are sent
	// late carry the momentum of the time when they arose, and the optimizer is plain
	// SGD, without a momentum of its own. Dense steps are ordinary momentum. It takes
	// as much memory as the residual, and needs error feedback.
	Momentum float64

	// ClipNorm bounds the L2 norm of the gradient before it is added to the
	// residual; 0 does not clip, and neither does a norm that is not finite.
	ClipNorm float64
	// Clip says whose norm ClipNorm bounds.
	Clip ClipMode

	// NoUndo saves memory, 4 bytes per element (for the dense pattern, the size of
	// the gradient). Without it a step is a transaction, which can be repeated after
	// an error (see [Reducer.AllReduce]) and skipped if a gradient is not finite; with it, an
	// error of a step stays.
	NoUndo bool
	// NonFinite says what becomes of a step in which a rank's gradient is not
	// finite. Unless set it is [SkipNonFinite], also for [Auto] whatever it chooses, but
	// [PassNonFinite] with NoUndo, which allows no other, and for the dense pattern in F32,
	// which keeps nothing that such a gradient could spoil.
	NonFinite NonFinitePolicy

	// Schedule varies the density over the steps.
	Schedule Schedule
}

// ClipMode says which norm [Config.ClipNorm] bounds.
type ClipMode uint8

const (
	// ClipLocal scales each rank's gradient to at most ClipNorm/sqrt(P), as in
	// Deep Gradient Compression (Lin et al., ICLR 2018, section 3.2): if the
	// ranks' gradients are independent, their sum has at most norm ClipNorm.
	ClipLocal ClipMode = iota
	// ClipGlobal scales all ranks' gradients by one factor, so that the root
	// mean square of their norms is at most ClipNorm. The norm of the averaged
	// gradient is never larger than that. It costs an allreduce of one
	// number.
	ClipGlobal
	numClipModes
)

// NonFinitePolicy says what becomes of a step whose result has, or may have from
// additions of that size (from the largest F32 divided by P), an entry that is
// not finite. As every rank's result is made of the same entries, all ranks find
// the same. An average that is too large for F16 or BF16, but not for F32, is
// finite: the result is the largest number of that type, and the residual keeps
// the rest.
type NonFinitePolicy uint8

const (
	// nonFiniteUnset is the default: see [Config].
	nonFiniteUnset NonFinitePolicy = iota
	// PassNonFinite passes NaN and infinities on, as a dense allreduce does.
	PassNonFinite
	// SkipNonFinite rolls the step back on every rank: the gradients are not added,
	// residuals and thresholds are as before, bit for bit, the result is zero, and
	// [Stats] has Skipped set. It costs no message, and where the host has not
	// waited for the device in the step, no wait. In an epoch of density 0, which
	// sends nothing, a rank drops its own gradient where a later step could not send
	// what it adds up to; where [ClipGlobal] has found that a gradient is not finite, all
	// ranks skip the step. Gradients just below that size can leave more than that in a
	// residual: with [Config].Momentum, or where sums of ranks come back to one. Then all
	// later steps are skipped, until [Reducer.ScaleResidual] has made it smaller.
	SkipNonFinite
	// FailNonFinite is [ErrNonFinite] on every rank, and as after any error nothing
	// has happened. The host waits for the device in every step. In an epoch of density
	// 0 it is SkipNonFinite.
	FailNonFinite
	numNonFinitePolicies
)

// ErrNonFinite: a gradient is not finite; see [FailNonFinite].
var ErrNonFinite = errors.New("gradient is not finite")

// Schedule varies the density over the steps. The zero value does not.
type Schedule struct {
	// WarmupSteps steps at the start are dense.
	WarmupSteps int
	// Densities are the densities of the epochs after the warm-up, in [0, 1];
	// later epochs use Config.Density. In an epoch of density 0 nothing is
	// sent: gradients add up in the residuals and results are 0.
	Densities []float64
	// StepsPerEpoch is the length of an epoch of Densities, in steps.
	StepsPerEpoch int
}

// WarmupDensities returns the exponential warm-up of Deep Gradient Compression
// (Lin et al., ICLR 2018, section 3.3), for [Schedule.Densities].
func WarmupDensities() []float64 { return []float64{0.25, 0.0625, 0.015625, 0.004, 0.001} }

// density returns the density of a step, and whether the step is dense.
func (s *Schedule) density(step int, after float64) (density float64, dense bool) {
	switch {
	case s.over(step):
		return after, false
	case step < s.WarmupSteps:
		return 1, true
	}
	return s.Densities[(step-s.WarmupSteps)/s.StepsPerEpoch], false
}

// over reports whether a step is after those that the schedule is for.
func (s *Schedule) over(step int) bool {
	step -= s.WarmupSteps
	return step >= 0 && (len(s.Densities) == 0 || step/s.StepsPerEpoch >= len(s.Densities))
}

// Settings are a configuration with the defaults of all fields that were not set.
type Settings struct {
	Config
	chosen bool          // Pattern was measured for Auto; false: it is the program's
	tuning tuning.Tuning // constants of the algorithms
}

// Settings returns c with the defaults of what is not set, or the error of a field that is out of range.
func (c Config) Settings() (Settings, error) {
	c.Pattern = cmp.Or(c.Pattern, Dense)
	c.Values = cmp.Or(c.Values, F32)
	if c.NonFinite == nonFiniteUnset {
		c.NonFinite = SkipNonFinite
		if c.NoUndo || c.Pattern == Dense && c.Values == F32 {
			c.NonFinite = PassNonFinite
		}
	}
	if err := c.check(); err != nil {
		return Settings{}, err
	}
	c.Schedule.Densities = slices.Clone(c.Schedule.Densities)
	return Settings{Config: c, tuning: tuning.Current()}, nil
}

// Choose returns c with a pattern in the place of its own. Where c leaves its pattern to [Auto], the policies are
// those of c all the same: they were resolved before the pattern is replaced, and whatever was measured, a step is
// rolled back, skipped and kept in a residual alike.
func (c Settings) Choose(pattern string) (Settings, error) {
	c.chosen = c.chosen || c.Pattern == Auto && pattern != Auto
	c.Pattern = pattern
	return c, c.check()
}

// check returns the error of a field that is out of range.
func (c *Config) check() error {
	pattern := slices.Contains(Patterns(), c.Pattern)
	_, values := codecs[c.Values]
	switch {
	case !pattern && c.Pattern != Auto:
		return base.ConfigError("unknown pattern %q (want %s or one of %s)", c.Pattern, Auto, strings.Join(Patterns(), ", "))
	case c.Pattern != Dense && !(c.Density > 0 && c.Density <= 1):
		return base.ConfigError("Density is %v, want a share in (0, 1]", c.Density)
	case !values:
		return base.ConfigError("unknown values %q (want one of %s)", c.Values, strings.Join(Values(), ", "))
	case c.Selector != nil && (c.Pattern == Dense || c.Pattern == Auto):
		return base.ConfigError("Selector with pattern %s, which may send everything", c.Pattern)
	case !(c.Momentum >= 0 && c.Momentum < 1):
		return base.ConfigError("Momentum is %v, want a number in [0, 1)", c.Momentum)
	case c.Momentum > 0 && c.NoErrorFeedback:
		return base.ConfigError("Momentum is %v, which needs error feedback", c.Momentum)
	case !(c.ClipNorm >= 0) || math.IsInf(c.ClipNorm, 0):
		return base.ConfigError("ClipNorm is %v, want a finite number, not negative", c.ClipNorm)
	case c.Clip >= numClipModes:
		return base.ConfigError("Clip is %d, want ClipLocal or ClipGlobal", c.Clip)
	case c.NonFinite >= numNonFinitePolicies:
		return base.ConfigError("NonFinite is %d, want PassNonFinite, SkipNonFinite or FailNonFinite", c.NonFinite)
	case c.NonFinite != PassNonFinite && c.NoUndo:
		return base.ConfigError("NonFinite is %d with NoUndo, want PassNonFinite", c.NonFinite)
	}
	return c.Schedule.check()
}

// Plain reports whether a dense allreduce of the gradient does it. What was chosen for [Auto] is never plain: a step
// of any other pattern is a transaction.
func (c *Settings) Plain() bool {
	return c.lossless() && !c.chosen && c.ClipNorm == 0 && c.NonFinite == PassNonFinite
}

// lossless reports whether a step that sends anything sends everything.
func (c *Config) lossless() bool { return c.Pattern == Dense && c.Values == F32 && c.Momentum == 0 }

// keeps reports whether there is a residual. What was chosen for Auto has one:
// with dense steps it is zero unless the schedule pauses.
func (c *Settings) keeps() bool {
	return c.Momentum > 0 || c.Values != F32 || c.chosen || c.Pattern != Dense && c.Pattern != Auto
}

// Defers reports whether a step may leave something in the residual, for later steps to send.
func (c *Settings) Defers() bool { return c.keeps() && (!c.lossless() || c.pauses()) }

// pauses reports whether the schedule has epochs of density 0 that a dense step is to follow: gradients add up in
// the residual then. The dense pattern of a program ignores densities.
func (c *Settings) pauses() bool {
	return c.chosen && !c.NoErrorFeedback && slices.Contains(c.Schedule.Densities, 0)
}

// codec is that of Values.
func (c *Config) codec() kernel.Codec { return codecs[c.Values] }

func (s *Schedule) check() error {
	if s.WarmupSteps < 0 {
		return base.ConfigError("Schedule.WarmupSteps is %d, want at least 0", s.WarmupSteps)
	}
	for i, d := range s.Densities {
		if !(d >= 0 && d <= 1) {
			return base.ConfigError("Schedule.Densities[%d] is %v, want a share in [0, 1]", i, d)
		}
	}
	if s.StepsPerEpoch < 0 || len(s.Densities) > 0 && s.StepsPerEpoch == 0 {
		return base.ConfigError("Schedule.StepsPerEpoch is %d, want at least 1", s.StepsPerEpoch)
	}
	return nil
}

// Selector selects the entries that a rank sends, in the place of a pattern's own selection
// ([Config].Selector): by work that is submitted to the runtime of the [Selection]'s tensors. Residual,
// momentum, exchange, and the rollback of a step that fails are those of the pattern.
//
// A step that was rolled back is made again with the same Step, and one that follows a restored state
// too: so a Selector keeps nothing of its own between steps. Where there are several tensors, as the
// buckets of package ddp are, it selects from one at a time, perhaps on another goroutine.
type Selector interface {
	// Select writes which entries are sent. Its error is one of the step.
	Select(s Selection) error
	// String names the Selector and its settings: the ranks compare it before the first step, and
	// [Reducer.Restore] compares it with that of the state.
	String() string
}

// Selection is what a [Selector] selects from, and what it writes.
type Selection struct {
	Step    int             // number of the step, from 0
	From    *runtime.Tensor // n F32: gradient + residual, not to be written
	Indices *runtime.Tensor // k I32: the numbers of k entries, in strictly ascending order
	Values  *runtime.Tensor // k F32: these entries
}
