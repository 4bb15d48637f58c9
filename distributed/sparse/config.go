package sparse

import (
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/runtime"
)

// Config says how a [Reducer] reduces a gradient. The zero value of each field
// but Density is its default. All ranks use the same values.
type Config struct {
	// Pattern is [Dense] unless set, or another pattern, or [Auto]. What a rank selects follows from what it has, so
	// that results depend on the number of ranks, with all but the dense one (ddp.Config.Reproducible).
	Pattern string
	// Values is the codec of the values that travel, F32 unless set. What rounding loses stays in
	// the residual of the rank that has rounded, so it is sent in later steps, and so the dense pattern has
	// a residual as well unless Values is F32. A sum that is rounded again before all ranks get it leaves what that
	// loses with the rank that made it. With NoErrorFeedback it is forgotten. Where dense steps
	// precede sparse ones ([Schedule]), their values are rounded, too. A rank rounds what it has, so that results depend
	// on the number of ranks with all but F32.
	Values string
	// Density is the share of a rank's entries that it selects per step, in
	// (0, 1]: k = Density * n, rounded, at least 1. The dense pattern ignores
	// it.
	Density float64
	// Selector, if set, selects the entries instead of the pattern's own selection, and the
	// pattern says how they are combined. It excludes the dense pattern and [Auto].
	Selector Selector
	// NoErrorFeedback discards the residual, instead of adding it to the
	// next step's gradient. It is there for comparison: training with it off
	// usually converges worse. It excludes Momentum.
	NoErrorFeedback bool

	// Momentum, in (0, 1), is momentum correction (Lin et al., "Deep Gradient
	// Compression", ICLR 2018, section 3.2): each rank keeps a velocity v = Momentum*v
	// + gradient, and that is reduced in place of the gradient; what a rank selects
	// becomes 0 in its velocity (momentum factor masking, section 3.3). So entries that are sent
	// late carry the momentum of the time when they arose, and the optimizer is plain
	// SGD, without momentum. Dense steps are ordinary momentum. It takes
	// as much memory as the residual, and excludes NoErrorFeedback.
	Momentum float64

	// ClipNorm bounds the L2 norm of the gradient before it is added to the residual; 0 does not clip, and neither
	// does a norm that is not finite. Each rank's gradient is scaled to at most ClipNorm/sqrt(P), as in Deep Gradient
	// Compression (Lin et al., ICLR 2018, section 3.2): if the ranks' gradients are independent, their sum has at most
	// norm ClipNorm.
	ClipNorm float64
	// ClipGlobal scales all ranks' gradients by one factor instead, so that the root mean square of their norms is at
	// most ClipNorm. The norm of the averaged gradient is never larger than that. It costs an allreduce of one number.
	ClipGlobal bool

	// NoUndo saves memory, 4 bytes per element (for the dense pattern, the size of
	// the gradient). Without it a step is a transaction, which can be repeated after
	// an error (see [Reducer.AllReduce]) and skipped if a gradient is not finite; with it, an
	// error of a step stays. It excludes any NonFinite but [PassNonFinite].
	NoUndo bool
	// NonFinite says what becomes of a step in which a rank's gradient is not
	// finite. Unless set it is [SkipNonFinite], also for [Auto] whatever it chooses, but
	// [PassNonFinite] with NoUndo, which allows no other, and for the dense pattern in F32,
	// which keeps nothing that such a gradient could spoil.
	NonFinite NonFinitePolicy

	// Schedule varies the density over the steps.
	Schedule Schedule
}

// NonFinitePolicy says what becomes of a step whose result has, or may have from
// additions of that size (from the largest F32 divided by P), an entry that is
// not finite. As every rank's result is made of the same entries, all ranks find
// the same. An average that is too large for F16 or BF16, but not for F32, is
// finite: the result is the largest number of that type, and the residual keeps
// the difference.
type NonFinitePolicy = engine.NonFinitePolicy

const (
	// PassNonFinite passes NaN and infinities on, as a dense allreduce does.
	PassNonFinite NonFinitePolicy = engine.PassNonFinite
	// SkipNonFinite rolls the step back on every rank: the gradients are not added,
	// residuals and thresholds are as before, bit for bit, the result is zero, and
	// [Stats] has Skipped set. It costs no message, and where the host has not
	// waited for the device in the step, no wait. In an epoch of density 0, which
	// sends nothing, a rank drops its own gradient where a later step could not send
	// what it adds up to; where [Config].ClipGlobal has found that a gradient is not finite, all
	// ranks skip the step. Gradients just below that size can leave more than that in a
	// residual: with [Config].Momentum, or where sums of ranks come back to one. Then all
	// later steps are skipped, until [Reducer.ScaleResidual] has made it smaller.
	SkipNonFinite NonFinitePolicy = engine.SkipNonFinite
	// FailNonFinite is [ErrNonFinite] on every rank, and as after any error nothing
	// has happened. The host waits for the device in every step. In an epoch of density
	// 0 it is SkipNonFinite.
	FailNonFinite NonFinitePolicy = engine.FailNonFinite
)

// ErrNonFinite means that a gradient is not finite; see [FailNonFinite].
var ErrNonFinite = engine.ErrNonFinite

// Schedule varies the density over the steps. The zero value does not.
type Schedule = struct {
	// WarmupSteps steps at the start are dense.
	WarmupSteps int
	// Densities are the densities of the epochs after the warm-up, in [0, 1];
	// later epochs use Config.Density. In an epoch of density 0 nothing is
	// sent: gradients add up in the residuals and results are 0. The exponential warm-up of Deep Gradient
	// Compression (Lin et al., ICLR 2018, section 3.3) is 0.25, 0.0625, 0.015625, 0.004, 0.001.
	Densities []float64
	// StepsPerEpoch is the length of an epoch of Densities, in steps.
	StepsPerEpoch int
}

// Selector selects the entries that a rank sends, instead of a pattern's own selection ([Config].Selector).
// Residual, momentum, exchange, and the rollback of a step that fails are those of the pattern.
//
// A step that was rolled back is made again with the same number, and one that follows a restored state too: so a
// Selector keeps no state between steps. Where there are several tensors, as the buckets of package ddp are, it selects
// from one at a time, perhaps on another goroutine.
type Selector = interface {
	// Select selects k entries of sum, n F32 of gradient + residual, in a step, counted from 0. It writes their numbers
	// to indices, k I32 in strictly ascending order, and the entries to values, k F32, by work that is submitted to the
	// runtime of these tensors; sum is not to be written. Its error is one of the step.
	Select(step int, sum, indices, values *runtime.Tensor) error
	// String names the Selector and its settings: the ranks compare it before the first step, and
	// [Reducer.Restore] compares it with the state's.
	String() string
}
