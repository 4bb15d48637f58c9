package local

import (
	"runtime"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
)

// ringSize is how many collectives a rank may be ahead of the slowest one
// before its calls are queued. It is a power of two.
const ringSize = 64

// abandoned is what slot.missing holds when all ranks came but the world was
// broken by then.
const abandoned = -1

// cacheLine separates what different cores write. Processors fetch lines in
// pairs.
type cacheLine [128]byte

// world is the state that the ranks of one communicator share.
type world struct {
	size    int
	options options
	workers int  // ranks that can work at the same time
	spins   bool // waiting ranks spin: each has a processor
	ranks   []*endpoint
	slots   [ringSize]slot
	boxes   []mailbox

	_ cacheLine
	// front is what waiting ranks look at.
	front struct {
		completed atomic.Uint64 // number of collectives that are done
		claim     claim         // chunks of the running one
		jobs      atomic.Int32  // messages with chunks to copy
	}
	_ cacheLine
	// Rarely written, often read.
	failure  atomic.Pointer[failure]
	left     atomic.Int32 // ranks that closed their communicator
	sleepers atomic.Int32 // waiters in the lot
	stalled  atomic.Int32 // endpoints whose backlog waits for a collective
	_        cacheLine
	copying  atomic.Int32 // messages being copied
	jobs     jobList
	lot      lot
	agreeing []comm.Call // by rank, of the collective that is about to start
}

// slot is one collective of the ring.
type slot struct {
	// missing counts the ranks that have not arrived, plus one until the
	// preceding collective is done. It is 0 while the collective runs.
	missing atomic.Int32
	left    atomic.Int32 // chunks that are not done
	plan    plan
	calls   []entry // by rank
	extras  []extra // by rank
	_       cacheLine
}

func newWorld(size int, spins bool, o options) *world {
	w := &world{
		size:    size,
		options: o,
		spins:   spins,
		workers: min(size, runtime.GOMAXPROCS(0)),
		ranks:   make([]*endpoint, size),
		boxes:   make([]mailbox, size),

		agreeing: make([]comm.Call, size),
	}
	calls := make([]entry, ringSize*size)
	extras := make([]extra, ringSize*size)
	for i := range w.slots {
		s := &w.slots[i]
		s.calls, calls = calls[:size:size], calls[size:]
		s.extras, extras = extras[:size:size], extras[size:]
		s.missing.Store(int32(size) + 1)
	}
	w.slots[0].missing.Store(int32(size)) // nothing precedes it
	for r := range w.ranks {
		w.ranks[r] = newEndpoint(w, r)
	}
	return w
}

func (w *world) slot(seq uint64) *slot { return &w.slots[seq%ringSize] }

// claim says which chunks of the running collective nobody has taken: those
// numbered from low to high-1. It holds the low 32 bits of the collective's
// sequence number (so that a stale claim cannot succeed), low and high in one
// word.
type claim struct{ word atomic.Uint64 }

// offer makes chunks 0 to n-1 of a collective available.
func (c *claim) offer(seq uint64, n int) { c.word.Store(seq<<32 | uint64(n)) }

// any reports whether there are chunks to take.
func (c *claim) any() bool {
	v := c.word.Load()
	return uint16(v>>16) < uint16(v)
}

// take claims a chunk. Even ranks take them from the low end and odd ranks
// from the high end, so that a rank mostly works on the same part of a buffer
// that it sees again and again, and may still have it in its cache.
func (c *claim) take(rank int) (slot, chunk int, ok bool) {
	for {
		v := c.word.Load()
		low, high := uint16(v>>16), uint16(v)
		if low >= high {
			return 0, 0, false
		}
		chunk, next := int(low), v+1<<16
		if rank%2 != 0 {
			chunk, next = int(high)-1, v-1
		}
		if c.word.CompareAndSwap(v, next) {
			return int(v >> 32 % ringSize), chunk, true
		}
	}
}

// help does one piece of work that is waiting for somebody, if there is any.
func (e *endpoint) help() bool {
	w := e.world
	if w.front.claim.any() {
		if i, chunk, ok := w.front.claim.take(e.rank); ok {
			e.helpCollective(&w.slots[i], chunk)
			return true
		}
	}
	return w.front.jobs.Load() > 0 && e.helpMessage()
}

func (e *endpoint) helpCollective(s *slot, chunk int) {
	scratch := e.takeScratch()
	s.execute(chunk, scratch)
	e.returnScratch(scratch)
	if s.left.Add(-1) == 0 {
		d := driver{endpoint: e}
		d.finish(e.world.front.completed.Load(), s)
		d.run()
	}
}
