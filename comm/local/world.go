package local

import (
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/fixedpoint"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/machine"
	"github.com/tutti-go/tutti/internal/queue"
	"github.com/tutti-go/tutti/internal/spans"
	"github.com/tutti-go/tutti/internal/tally"
)

// name is what errors of this package say they come from.
const name = "local"

// ringSize is how many collectives a rank may be ahead of the slowest one
// before its calls are queued. It is a power of two.
const ringSize = 64

// abandoned is what slot.missing holds when all ranks came but the world was
// aborted by then.
const abandoned = -1

// seats says how the ranks of a world share processors.
type seats uint8

const (
	dedicated seats = iota // each rank has a processor
	threaded               // each has one of Go's, but the process has fewer: its affinity mask or quota says so
	shared                 // ranks take turns on Go's
)

// seatsFor returns how that many ranks share the processors of this process.
func seatsFor(ranks int) seats {
	switch {
	case ranks <= machine.Processors():
		return dedicated
	case ranks <= runtime.GOMAXPROCS(0):
		return threaded
	}
	return shared
}

// cacheLine separates what different cores write. Processors fetch lines in
// pairs.
type cacheLine [128]byte

// world is the state that the ranks of one communicator share. Fields without a lock or an atomic type are set before
// the ranks have the world, but for slots, agreeing and ends: these belong to whoever starts a collective, when all
// ranks have come to it. Slots and front come first, at the beginning of cache lines.
type world struct {
	slots [ringSize]slot // by the collective's number modulo ringSize

	// front is what waiting ranks look at.
	front struct {
		completed atomic.Uint64 // number of collectives that are done
		claim     claim         // hands out the chunks of the running one (claim.go)
		jobs      atomic.Int32  // messages with chunks to copy
	}
	_ cacheLine

	size    int          // ranks
	workers int          // ranks that can work at the same time
	inline  int          // bytes that the last rank to arrive reads and writes alone; the work is cut beyond (plan.go)
	seats   seats        // waiting ranks spin if these are dedicated
	small   int          // bytes of allreduces that go through cells, at most; 0: no collectives do
	ranks   []*endpoint  // by rank
	run     string       // its name in flight records, also in worlds that were split from it
	cells   [2][]cell    // of small collectives with even and odd numbers, by rank; nil if none are small
	told    [2]addresses // where the data of the cells is
	parts   []part       // of the result of a small collective, by rank; nil if every rank makes it
	memory  [][]byte     // where the data of cells and parts is
	boxes   []mailbox    // by the rank that receives

	// Rarely written, often read.
	failure  atomic.Pointer[failure]
	left     atomic.Int32 // ranks that closed their communicator
	sleepers atomic.Int32 // waiters in the lot
	stalled  atomic.Int32 // endpoints whose backlog waits for a collective
	_        cacheLine
	copying  atomic.Int32 // messages being copied
	jobs     jobList      // messages of which front.jobs are the number
	lot      lot          // where waiting ranks sleep
	agreeing []comm.Call  // by rank, of the collective that is about to start
	ends     []int        // memory for the ends of rows in its plan, if their lengths differ (plan.go)
	judging  sync.Mutex   // held while calls are compared of which no collective starts
}

// slot is one collective of the ring. Its first cache line never changes, and its second one has all that changes with
// each collective, but for the ends of uneven rows. They share no line with others even if the world begins up to
// eight bytes behind the beginning of a line, where Go's allocator has its header.
type slot struct {
	calls  []entry // what each rank calls (entry.go), by rank; set by it when it arrives
	extras []extra // by rank, likewise
	_      [lineBytes - 2*sliceBytes]byte

	// missing counts the ranks that have not arrived, plus one until the
	// preceding collective is done. It is 0 while the collective runs.
	missing atomic.Int32
	left    atomic.Int32 // chunks that are not done
	plan    plan         // how the work is cut (plan.go); set by the last rank to arrive
	_       [3*lineBytes - 2*4 - planBytes]byte
}

// cellRanks bounds the worlds that have cells, as every rank reads every other's. And
// each has to have a processor: where they take turns, a single one that does the work
// of all takes less.
const cellRanks = 16

// cell is what a rank tells the others of a small collective. The first line has all of it if the data is short.
type cell struct {
	told  atomic.Uint64    // the collective's number plus one, written last; 0 means none yet
	entry                  // the call, without its lists
	short [shortBytes]byte // its data, if that is short
	_     cacheLine        // processors fetch lines in pairs
}

// shortBytes is how much data fits beside the call. Longer data has its own place.
const shortBytes = lineBytes - 8 - entryBytes

