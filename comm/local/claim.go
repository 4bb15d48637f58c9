package local

import "sync/atomic"

// claim says which chunks of the running collective nobody has taken: those numbered from low to high-1. One word
// holds the low byte of the collective's number, which tells slots of the ring apart, low and high.
//
// To take a chunk is one addition. Where ranks compare and swap the word, all but one of those that come at the same
// time fail and fetch its line again. Ranks that find no chunk leave low or high beyond the other: both
// begin far enough from the ends of their fields for one addition by each goroutine.
type claim struct{ word atomic.Uint64 }

const (
	boundBits  = 28
	boundMask  = 1<<boundBits - 1
	firstChunk = 1 << (boundBits - 1)
)

// offer makes chunks 0 to n-1 of a collective available.
func (c *claim) offer(seq uint64, n int) {
	c.word.Store(seq<<(2*boundBits) | firstChunk<<boundBits | uint64(firstChunk+n))
}

// available reports whether there are chunks to take.
func (c *claim) available() bool {
	v := c.word.Load()
	return v>>boundBits&boundMask < v&boundMask
}

// take claims a chunk, and returns the low byte of the collective's number. It is called when a chunk was
// available. Even ranks take chunks from the low end and odd ranks from the high end, so that a
// rank mostly works on the same part of a buffer that it sees again and again, and
// may still have it in its cache.
func (c *claim) take(rank int) (seq uint64, chunk int, ok bool) {
	if rank%2 == 0 {
		v := c.word.Add(1 << boundBits)
		low := v>>boundBits&boundMask - 1
		return v >> (2 * boundBits), int(low) - firstChunk, low < v&boundMask
	}
	v := c.word.Add(^uint64(0)) // one less
	high := v & boundMask
	return v >> (2 * boundBits), int(high) - firstChunk, v>>boundBits&boundMask <= high
}
