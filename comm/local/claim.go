package local

import "sync/atomic"

// claim says which chunks of the running collective nobody has taken: those
// numbered from low to high-1. It holds the low 32 bits of the collective's
// sequence number (so that a stale claim cannot succeed), low and high in one
// word.
type claim struct{ word atomic.Uint64 }

// offer makes chunks 0 to n-1 of a collective available.
func (c *claim) offer(seq uint64, n int) {
	c.word.Store(seq<<32 | uint64(n))
}

// available reports whether there are chunks to take.
func (c *claim) available() bool {
	v := c.word.Load()
	return uint16(v>>16) < uint16(v)
}

// take claims a chunk; seq is the low 32 bits of the collective's number. Even
// ranks take chunks from the low end and odd ranks from the high end, so that a
// rank mostly works on the same part of a buffer that it sees again and again, and
// may still have it in its cache.
func (c *claim) take(rank int) (seq uint64, chunk int, ok bool) {
	for {
		v := c.word.Load()
		low := uint16(v >> 16)
		high := uint16(v)
		if low >= high {
			return 0, 0, false
		}
		chunk := int(low)
		next := v + 1<<16
		if rank%2 != 0 {
			chunk = int(high) - 1
			next = v - 1
		}
		if c.word.CompareAndSwap(v, next) {
			return v >> 32, chunk, true
		}
	}
}
