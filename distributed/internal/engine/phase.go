package engine

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// phase is how far a step has come.
type phase uint8

const (
	idle       phase = iota // none was begun
	begun                   // gradient and residual are as before, unless restores says otherwise
	selected                // the selected entries are subtracted from the residual
	exchanged               // the result is submitted
	judged                  // its entries that are not finite are counted
	finished                // the result is written to the gradient: there is no way back
	rolledBack              // gradient and residual are as before
)

// open reports whether a step can be rolled back.
func (p phase) open() bool {
	return begun <= p && p <= judged
}

// restoration is where the residual before a step is.
type restoration uint8

const (
	nothingSaved restoration = iota
	swapped                  // in the origin, which the step reads
	keeping                  // it will be in the origin when the gradient is added
	kept                     // in the origin, from where it is copied back
)

// Input is the gradient of a step that is made in parts.
type Input struct {
	Ptr    uintptr     // the gradient, of the tensor's length
	DType  dtype.DType // of its elements
	Factor uintptr     // of an F32 on the device that multiplies it, 0 for none
	// Share is the address of an F32, Factor divided by the number of ranks, where gradients are weighted: a dense step
	// adds up gradients scaled by it instead of averaging, so that an F16 stays in its range. 0: gradients are averaged.
	Share uintptr
	Lent  bool // Ptr may be read until Select returns, and written by Commit
	// Scratch: the gradient at Ptr may be lost, so that RollBack also takes back a step that is committed.
	Scratch bool
}

// step is what there is of one step. State for later steps is in engine and Reducer.
type step struct {
	phase    phase          // how far the step has come
	gradient Input          // that is reduced, and where the result goes
	selected kernel.Entries // unless it is dense
	addend   Input          // what the exchange adds to the residual
	whole    comm.Call      // if it is
	result   result         // what the exchange has made, from then on
	used     number         // where the threshold is that entries were selected by

	restores   restoration // the step may be rolled back, and how
	hostBefore hostState   // what to restore of the host's

	inFlight   bool    // the compute stream is to wait for what was submitted
	hostWaited bool    // the host has waited for the device
	finding    finding // of the exchange
	flagged    bool    // the exchange has left that in the flags
	deferred   bool    // the device knows whether it was skipped
	chose      bool    // a pattern, for Auto

	stats, last Stats // of the step, and of the one before
	counted     bool  // stats has what is on the device, too
}

// Verdict says what becomes of a step that was started.
type Verdict uint8

const (
	Passes   Verdict = iota // its result becomes the gradient
	Deferred                // it passes, and the device rolls it back if there were non-finite entries
	Skips                   // it is rolled back, and the gradient is zero
)

// finding is what an exchange has found out of its result.
type finding uint8

const (
	unknown finding = iota
	finite
	mayBeNonFinite
)

// found notes what an exchange has found out.
func (s *step) found(large bool) {
	s.finding = finite
	if large {
		s.finding = mayBeNonFinite
	}
}

// result is what an exchange makes, the same on every rank: the sum of lists,
// scaled, or a dense array of F32.
type result struct {
	lists []kernel.Entries // none where dense is not 0
	scale float32          // that sums are multiplied by
	dense uintptr          // n F32, if not 0, to be scaled as well
	left  leftover         // for the residual
	// messages, if there are any, are what the lists are to be made of when it is there.
	messages []uintptr
}

// leftover are selected entries that may not have made it into the result, and what they are in if
// they have. They go back to the residual when the result is written.
type leftover struct{ selected, taken kernel.Entries }

// hostState is what steps leave on the host to later ones.
type hostState struct {
	age             int     // steps since oktopk estimated the threshold of the sums
	steps           int     // that oktopk's exchange made
	globalThreshold float32 // of the sums, as used last; 0 before
	even            bool    // oktopk's messages had about equal lengths
	level           int     // for how many steps partitions had about equally many of the sums that passed
	pending         bool    // the numbers of the last step are not read yet: see okExchange.readPosted
}
