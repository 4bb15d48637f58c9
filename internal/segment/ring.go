package segment

import (
	"fmt"
	"sync/atomic"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// Ring carries bytes in order from one process, the writer, to another one, the reader. Each of them has a Ring over
// the same memory. One goroutine may use a Ring at a time.
//
// The counts of bytes written and read are in the segment, for the other side. Each side trusts its own copy of its
// count, and checks the other's.
type Ring struct {
	data    []byte         // a power of two
	written *atomic.Uint64 // bytes that the writer has published
	read    *atomic.Uint64 // bytes whose room the reader has released
	starved *atomic.Uint32 // not zero: the writer waits for room

	position uint64 // of this side, in bytes since the beginning; not all of it is published
}

// lineBytes separates a ring's counts: no two of them share a pair of cache lines.
const lineBytes = 128

// RingBytes returns the size of a ring with this capacity, a power of two.
func RingBytes(capacity int) int { return 3*lineBytes + capacity }

// NewRing returns one side of a ring whose memory, zero at first, is at an address in a segment.
func NewRing(address uintptr, capacity int) *Ring {
	return &Ring{
		data:    hostmem.Slice[byte](address+3*lineBytes, capacity),
		written: &hostmem.Slice[atomic.Uint64](address, 1)[0],
		read:    &hostmem.Slice[atomic.Uint64](address+lineBytes, 1)[0],
		starved: &hostmem.Slice[atomic.Uint32](address+2*lineBytes, 1)[0],
	}
}

// Room returns the number of bytes that the writer can write.
func (r *Ring) Room() (int, error) {
	inside := r.position - r.read.Load()
	if inside > uint64(len(r.data)) {
		return 0, fmt.Errorf("it has read %d bytes more than it got", -inside)
	}
	return len(r.data) - int(inside), nil
}

// Write writes bytes, for which there must be room. The reader sees them after Publish.
func (r *Ring) Write(b []byte) {
	place := int(r.position) & (len(r.data) - 1)
	n := copy(r.data[place:], b)
	copy(r.data, b[n:])
	r.position += uint64(len(b))
}

// Skip skips bytes, on either side.
func (r *Ring) Skip(n int) {
	r.position += uint64(n)
}

// Publish makes written bytes visible to the reader.
func (r *Ring) Publish() {
	r.written.Store(r.position)
}

// Starve records that the writer waits for room. The writer must check the room once more afterwards.
func (r *Ring) Starve() {
	r.starved.Store(1)
}

// Available returns the number of bytes that the reader can read.
func (r *Ring) Available() (int, error) {
	n := r.written.Load() - r.position
	if n > uint64(len(r.data)) {
		return 0, fmt.Errorf("%d bytes in a ring of %d", n, len(r.data))
	}
	return int(n), nil
}

// Read reads bytes, at most those available.
func (r *Ring) Read(b []byte) {
	place := int(r.position) & (len(r.data) - 1)
	n := copy(b, r.data[place:])
	copy(b[n:], r.data)
	r.position += uint64(len(b))
}

// Release releases the room of the bytes read, and reports whether the writer waits for it.
func (r *Ring) Release() (starved bool) {
	r.read.Store(r.position)
	return r.starved.Load() != 0 && r.starved.Swap(0) != 0
}
