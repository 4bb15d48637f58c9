package mpi

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
)

// SharedVariable is the environment variable that keeps the ranks of a host from
// sharing memory for small collectives if it is "off" for one of them. Any other
// value is an error of [Init].
const SharedVariable = "TUTTI_MPI_SHARED"

const sharedOff = "off"

// board is memory that all ranks of a communicator share, if all are on one host.
// What a rank has to tell the others of a small collective, it writes on a page of its
// own, and then its stamp, which is the fingerprint of all that it has called: a page
// with that stamp is of the same collective. Every rank has two pages, for rounds with
// even and odd numbers, and begins a round when it has finished the one before. So
// when all have begun a round, all have read what was on the pages before this one's.
type board struct {
	memory   []byte // nil: there is none
	rank     int
	size     int
	capacity int // bytes of data on a page

	round uint64 // the last that this rank began,
	stamp uint64 // its stamp,
	told  int    // ranks that were seen to have begun it, the first ones,
	owner *op    // and the operation that waits for the others, nil for none
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

// bytes is the size of the memory: the pages, and for each rank a word that says whether
// it has written its last note.
func (b *board) bytes() int { return b.pagesBytes() + 8*b.size }

// page is the address of a rank's page for the round.
func (b *board) page(rank int) uintptr {
	return hostmem.Addr(b.memory) + uintptr((int(b.round%2)*b.size+rank)*b.pageBytes())
}

// data is the address of a rank's data in a collective in which no rank tells more than
// so many bytes.
func (b *board) data(rank, most int) uintptr {
	if most <= besideIt {
		return b.page(rank) + stampBytes
	}
	return b.page(rank) + cacheLine
}

func (b *board) stampOf(rank int) *atomic.Uint64 {
	return &hostmem.Slice[atomic.Uint64](b.page(rank), 1)[0]
}

// parting is where a rank says that its last note is under way. What goes over the board
// overtakes notes, and would have others take a rank that gave up for one that waits.
func (b *board) parting(rank int) *atomic.Uint64 {
	return &hostmem.Slice[atomic.Uint64](hostmem.Addr(b.memory)+uintptr(b.pagesBytes()), b.size)[rank]
}

// part says that this rank's last note is under way.
func (b *board) part() {
	if b.memory != nil {
		b.parting(b.rank).Store(1)
	}
}

// parted reports whether the last note of a rank is under way.
func (b *board) parted(rank int) bool { return b.memory != nil && b.parting(rank).Load() != 0 }

// fits reports whether so many bytes can be told.
func (b *board) fits(bytes int) bool { return b.memory != nil && bytes <= b.capacity }

// tell begins a round of o with bytes that o sends. The operation goes on when all have
// told.
func (b *board) tell(o *op, bytes int) {
	b.round++
	b.stamp = o.chain&^roundBits | b.round&roundBits
	hostops.Copy(b.data(b.rank, o.most), o.send, bytes, false)
	b.stampOf(b.rank).Store(b.stamp)
	b.told = 0
	if !b.complete() {
		b.owner = o
		o.pending++
	}
}

// complete reports whether all ranks have begun the round.
func (b *board) complete() bool {
	for b.told < b.size {
		if b.stampOf(b.told).Load() != b.stamp {
			return false
		}
		b.told++
	}
	return true
}

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
		b.memory = nil
	}
}

// sharedAllowed returns an error if the environment says that ranks are to share no memory.
func sharedAllowed() error {
	if os.Getenv(SharedVariable) == sharedOff {
		return errors.New(SharedVariable + "=" + sharedOff)
	}
	return nil
}

// offer tells where rank 0 has made the memory.
type offer struct{ pid, fd, token uint64 }

func (o offer) name() string { return fmt.Sprintf("tutti-%016x", o.token) }

// share sets the board up: rank 0 makes it, and if all others can map it, all do. It is
// collective.
func (e *endpoint) share(ctx context.Context) error {
	if e.native || e.size == 1 {
		return nil
	}
	b := &board{rank: e.rank, size: e.size, capacity: wholeLimit / (e.size - 1)}
	out := newCells()
	defer out.free()
	at := &hostmem.Slice[offer](out.at(0), 1)[0]
	reason := sharedAllowed()
	if e.rank == 0 && reason == nil {
		var token [8]byte
		_, _ = rand.Read(token[:])
		o := offer{pid: uint64(os.Getpid()), token: binary.NativeEndian.Uint64(token[:])}
		var fd int
		if fd, b.memory, reason = createShared(o.name(), b.bytes()); reason == nil {
			defer closeShared(fd)
			o.fd = uint64(fd)
			*at = o
		}
	}
	err := e.setUp(ctx, comm.BroadcastCall(out.at(0), 3, dtype.U64, 0))
	if err != nil {
		return err
	}
	if e.rank > 0 && reason == nil {
		if at.token == 0 {
			reason = errors.New("rank 0 has made none")
		} else {
			b.memory, reason = openShared(int(at.pid), int(at.fd), at.name(), b.bytes())
		}
	}
	all := &hostmem.Slice[uint64](out.at(3), 1)[0]
	if reason == nil {
		*all = 1
	}
	if err := e.setUp(ctx, comm.AllReduceCall(out.at(3), out.at(3), 1, dtype.U64, comm.Min)); err != nil {
		return err
	}
	if *all == 0 {
		b.release()
		return nil
	}
	e.mu.Lock()
	e.board = *b
	e.mu.Unlock()
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
