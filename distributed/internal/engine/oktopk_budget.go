package engine

import "math"

// A budget is counted in elements, two for an entry, so that it is 6k(P-1)/P regardless of the size of an entry in
// bytes.

// budget returns the volume of oktopk per rank and step: 6k(P-1)/P elements.
func budget(k, size int) int {
	return 6 * k * (size - 1) / size
}

// unit is the number of elements of a word, 1 if an entry is two words.
type unit float64

// elements returns the number of elements of words.
func (u unit) elements(words int) int {
	return int(math.Ceil(float64(u) * float64(words)))
}

// overhead returns the number of elements that a rank sends in a step in addition to entries.
func (u unit) overhead(size int, rebalance, estimate bool) int {
	peers := size - 1
	sum := 2 * peers // lengths: alltoall, allgather
	if rebalance {
		sum += sampleCount * peers
	}
	if estimate {
		sum += bisectRounds * ((2*bisectFan*peers + size - 1) / size)
	}
	return u.elements(sum)
}

// reestimate returns the overhead of an unplanned estimate, in which lengths are exchanged once more.
func (u unit) reestimate(size int) int {
	return u.overhead(size, false, true) - u.overhead(size, false, false) + u.elements(size-1)
}

// roomy reports whether the budget suits k: the overhead takes less than half of it and, among four or more ranks,
// every result has room for k entries, as with gtopk, which serves k otherwise.
func (u unit) roomy(k, size int) bool {
	overhead := u.overhead(size, true, false)
	remaining := newLimits(k, size, overhead).spend(u.reestimate(size))
	return 2*(overhead+u.reestimate(size)) < budget(k, size) && (size <= 3 || remaining.global == k)
}

// limits are the shares of a step's budget.
type limits struct {
	outgoing  int // entries that a rank sends to others in the reduction
	message   int // of them to one rank, if messages are padded
	global    int // entries of the result
	allgather int // elements for spreading and gathering them
}

func newLimits(k, size, overhead int) limits {
	b := budget(k, size) - overhead
	s := b / 6
	// With one other rank there is room for everything that may be sent; with several, for 1.4 times an equal share.
	return limits{
		outgoing:  s,
		message:   min(s, 7*s/(5*max(size-1, 1))),
		global:    min(k, (b-2*s)/2),
		allgather: b - 2*s,
	}
}

// spend returns the budget that remains after elements are sent for another purpose. (At most half of a budget is
// overhead, and a third was sent: a sixth remains.)
func (l limits) spend(elements int) limits {
	l.allgather -= elements
	l.global = min(l.global, l.allgather/2)
	return l
}

// leaving gives padded messages everything that each rank's share of the result leaves, so that few selected entries
// have to be cut.
func (l limits) leaving(quota, size int, u unit) limits {
	peers := size - 1
	lengths := u.elements(2 * headerWords) // lengths before messages
	l.message = (l.allgather + 2*l.outgoing - (2*quota+lengths)*peers) / (2 * peers) &^ 1
	l.outgoing = l.message * peers
	l.allgather = 2 * quota * peers
	l.global = min(l.global, l.allgather/2)
	return l
}

// quota returns the number of sums that every rank may add to the result, if none has more: 1.5 times an equal share
// of k. Up to 1.25k sums reach a threshold that is kept, and balanced partitions are not quite equal.
func (l limits) quota(k, size int) int {
	return min(3*k/(2*size), l.allgather/(2*(size-1))) &^ 1 // even, so that messages are aligned
}

const (
	// sampleCount is the number of selected entries that a rank sends to balance partitions.
	sampleCount = 4
	// bisectFan thresholds are tried in each of bisectRounds rounds, which reduces 31 bits of magnitude to an interval
	// of 2^11 float32 numbers: the estimated threshold is exact to a relative 2^-12.
	bisectFan    = 15
	bisectRounds = 5
)
