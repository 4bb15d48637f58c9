package engine

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// phase is the state of a step.
type phase uint8

const (
	idle       phase = iota // no step was begun
	begun                   // gradient and residual are as before, unless restores says otherwise
	selected                // the selected entries are subtracted from the residual
	exchanged               // the result is submitted
	judged                  // the entries that are not finite are counted
	finished                // the result is written to the gradient and cannot be rolled back
	rolledBack              // gradient and residual are as before
)

// open reports whether a step can be rolled back.
func (p phase) open() bool {
	return begun <= p && p <= judged
}

// restoration says where the residual from before a step is.
type restoration uint8

const (
	nothingSaved restoration = iota
	swapped                  // in the origin, which the step reads
	keeping                  // the kernel that adds the gradient will copy it to the origin
	kept                     // in the origin, from which it is copied back
)

// Input is the gradient of a step in parts.
type Input struct {
	Ptr    uintptr     // the gradient, with the tensor's length
	DType  dtype.DType // of its elements
	Factor uintptr     // address of an F32 factor, 0 for none
	// Share is the address of an F32, Factor divided by the number of ranks, if gradients are weighted: a dense step
	// then adds gradients scaled by it instead of averaging, so that an F16 stays in its range. 0: gradients are
	// averaged.
	Share uintptr
	Lent  bool // Ptr may be read only until Select returns, and written by Commit
	// Scratch means that the gradient at Ptr may be lost, so RollBack can also roll back a committed step.
	Scratch bool
}

// step is the state of one step. State for later steps is in engine and Reducer.
type step struct {
	phase    phase          // how far the step has come
	gradient Input          // the step's input, and the destination of the result
	selected kernel.Entries // unless the step is dense
	addend   Input          // addend of the residual, for the exchange
	whole    comm.Call      // the call of a dense step
	result   result         // made by the exchange
	used     number         // the number with the threshold of the selection

	restores   restoration // whether and how the step can be rolled back
	hostBefore hostState   // the host's state to restore

	inFlight   bool    // the compute stream must wait for submitted communication
	hostWaited bool    // the host has waited for the device
	finding    finding // by the exchange
	flagged    bool    // the exchange has put its finding into the flags
	deferred   bool    // the device knows whether the step was skipped
	chose      bool    // chose a pattern for Auto

	stats, last Stats // of this step, and of the previous one
	counted     bool  // stats includes the device's numbers
}

// Verdict is the outcome of a step that was started.
type Verdict uint8

const (
	Passes   Verdict = iota // its result becomes the gradient
	Deferred                // it passes, and the device rolls it back if there were non-finite entries
	Skips                   // it is rolled back, and the gradient is zero
)

// finding is an exchange's knowledge about entries that are not finite.
type finding uint8

const (
	unknown finding = iota
	finite
	mayBeNonFinite
)

// found records the finding of an exchange.
func (s *step) found(large bool) {
	s.finding = finite
	if large {
		s.finding = mayBeNonFinite
	}
}

// result is the result of an exchange, the same on every rank: the sum of lists, scaled, or a dense array of F32.
type result struct {
	lists []kernel.Entries // none if dense is not 0
	scale float32          // factor of the sums
	dense uintptr          // n F32 to be scaled, if not 0
	left  leftover         // entries for the residual
	// messages, if any, are decoded to the lists after they have arrived.
	messages []uintptr
}

// leftover are selected entries that may not be in the result, and the list that has them if they are. The others are
// restored to the residual when the result is written.
type leftover struct{ selected, taken kernel.Entries }

// hostState is the state that steps leave on the host for later ones.
type hostState struct {
	age             int     // steps since oktopk estimated the threshold of the sums
	steps           int     // steps of oktopk's exchange
	globalThreshold float32 // of the sums, last used; 0 before
	even            bool    // oktopk's messages had similar lengths
	level           int     // consecutive steps in which partitions had about equally many sums that reached the threshold
	pending         bool    // the numbers of the last step are not read yet: see okExchange.readPosted
}