// addresses are where cells hold data, by rank.
type addresses struct{ short, long []uintptr }

// part is what a rank has made of the result of a small collective.
type part struct {
	made atomic.Uint64 // the collective's number plus one, written last; 0 means none yet
	data uintptr       // of the part
	_    [lineBytes - 16]byte
	_    cacheLine // processors fetch lines in pairs
}

// extra holds what only some calls have.
type extra struct {
	lists                  // counts and displacements
	split *splitCall       // nil for all but Split
	sums  []fixedpoint.Sum // of an allreduce in fixed point, nil for all others
}

func (x *extra) set(c *comm.Call, split *splitCall, sums []fixedpoint.Sum) {
	x.lists.set(c)
	x.split = split
	x.sums = sums
}

// splitCall is one rank's part in a Split.
type splitCall struct {
	comm.Wait // the color and the key
	// child is the result, nil for a negative color; not nil before it if the wait for it failed.
	child atomic.Pointer[endpoint]
	// forsake aborts a child whose rank no longer waits for it.
	forsake func(child *endpoint, cause error)
}

// endpoint is one rank of a world: what it submitted and in which order that
// may start.
//
// Collectives usually go straight into the ring. Messages, groups, and
// collectives that have to wait for messages or for a free slot pass through
// the backlog, which starts its operations first in, first out, as soon as
// what came before allows.
type endpoint struct {
	_     cacheLine
	world *world        // of all ranks
	rank  int           // in the world
	check backend.Check // of arguments
	life  backend.Life  // sound, aborted or closed, and what may be called meanwhile

	mu sync.Mutex // guards what has neither a lock nor an atomic type

	arrivals  atomic.Uint64   // collectives put into the ring, or told in a cell
	finished  atomic.Uint64   // number of the last small one that the rank finished, plus one
	pending   atomic.Int32    // operations in backlog and opened
	reduced   atomic.Bool     // the last AllReduceFixed is done
	submitted atomic.Uint64   // all operations
	messages  tally.Tally     // the messages among these: how many began, and how many of the first ones have ended
	habit     habit           // for how long its waits spin, at a time (slice) and in all (total): spin.go
	gone      atomic.Bool     // closed, and nothing in flight
	leakAlarm runtime.Cleanup // reports a communicator that was lost without Close, which stops it

	backlog  queue.Of[*op]  // guarded by mu
	opened   []*op          // messages that were posted and are not done, in no order; guarded by mu
	read     spans.Set[*op] // the memory of those that are sends; guarded by mu
	written  spans.Set[*op] // of those that are receives; guarded by mu
	idle     []*op          // for reuse; guarded by mu
	released uint64         // the last batch that may start, 0 before the first; guarded by mu
	batches  uint64         // that were submitted, and the number of the last; guarded by mu
	stalled  atomic.Bool    // counted in world.stalled

	next   *endpoint   // in a driver's list of those whose backlog may go on (driver.go); that driver's; nil at its end
	linked atomic.Bool // it is in such a list

	exhausted atomic.Uint64 // the last offer of which the rank found all chunks taken; 0 before that

	results [2]uintptr // of a small collective; guarded by mu
	sources []uintptr  // of a part of one, by rank; guarded by mu
	quiet   bool       // the world has aborted, and nobody touches this rank's buffers any more; guarded by mu
	ringed  uint64     // number of the last collective that was put into the ring, plus one; guarded by mu

	batch   []*op                   // the group being submitted; guarded by mu
	scratch atomic.Pointer[scratch] // nil while a goroutine works with it, and before the first does
}

// op is an operation that does not go straight into the ring.
type op struct {
	entry
	extra
	owner  *endpoint // the rank that has submitted it
	tag    uint32    // of a message
	batch  uint64    // see endpoint.batches
	number uint64    // of a message
	place  int       // of a message, in endpoint.opened
	memory int32     // of a message that is posted, its place in endpoint.read or written; 0 if it has no bytes

	// All operations of a batch start together.
	collectives bool // the batch has some
	messages    bool // the batch has some

	// Of a receive that is being copied in chunks.
	match  *op          // the send, nil before it is found
	next   int          // the first chunk that nobody has taken; guarded by jobList.mu
	chunks int          // 0 before the match
	left   atomic.Int32 // chunks that are not done
}

// mailbox holds the messages to one rank that have only one side yet, by source
// and tag (op.key). It has sends or receives of any of these, never both of one.
type mailbox struct {
	mu      sync.Mutex       // guards waiting
	waiting queue.Keyed[*op] // guarded by mu
	_       cacheLine
}

