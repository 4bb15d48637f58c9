package mpi

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
)

// SharedVariable is the environment variable that has collectives of ranks on one host
// go through MPI as well, and not through memory that they share, if it is "off" for one
// of the ranks. Any other value is an error of [Init].
const SharedVariable = "TUTTI_MPI_SHARED"

const sharedOff = "off"

// board is memory that all ranks of a communicator share, if all are on one host. What
// a rank has to tell the others of a collective, it writes on a page of its own, and
// then a stamp, which has the fingerprint of all that it has called (see history): pages
// of ranks that disagree have different ones, and who waits in vain compares histories.
//
// Every rank has two pages, for rounds with even and odd numbers, and begins a round
// when it has finished the one before. So when all have begun a round, nobody reads the
// pages of the one before any more.
type board struct {
	memory   []byte // nil: there is none
	rank     int
	size     int
	capacity int // bytes of data on a page

	pages [2][]page // for even and odd rounds, by rank

	round uint64 // the last that this rank began,
	stamp uint64 // its stamp,
	told  int    // ranks that were seen to have begun it, the first ones,
	owner *op    // and the operation that waits for the others, nil for none
}

// page is where a rank tells its part of a round.
type page struct {
	stamp   *atomic.Uint64
	address uintptr
}

// A page begins with the stamp. Short data shares its cache line, the only one then that
// goes from one processor to another; longer data begins with the next line.
const (
	stampBytes = 8
	besideIt   = cacheLine - stampBytes
)

// roundBits are those of a stamp that tell the round, so that the one two rounds before
// is another one. The rest is of the fingerprint.
const roundBits = 1<<16 - 1

// pageBytes is the distance of pages: processors fetch lines in pairs.
func (b *board) pageBytes() int { return roundUp(cacheLine+b.capacity, 2*cacheLine) }

func (b *board) pagesBytes() int { return 2 * b.size * b.pageBytes() }

// bytes is the size of the memory: the pages, and for each rank a word about its last
// note.
func (b *board) bytes() int { return b.pagesBytes() + 8*b.size }

// lay divides the memory into pages.
func (b *board) lay() {
	at := hostmem.Addr(b.memory)
	for parity := range b.pages {
		for range b.size {
			b.pages[parity] = append(b.pages[parity], page{&hostmem.Slice[atomic.Uint64](at, 1)[0], at})
			at += uintptr(b.pageBytes())
		}
	}
}

// now is the pages of the round.
func (b *board) now() []page { return b.pages[b.round%2] }

// data is the address of a rank's data in a collective in which no rank tells more than
// so many bytes.
func (b *board) data(rank, most int) uintptr {
	if most <= besideIt {
		return b.now()[rank].address + stampBytes
	}
	return b.now()[rank].address + cacheLine
}

// parting is where a rank says how its last note goes, and up to which call it has
// passed barriers. What goes over the board overtakes notes, and would have others take a
// rank that gave up for one that waits.
func (b *board) parting(rank int) *atomic.Uint64 {
	return &hostmem.Slice[atomic.Uint64](hostmem.Addr(b.memory)+uintptr(b.pagesBytes()), b.size)[rank]
}

// How the last note of a rank goes.
const (
	lastUnwritten = iota
	lastUnderWay
	lastUnsent // MPI has not taken it, for some rank at least

	lastKinds
)

// part says how the last note of this rank goes.
func (b *board) part(how, passed uint64) {
	if b.memory != nil {
		b.parting(b.rank).Store(passed*lastKinds + how)
	}
}

// parted returns what a rank says of its last note.
func (b *board) parted(rank int) (how, passed uint64) {
	if b.memory == nil {
		return lastUnwritten, 0
	}
	word := b.parting(rank).Load()
	return word % lastKinds, word / lastKinds
}

// sharedLimit is how many bytes a rank reads of the others' pages at most. Up to there
// it takes less time than messages, on machines where cache lines travel fast and where
// they travel slowly; beyond, reducing by shares reads less.
const sharedLimit = 1 << 20

// fits reports whether so many bytes can be told.
func (b *board) fits(bytes int) bool { return b.memory != nil && bytes <= b.capacity }

