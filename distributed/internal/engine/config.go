package engine

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"strings"

	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Config says how a [Reducer] reduces a gradient, field by field as sparse.Config does, which documents them.
// A [Settings] has the defaults.
type Config struct {
	Pattern         string          // the name of the pattern; "": dense
	Values          string          // the codec
	Density         float64         // share of the entries that are selected, in (0, 1]
	Selector        Selector        // nil: the pattern's own
	NoErrorFeedback bool            // residuals are discarded
	Momentum        float64         // 0: none
	ClipNorm        float64         // 0: none
	ClipGlobal      bool            // ClipNorm is of the root mean square over the ranks
	NoUndo          bool            // steps cannot be rolled back, which saves memory
	NonFinite       NonFinitePolicy // policy for a gradient that is not finite
	Schedule        Schedule        // of the density
}

// NonFinitePolicy is the treatment of a step in which a rank's gradient is not finite.
type NonFinitePolicy uint8

const (
	// nonFiniteUnset is the default, which follows from the other fields.
	nonFiniteUnset NonFinitePolicy = iota
	PassNonFinite                  // it is a step like any other
	SkipNonFinite                  // the step is rolled back on every rank
	FailNonFinite                  // the step fails with ErrNonFinite on every rank
	numNonFinitePolicies
)

// ErrNonFinite means that a gradient is not finite, with [FailNonFinite].
var ErrNonFinite = errors.New("gradient is not finite")

// Schedule varies the density over the steps. Like [Selector], it is an alias, so that its type is the type of package
// sparse.
type Schedule = struct {
	WarmupSteps   int       // dense steps at the start
	Densities     []float64 // of the epochs that follow them
	StepsPerEpoch int       // length of an epoch of Densities, in steps
}

// Selector selects the entries that a rank sends, instead of the pattern's own selector.
type Selector = interface {
	// Select writes the entries to send.
	Select(step int, sum, indices, values *runtime.Tensor) error
	// String names the Selector and its settings; the ranks compare it.
	String() string
}

// density returns the density of a step, and whether the schedule makes it dense.
func (c *Config) density(step int) (density float64, dense bool) {
	s := &c.Schedule
	switch {
	case c.scheduleIsOver(step):
		return c.Density, false
	case step < s.WarmupSteps:
		return 1, true
	}
	return s.Densities[(step-s.WarmupSteps)/s.StepsPerEpoch], false
}

// scheduleIsOver reports whether a step is after the end of the schedule.
func (c *Config) scheduleIsOver(step int) bool {
	s := &c.Schedule
	step -= s.WarmupSteps
	return step >= 0 && (len(s.Densities) == 0 || step/s.StepsPerEpoch >= len(s.Densities))
}

// Settings are a configuration with the defaults of unset fields.
type Settings struct {
	Config
	chosen bool          // Pattern was measured for Auto; false: it is the program's
	tuning tuning.Tuning // constants of the algorithms
}

// Settings returns c with the defaults of unset fields, or the error of a field that is out of range.
func (c Config) Settings() (Settings, error) {
	c.Pattern = cmp.Or(c.Pattern, sparsity.Dense)
	c.Values = cmp.Or(c.Values, sparsity.F32)
	if c.NonFinite == nonFiniteUnset {
		c.NonFinite = SkipNonFinite
		if c.NoUndo || c.Pattern == sparsity.Dense && c.Values == sparsity.F32 {
			c.NonFinite = PassNonFinite
		}
	}
	if err := c.check(); err != nil {
		return Settings{}, err
	}
	c.Schedule.Densities = slices.Clone(c.Schedule.Densities)
	return Settings{Config: c, tuning: tuning.Current()}, nil
}

// Choose returns c with another pattern. If c leaves its pattern to [Auto], the policies stay those of c: they were
// resolved before the pattern is replaced, so that a step is rolled back, skipped and kept in a residual alike,
// whatever was measured.
func (c Settings) Choose(pattern string) (Settings, error) {
	c.chosen = c.chosen || c.Pattern == sparsity.Auto && pattern != sparsity.Auto
	c.Pattern = pattern
	return c, c.check()
}

// check returns the error of a field that is out of range.
func (c *Config) check() error {
	patterns := sparsity.Patterns()
	_, values := codecs[c.Values]
	switch {
	case !slices.Contains(patterns, c.Pattern) && c.Pattern != sparsity.Auto:
		return base.ConfigError("unknown pattern %q (want %s or one of %s)",
			c.Pattern, sparsity.Auto, strings.Join(patterns, ", "))
	case c.Pattern != sparsity.Dense && !(c.Density > 0 && c.Density <= 1):
		return base.ConfigError("Density is %v, want a share in (0, 1]", c.Density)
	case !values:
		return base.ConfigError("unknown values %q (want one of %s)", c.Values, strings.Join(sparsity.Values(), ", "))
	case c.Selector != nil && (c.Pattern == sparsity.Dense || c.Pattern == sparsity.Auto):
		return base.ConfigError("Selector with pattern %s, which may send everything", c.Pattern)
	case !(c.Momentum >= 0 && c.Momentum < 1):
		return base.ConfigError("Momentum is %v, want a number in [0, 1)", c.Momentum)
	case c.Momentum > 0 && c.NoErrorFeedback:
		return base.ConfigError("Momentum is %v, which needs error feedback", c.Momentum)
	case !(c.ClipNorm >= 0) || math.IsInf(c.ClipNorm, 0):
		return base.ConfigError("ClipNorm is %v, want a finite number, not negative", c.ClipNorm)
	case c.NonFinite >= numNonFinitePolicies:
		return base.ConfigError("NonFinite is %d, want PassNonFinite, SkipNonFinite or FailNonFinite", c.NonFinite)
	case c.NonFinite != PassNonFinite && c.NoUndo:
		return base.ConfigError("NonFinite is %d with NoUndo, want PassNonFinite", c.NonFinite)
	}
	return checkSchedule(&c.Schedule)
}

// Plain reports whether a dense allreduce of the gradient suffices. A pattern chosen for [Auto] is never plain: a step
// of any other pattern is a transaction.
func (c *Settings) Plain() bool {
	return c.lossless() && !c.chosen && c.ClipNorm == 0 && c.NonFinite == PassNonFinite
}

// lossless reports whether a step sends either everything or nothing.
func (c *Config) lossless() bool {
	return c.Pattern == sparsity.Dense && c.Values == sparsity.F32 && c.Momentum == 0
}

// keeps reports whether there is a residual. A pattern chosen for Auto has one: with dense steps it is zero unless the
// schedule pauses.
func (c *Settings) keeps() bool {
	selects := c.Pattern != sparsity.Dense && c.Pattern != sparsity.Auto
	return c.Momentum > 0 || c.Values != sparsity.F32 || c.chosen || selects
}

// Defers reports whether a step may leave entries in the residual for later steps.
func (c *Settings) Defers() bool {
	return c.keeps() && (!c.lossless() || c.pauses())
}

// pauses reports whether the schedule has epochs of density 0 before a dense step: gradients then add up in the
// residual. The dense pattern of a program ignores densities.
func (c *Settings) pauses() bool {
	return c.chosen && !c.NoErrorFeedback && slices.Contains(c.Schedule.Densities, 0)
}

// codec returns the codec of Values.
func (c *Config) codec() kernel.Codec {
	return codecs[c.Values]
}

func checkSchedule(s *Schedule) error {
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
