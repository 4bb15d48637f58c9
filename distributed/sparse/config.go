package sparse

import (
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/runtime"
)

// Config says how a [Reducer] reduces a gradient. The zero value of each field
// but Density is its default. All ranks use the same values.
type Config struct {
	// Pattern is one of the patterns, [Dense] by default, or [Auto]. A rank selects from its own data, so results depend
	// on the number of ranks with all patterns but the dense one (see ddp.Config.Reproducible).
	Pattern string
	// Values is the codec of the values that are sent, F32 by default. Rounding errors stay in the residual of the rank
	// that rounds, and are sent in later steps. So the dense pattern has a residual as well, unless Values is F32. If a
	// sum is rounded again before all ranks get it, the rank that made the sum keeps that error. NoErrorFeedback discards
	// rounding errors. Dense steps that precede sparse ones ([Schedule]) are rounded, too. A rank rounds its own data, so
	// results depend on the number of ranks with all codecs but F32.
	Values string
	// Density is the share of a rank's entries that it selects per step, in
	// (0, 1]: k = Density * n, rounded, at least 1. The dense pattern ignores
	// it.
	Density float64
	// Selector, if set, selects the entries instead of the pattern's own selection, and the
	// pattern says how they are combined. It excludes the dense pattern and [Auto].
	Selector Selector
	// NoErrorFeedback discards the residual, instead of adding it to the next step's gradient. It is for comparison:
	// training without error feedback usually converges worse. It excludes Momentum.
	NoErrorFeedback bool

	// Momentum, in (0, 1), is momentum correction (Lin et al., "Deep Gradient Compression", ICLR 2018, section 3.2): each
	// rank keeps a velocity v = Momentum*v + gradient, which is reduced instead of the gradient. Selected entries become 0
	// in the rank's velocity (momentum factor masking, section 3.3). So delayed entries carry the momentum of the time
	// when they arose, and the optimizer must be plain SGD, without momentum. Dense steps apply ordinary momentum. The
	// velocity takes as much memory as the residual. Momentum excludes NoErrorFeedback.
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
	// NonFinite is the policy for a step in which a rank's gradient is not finite. The default is [SkipNonFinite], also
	// for [Auto] whatever it chooses. It is [PassNonFinite] with NoUndo, which allows no other policy, and for the dense
	// pattern in F32, which keeps no state that such a gradient could corrupt.
	NonFinite NonFinitePolicy

	// Schedule varies the density over the steps.
	Schedule Schedule
}

// NonFinitePolicy is the policy for a step whose result has a non-finite entry, or may have one because it adds entries
// as large as the largest F32 divided by P. Every rank's result consists of the same entries, so all ranks reach the
// same verdict. An average that is too large for F16 or BF16, but not for F32, is finite: the result is the largest
// number of that type, and the residual keeps the difference.
type NonFinitePolicy = engine.NonFinitePolicy

const (
	// PassNonFinite passes NaN and infinities on, as a dense allreduce does.
	PassNonFinite NonFinitePolicy = engine.PassNonFinite
	// SkipNonFinite rolls the step back on every rank: the gradients are not added, residuals and thresholds are as
	// before, bit for bit, the result is zero, and [Stats] has Skipped set. It costs no message, and adds no wait to a
	// step in which the host does not wait for the device. In an epoch of density 0, which sends nothing, a rank drops its
	// own gradient if a later step could not send the sum. If [Config].ClipGlobal finds a non-finite gradient there, all
	// ranks skip the step. Gradients just below that size can leave more than that in a residual, with [Config].Momentum
	// or where sums of ranks come back to one rank. All later steps are then skipped until [Reducer.ScaleResidual] reduces
	// the residual.
	SkipNonFinite NonFinitePolicy = engine.SkipNonFinite
	// FailNonFinite rolls the step back and returns [ErrNonFinite] on every rank. The host waits for the device in every
	// step. In an epoch of density 0 it is SkipNonFinite.
	FailNonFinite NonFinitePolicy = engine.FailNonFinite
)

// ErrNonFinite means that a gradient is not finite; see [FailNonFinite].
var ErrNonFinite = engine.ErrNonFinite

// Schedule varies the density over the steps. The zero value keeps it constant.
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
// A Selector must keep no state between steps: a step is repeated with the same number after a rollback or a restored
// state. If there are several tensors, such as the buckets of package ddp, it selects from one at a time, perhaps on
// another goroutine.
type Selector = interface {
	// Select selects k entries of sum, n F32 of gradient + residual, in a step, counted from 0. It submits work to the
	// tensors' runtime that writes the entries' positions to indices, k I32 in strictly ascending order, and the entries
	// to values, k F32. It must not write sum. Its error fails the step.
	Select(step int, sum, indices, values *runtime.Tensor) error
	// String names the Selector and its settings: the ranks compare it before the first step, and
	// [Reducer.Restore] compares it with the state's.
	String() string
}