// tell begins a round of o with bytes that o sends. The operation goes on when all have
// told.
func (b *board) tell(o *op, bytes int) {
	b.round++
	b.stamp = o.chain&^roundBits | b.round&roundBits
	hostops.Copy(b.data(b.rank, o.most), o.send, bytes, false)
	b.now()[b.rank].stamp.Store(b.stamp)
	b.told = 0
	if !b.complete() {
		b.owner = o
		o.pending++
	}
}

// complete reports whether all ranks have begun the round.
func (b *board) complete() bool {
	for pages := b.now(); b.told < len(pages); b.told++ {
		if pages[b.told].stamp.Load() != b.stamp {
			return false
		}
	}
	return true
}

// hasTold reports whether a rank has begun the round.
func (b *board) hasTold(rank int) bool { return b.now()[rank].stamp.Load() == b.stamp }

// looks is how often to look at the pages where MPI would be asked once.
const looks = 64

// await looks a number of times whether the round is complete and returns the
// operation that goes on, nil if none does.
func (b *board) await(tries int) *op {
	o := b.owner
	if o == nil {
		return nil
	}
	for range tries * looks {
		if b.complete() {
			b.owner = nil
			o.pending--
			return o
		}
	}
	return nil
}

// release gives the memory back.
func (b *board) release() {
	if b.memory != nil {
		unmapShared(b.memory)
		*b = board{}
	}
}

// sharable returns why this process cannot share memory with others of its host.
func sharable() error {
	if os.Getenv(SharedVariable) == sharedOff {
		return errors.New(SharedVariable + "=" + sharedOff)
	}
	fd, memory, err := createShared("tutti", os.Getpagesize())
	if err == nil {
		unmapShared(memory)
		closeShared(fd)
	}
	return err
}

// offer tells where rank 0 has made the memory.
type offer struct{ pid, fd, token uint64 }

func (o *offer) name() string { return fmt.Sprintf("tutti-%016x", o.token) }

// share sets the board up: rank 0 makes it, and if all others can map it, all do. It is
// collective.
func (e *endpoint) share(ctx context.Context) error {
	if e.native() {
		e.unshared = errors.New("collectives are native")
	}
	if e.native() || e.size == 1 {
		return nil
	}
	b := board{rank: e.rank, size: e.size, capacity: sharedLimit / (e.size - 1)}
	out := newCells() // an offer, and whether this rank has the memory; MPI's after an error
	o, all := &hostmem.Slice[offer](out.at(0), 1)[0], &hostmem.Slice[uint64](out.at(3), 1)[0]
	reason := sharable()
	if e.rank == 0 && reason == nil {
		made := offer{pid: uint64(os.Getpid()), token: rand.Uint64()}
		var fd int
		if fd, b.memory, reason = createShared(made.name(), b.bytes()); reason == nil {
			defer closeShared(fd)
			made.fd = uint64(fd)
			*o = made
		}
	}
	defer func() {
		if e.board.memory == nil {
			b.release()
		}
	}()
	if err := e.setUp(ctx, comm.BroadcastCall(out.at(0), 3, dtype.U64, 0)); err != nil {
		return err
	}
	switch {
	case e.rank == 0 || reason != nil:
	case o.pid == 0:
		reason = errors.New("rank 0 has no memory to share")
	default:
		b.memory, reason = openShared(int(o.pid), int(o.fd), o.name(), b.bytes())
	}
	if reason == nil {
		*all = 1
	}
	if err := e.setUp(ctx, comm.AllReduceCall(out.at(3), out.at(3), 1, dtype.U64, comm.Min)); err != nil {
		return err
	}
	shared := *all == 1
	out.free()
	e.mu.Lock()
	defer e.mu.Unlock()
	if shared {
		b.lay()
		e.board = b
	} else if e.unshared = reason; reason == nil {
		e.unshared = errors.New("not all ranks can")
	}
	return nil
}

// setUp makes a call that is not among those that the user's are compared with, and
// waits for it.
func (e *endpoint) setUp(ctx context.Context, c comm.Call) error {
	e.mu.Lock()
	p := planner{e, &c, newEntry(&c), 0}
	if c.Op == comm.OpBroadcast {
		p.broadcast()
	} else {
		p.reduce(everybody)
	}
	err := e.launch()
	e.mu.Unlock()
	if err != nil {
		return err
	}
	return e.sync(ctx, comm.OpSplit.String())
}
