package outer

import (
	"cmp"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/sparse"
)

// Config says how a [Loop] averages. All ranks use the same.
type Config struct {
	// Every is H, the steps of a window. Those of DiLoCo are 50 to 500, and of SparseLoCo 15 to
	// 50; fewer where the ranks' data differ much.
	Every int
	// Schedule, if set, returns the steps of the window of each round, from 0 on, instead
	// of Every. It is a function of the round alone.
	Schedule func(round int) int

	// Reduce is how outer gradients are averaged: densely unless set. They are F32, whatever
	// the parameters are. NonFinite is [sparse.SkipNonFinite] unless set. Sum,
	// BucketViews, Uneven and Weighted have no meaning here. With NoUndo, and
	// densely with PassNonFinite, an exchange that fails is not repeated by the same call. Reproducible
	// is how many ranks there are at most: each contributes one outer gradient to a round, and averages are over
	// the ranks, with the same bits in whatever order they come. ClipNorm bounds the norm of the average then, and
	// weights are whole numbers of at most 2^24.
	Reduce ddp.Config
	// Decay, in (0, 1], multiplies the residual after each round: 1 unless set. SparseLoCo has
	// 0.95.
	Decay float64
	// Weighted has a rank count with the steps that it has made since its last exchange, or
	// what it passes to [Loop.Weigh]. It costs an allreduce of one number a round.
	Weighted bool

	// LearningRate of the outer optimizer: 1 unless set.
	LearningRate float64
	// Momentum of the outer optimizer, in [0, 1): 0.9 in DiLoCo.
	Momentum float64
	// Nesterov: the momentum is Nesterov's.
	Nesterov bool

	// Fragments is into how many parts of about equal length the parameters are cut, between
	// rows of them, which take turns within a window: 1 unless set.
	Fragments int
	// Delay is how many steps after it was sent a fragment arrives: 0 unless set, with which
	// Step waits for the exchange. Otherwise the exchange goes on behind the steps between. It
	// is at most the number of steps from one fragment to the next. It excludes
	// NoUndo and PassNonFinite in Reduce, with which an exchange may not be rolled back: what was sent is not
	// computed again.
	Delay int
	// Mix, in [0, 1), is the share of a rank's own parameters where a fragment arrives: they
	// become Mix · own + (1 − Mix) · common. 0 means 0.5 with a Delay, as in Streaming DiLoCo, and
	// no share without. With a Delay and [NoMix] the rank loses the steps that it has made since the
	// fragment was sent.
	Mix float64
}

// NoMix, for [Config.Mix], has a fragment that arrives replace the rank's own parameters, also with a Delay.
const NoMix = -1

// delayedMix is the share of a rank's own parameters where a delayed fragment arrives, as in Streaming DiLoCo
// (Douillard et al., 2025).
const delayedMix = 0.5

// withDefaults returns c with the defaults of what is not set.
func (c Config) withDefaults() (Config, error) {
	c.Fragments = cmp.Or(c.Fragments, 1)
	c.LearningRate = cmp.Or(c.LearningRate, 1)
	c.Decay = cmp.Or(c.Decay, 1)
	switch {
	case c.Mix == NoMix:
		c.Mix = 0
	case c.Mix == 0 && c.Delay > 0:
		c.Mix = delayedMix
	}
	switch share := func(x float64) bool { return x >= 0 && x < 1 }; {
	case c.Fragments < 1:
		return c, base.ConfigError("Fragments is %d, want at least 1", c.Fragments)
	case !(c.LearningRate > 0) || math.IsInf(c.LearningRate, 1):
		return c, base.ConfigError("LearningRate is %v, want a finite number above 0", c.LearningRate)
	case !share(c.Momentum):
		return c, base.ConfigError("Momentum is %v, want [0, 1)", c.Momentum)
	case !share(c.Mix):
		return c, base.ConfigError("Mix is %v, want [0, 1), or NoMix", c.Mix)
	case !(c.Decay > 0 && c.Decay <= 1):
		return c, base.ConfigError("Decay is %v, want (0, 1]", c.Decay)
	case c.Delay < 0:
		return c, base.ConfigError("Delay is %d, want at least 0", c.Delay)
	case c.Reduce.Sum || c.Reduce.BucketViews || c.Reduce.Uneven || c.Reduce.Weighted:
		return c, base.ConfigError("Reduce has Sum, BucketViews, Uneven or Weighted")
	case c.Delay > 0 && (c.Reduce.NoUndo || c.Reduce.NonFinite == sparse.PassNonFinite):
		return c, base.ConfigError("Delay is %d and Reduce has NoUndo or PassNonFinite, so a failed exchange "+
			"would lose the deltas that are averaged again", c.Delay)
	}
	c.Reduce.Weighted = c.Reduce.Reproducible != 0 // averages are over the ranks that there are
	if c.Reduce.NonFinite == 0 && !c.Reduce.NoUndo {
		c.Reduce.NonFinite = sparse.SkipNonFinite
	}
	_, err := c.window(0)
	return c, err
}

// window returns the steps of a round's window.
func (c *Config) window(round int) (int, error) {
	steps := c.Every
	if c.Schedule != nil {
		steps = c.Schedule(round)
	}
	if !c.fits(steps) {
		return 0, base.ConfigError("the window of round %d has %d steps, which are %d from each of %d fragments "+
			"to the next; "+
			"want at least 1, no fewer than Delay (%d), and %d steps at most",
			round, steps, steps/c.Fragments, c.Fragments, c.Delay, longestWindow)
	}
	return steps, nil
}

// longestWindow bounds the steps of a window.
const longestWindow = math.MaxInt32

// fits reports whether a window may have so many steps: each fragment is sent in it, and arrives before the next one.
func (c *Config) fits(steps int) bool {
	return steps/c.Fragments >= max(1, c.Delay) && steps <= longestWindow
}

// terms is what the ranks compare.
func (c *Config) terms() string {
	return fmt.Sprintf("version %s\nouter rate %v, momentum %v, nesterov %v, decay %v, weighted %v\n"+
		"%d fragments, delay %d, mix %v",
		base.Version(), c.LearningRate, c.Momentum, c.Nesterov, c.Decay, c.Weighted, c.Fragments, c.Delay, c.Mix)
}
