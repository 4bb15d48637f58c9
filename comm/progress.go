package comm

// Progress is how far the operations of one rank have come.
type Progress struct {
	Collectives Count // those that move data, and Barrier and Split
	Messages    Count
}

// Count is the number of operations that a rank has submitted, and the number of these
// that are done, which are the first ones.
type Count struct{ Submitted, Done uint64 }

// Progresser is implemented by communicators that know which of their operations are done
// before a wait returns. A flight recorder (comm/record) shows it.
//
// A decorator that issues calls of its own must also implement Progresser. A zero Progress
// means "unknown".
type Progresser interface {
	// Progress does not wait; at most it asks a device whether that is idle. Every call,
	// Barrier and Split counts once, in the order of submission. An operation is done when
	// this rank may read its result.
	Progress() Progress
}