// failure is why a world has aborted.
type failure struct {
	rank    int   // who caused it, or everyone, which is -1
	culprit error // what that rank reports
	peers   error // what the others report
}

// lot is where waiting ranks sleep.
type lot struct {
	mu      sync.Mutex // guards what follows
	waiting []*waiter  // guarded by mu
	idle    []*waiter  // for reuse; guarded by mu
}

// waiter is one sleeping goroutine.
type waiter struct {
	endpoint *endpoint     // that waits
	place    int           // in lot.waiting
	wake     chan struct{} // has room for one
}

// jobList holds long messages that have chunks left to copy.
type jobList struct {
	mu   sync.Mutex // guards list
	list []*op      // guarded by mu
}

// scratch is working memory of one goroutine that executes chunks.
type scratch struct {
	src    []uintptr         // empty, with room for a rank each
	dst    []uintptr         // likewise
	sums   []*fixedpoint.Sum // likewise
	worker fixedpoint.Worker // memory of sums in fixed point
}

func newWorld(size int, s seats) *world {
	workers := min(size, runtime.GOMAXPROCS(0))
	w := &world{
		size:    size,
		seats:   s,
		workers: workers,
		inline:  inlineLimit(workers, s == dedicated),
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
	w.front.claim.ranges = make([]chunkRange, workers)
	w.makeCells()
	for r := range w.ranks {
		w.ranks[r] = newEndpoint(w, r)
	}
	return w
}

// makeCells makes what small collectives need, if there are any in this world.
func (w *world) makeCells() {
	if w.size > cellRanks || w.seats == shared {
		return
	}
	w.small = smallBytes(w.size, w.seats == dedicated)
	for i := range w.cells {
		w.cells[i] = make([]cell, w.size)
		told := &w.told[i]
		for r := range w.cells[i] {
			c := &w.cells[i][r]
			told.short = append(told.short, hostmem.Addr(c.short[:]))
		}
		if w.small > shortBytes {
			told.long = w.places(w.small)
		}
	}
	length := partLength(w.size, w.small)
	if length == 0 {
		return
	}
	w.parts = make([]part, w.size)
	for r, data := range w.places(length) {
		w.parts[r].data = data
	}
}

// places returns memory of the world with a number of bytes for each rank, in pairs of lines that no other rank writes.
func (w *world) places(bytes int) []uintptr {
	const pair = 2 * lineBytes
	stride := (bytes + pair - 1) / pair * pair
	memory := make([]byte, w.size*stride+pair)
	w.memory = append(w.memory, memory)
	begin := (hostmem.Addr(memory) + pair - 1) / pair * pair
	list := make([]uintptr, w.size)
	for r := range list {
		list[r] = begin + uintptr(r*stride)
	}
	return list
}

func newEndpoint(w *world, rank int) *endpoint {
	e := &endpoint{world: w, rank: rank}
	if w.parts != nil {
		e.sources = make([]uintptr, w.size)
	}
	e.check = backend.Check{
		Backend:   name,
		Rank:      rank,
		WorldSize: w.size,
	}
	if w.seats == dedicated {
		e.habit.slice.Store(int64(minSpin))
		e.habit.total.Store(int64(minSpin))
	}
	return e
}

func (w *world) slot(seq uint64) *slot { return &w.slots[seq%ringSize] }

func (w *world) cell(seq uint64, rank int) *cell { return &w.cells[seq%2][rank] }

// toldAll reports whether all ranks have told a small collective. It looks at all cells whatever it finds, so that the
// lines that have changed travel at the same time.
func (w *world) toldAll(seq uint64) bool {
	cells := w.cells[seq%2]
	differences := uint64(0)
	for r := range cells {
		differences |= cells[r].told.Load() ^ (seq + 1)
	}
	return differences == 0
}

// completed is the number of collectives that are done, for this rank at least.
func (e *endpoint) completed() uint64 {
	return max(e.finished.Load(), e.world.front.completed.Load())
}

// telling reports whether the rank has told a small collective that it has not
// finished, which then is the last that it has submitted.
func (e *endpoint) telling() bool {
	n := e.arrivals.Load()
	return e.world.small > 0 && e.finished.Load() < n && e.world.cell(n-1, e.rank).told.Load() == n
}

// mayFinish reports whether the rank can finish that now.
func (e *endpoint) mayFinish() bool {
	return e.telling() && e.world.toldAll(e.arrivals.Load()-1)
}

// done reports whether everything that was submitted is done.
func (e *endpoint) done() bool {
	if e.pending.Load() > 0 {
		return false
	}
	n := e.arrivals.Load()
	return e.finished.Load() >= n || e.world.front.completed.Load() >= n && !e.telling()
}
