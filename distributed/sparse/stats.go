package sparse

import "time"

// Stats tells what the last step of a [Reducer] did on this rank.
type Stats struct {
	Step int // number of the step, from 0
	// Pattern is the pattern that ran: the configured one, "dense" in the warm-up, or the one that oktopk uses if it is no
	// better itself: dense, topkA2 or gtopk. It is empty at density 0.
	Pattern  string
	Dense    bool // a step of the dense pattern, or of the warm-up
	Skipped  bool // the step was rolled back by [SkipNonFinite]
	Elements int  // length of the tensor
	K        int  // entries that a rank was to select: the density's share of Elements, rounded
	// SelectedLocal is how many entries this rank selected. With [Chunked] that is K's share of each chunk, rounded,
	// also of a short last one.
	SelectedLocal int
	// SelectedGlobal is the number of entries in the result or, if an exchange gathers the ranks' lists without merging
	// them first, the sum of the lists' lengths.
	SelectedGlobal int
	// Threshold is the magnitude that the selected entries have at least, GlobalThreshold (oktopk) the magnitude of the
	// sums that went into the result. They may be NaN or infinite with [PassNonFinite], which JSON has no notation for.
	Threshold, GlobalThreshold float32
	// SentElements and SentBytes are what this rank sent as package metered counts: a value and an index are one element
	// each, an allgather counts what the rank receives. The traffic of [Auto]'s choice is not counted.
	SentElements, SentBytes int64
	// SelectTime is the host's time for adding the gradient to the residual
	// and selecting, ExchangeTime for everything after. On a device with streams
	// the host runs ahead, and each may contain the device's work of the other.
	SelectTime, ExchangeTime time.Duration
	// Chosen is the pattern that was chosen for [Auto], empty for another pattern.
	Chosen string
}
