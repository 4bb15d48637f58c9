package outer

import (
	"cmp"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/sparse"
)

// Config configures a [Loop]. All ranks use the same configuration.
type Config struct {
	// Every is H, the number of steps in a window. DiLoCo uses 50 to 500 steps, and SparseLoCo 15 to 50. Use fewer if the
	// ranks' data differ much.
	Every int

	// Reduce configures the averaging of outer gradients, dense by default. They are F32, whatever the type of the
	// parameters. NonFinite is [sparse.SkipNonFinite] unless set. Sum, BucketViews, Uneven and Weighted have no meaning
	// here. With NoUndo, and with a dense pattern and PassNonFinite, the same call does not repeat a failed exchange.
	// Reproducible is the maximum number of ranks. Each contributes one outer gradient to a round, and averages over the
	// ranks have the same bits in any order. ClipNorm then bounds the norm of the average, and weights are whole numbers
	// of at most 2^24.
	Reduce ddp.Config
	// Decay, in (0, 1], multiplies the residual after each round. The default is 1; SparseLoCo uses 0.95.
	Decay float64
	// Weighted weights a rank by the number of steps since its last exchange, or by the weights that it passes to
	// [Loop.Weigh]. It costs an allreduce of one number per round.
	Weighted bool

	// LearningRate of the outer optimizer: 1 unless set.
	LearningRate float64
	// Momentum of the outer optimizer, in [0, 1): 0.9 in DiLoCo.
	Momentum float64
	// Nesterov selects Nesterov momentum.
	Nesterov bool

	// Fragments is the number of parts, of about equal length, into which the parameters are cut between rows. Fragments
	// take turns within a window. The default is 1.
	Fragments int
	// Delay is the number of steps from sending a fragment to its arrival. With 0, the default, Step waits for the
	// exchange. Otherwise the exchange is asynchronous to the steps in between. Delay is at most the number of steps from
	// one fragment to the next. It excludes NoUndo and PassNonFinite in Reduce, with which an exchange may not be rolled
	// back: a sent fragment is not computed again.
	Delay int
	// Mix, in [0, 1), is the share of a rank's own parameters when a fragment arrives: they become Mix · own + (1 − Mix) ·
	// common. 0 means 0.5 with a Delay, as in Streaming DiLoCo, and 0 without. With a Delay and [NoMix] the rank loses the
	// steps that it has made since the fragment was sent.
	Mix float64
}

// NoMix, for [Config.Mix], makes an arriving fragment replace the rank's own parameters, also with a Delay.
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
	if !c.fits(c.Every) {
		return c, base.ConfigError("a window has %d steps, which are %d from each of %d fragments to the next; "+
			"want at least 1, no fewer than Delay (%d), and %d steps at most",
			c.Every, c.Every/c.Fragments, c.Fragments, c.Delay, longestWindow)
	}
	return c, nil
}

// longestWindow bounds the steps of a window.
const longestWindow = math.MaxInt32

// fits reports whether a window may have that number of steps: each fragment is sent in it, and arrives before the next
// one.
func (c *Config) fits(steps int) bool {
	return steps/c.Fragments >= max(1, c.Delay) && steps <= longestWindow
}

// terms is what the ranks compare.
func (c *Config) terms() string {
	return fmt.Sprintf("version %s\nouter rate %v, momentum %v, nesterov %v, decay %v, weighted %v\n"+
		"windows of %d, %d fragments, delay %d, mix %v",
		base.Version(), c.LearningRate, c.Momentum, c.Nesterov, c.Decay, c.Weighted,
		c.Every, c.Fragments, c.Delay, c.Mix)
}
