package comm

// Progress is how far the operations of one rank have come.
type Progress struct {
	Collectives Count // those that move data, and Barrier and Split
	Messages    Count
}

// Count is how many operations a rank has submitted, and how many of these, the first
// ones, are done.
type Count struct{ Submitted, Done uint64 }

// Progresser is implemented by communicators that know how far their operations have
// come before anybody waits for them: they write it down where an operation ends. A
// [Recorder] shows it.
//
// A decorator that does calls by itself, or others than it gets, implements it as well:
// the zero Progress is nothing known.
type Progresser interface {
	// Progress does not wait, and asks a device at most whether it is idle. Every call, Barrier and Split counts
	// once, in the order in which they are submitted. What is done is so for this rank,
	// whose results may be read.
	Progress() Progress
}
