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

// SharedVariable is the environment variable that keeps ranks of one host from sharing
// memory for collectives: "off" for any rank has all of them go through MPI. Any other value
// is an error of [Init].
const SharedVariable = "TUTTI_MPI_SHARED"

const sharedOff = "off"

// segment is memory that all ranks of a communicator share if they are on one host. In a
// round, each rank writes what the others need into a slot of its own and then sets the
// slot's flag. The flag has the fingerprint of all calls of the rank (see callLog), so that
// ranks that disagree wait for each other, and compare their call logs.
//
// Each rank has two slots, for even and odd rounds, and begins a round when it has finished
// the one before. So when all ranks have begun a round, nobody reads the slots of the one
// before any more.
type segment struct {
	memory   []byte // nil if ranks share none
	rank     int
	size     int
	capacity int // bytes of data in a slot

	slots [2][]slot // for even and odd rounds, by rank

	round uint64 // the last that this rank has begun
	flag  uint64 // of this rank in that round
	seen  int    // ranks that were seen to have begun it, from rank 0 on
	owner *op    // waits for the others, nil for none
}

// slot is where a rank writes its part of a round.
type slot struct {
	flag    *atomic.Uint64
	address uintptr
}

// A slot begins with the flag. Short data shares its cache line, so that one line travels
// between processors. Longer data begins with the next line.
const (
	flagBytes  = 8
	besideFlag = cacheLine - flagBytes
)

// roundBits are the bits of a flag that count rounds, so that the flag differs from that of
// two rounds before. The others are of the fingerprint.
const roundBits = 1<<16 - 1

// slotBytes is the distance of slots. Processors fetch lines in pairs.
func (s *segment) slotBytes() int { return roundUp(cacheLine+s.capacity, 2*cacheLine) }

func (s *segment) slotsBytes() int { return 2 * s.size * s.slotBytes() }

// bytes is the size of the memory: the slots, and for each rank a word about its last
// control message.
func (s *segment) bytes() int { return s.slotsBytes() + 8*s.size }

// lay divides the memory into slots.
func (s *segment) lay() {
	at := hostmem.Addr(s.memory)
	for parity := range s.slots {
		for range s.size {
			s.slots[parity] = append(s.slots[parity], slot{&hostmem.Slice[atomic.Uint64](at, 1)[0], at})
			at += uintptr(s.slotBytes())
		}
	}
}

// now returns the slots of the round.
func (s *segment) now() []slot { return s.slots[s.round%2] }

// data is the address of a rank's data in a collective in which each rank shares at most
// the given number of bytes.
func (s *segment) data(rank, most int) uintptr {
	if most <= besideFlag {
		return s.now()[rank].address + flagBytes
	}
	return s.now()[rank].address + cacheLine
}

// lastWord is where a rank says what became of its last control message, and up to which
// call it has passed barriers. Data in the segment overtakes control messages: without the
// word, a rank that has aborted would look like one that waits.
func (s *segment) lastWord(rank int) *atomic.Uint64 {
	return &hostmem.Slice[atomic.Uint64](hostmem.Addr(s.memory)+uintptr(s.slotsBytes()), s.size)[rank]
}

// States of the last control message of a rank.
const (
	lastUnwritten = iota
	lastInFlight
	lastUnsent // MPI has refused it for a rank

	lastStates
)

// setLast publishes the state of this rank's last control message.
func (s *segment) setLast(state, passed uint64) {
	if s.memory != nil {
		s.lastWord(s.rank).Store(passed*lastStates + state)
	}
}

// last returns what a rank has published about its last control message.
func (s *segment) last(rank int) (state, passed uint64) {
	if s.memory == nil {
		return lastUnwritten, 0
	}
	word := s.lastWord(rank).Load()
	return word % lastStates, word / lastStates
}

// sharedLimit is how many bytes a rank reads from other slots at most. Up to there the
// segment is faster than messages, on machines with fast and with slow cache lines. Beyond,
// a reduction by shares reads less.
const sharedLimit = 1 << 20

// fits reports whether a slot has room for the bytes.
func (s *segment) fits(bytes int) bool { return s.memory != nil && bytes <= s.capacity }

// begin begins a round of o with bytes that o sends. The operation goes on when all ranks
// have begun it.
func (s *segment) begin(o *op, bytes int) {
	s.round++
	s.flag = o.fingerprint&^roundBits | s.round&roundBits
	hostops.Copy(s.data(s.rank, o.most), o.send, bytes, false)
	s.now()[s.rank].flag.Store(s.flag)
	s.seen = 0
	if !s.complete() {
		s.owner = o
		o.inFlight++
	}
}

// complete reports whether all ranks have begun the round.
func (s *segment) complete() bool {
	for pages := s.now(); s.seen < len(pages); s.seen++ {
		if pages[s.seen].flag.Load() != s.flag {
			return false
		}
	}
	return true
}

// hasBegun reports whether a rank has begun the round.
func (s *segment) hasBegun(rank int) bool { return s.now()[rank].flag.Load() == s.flag }

// looks is how often to look at the flags instead of asking MPI once.
const looks = 64

// await looks at the flags a number of times and returns the operation that goes on, nil if
// the round is not complete.
func (s *segment) await(tries int) *op {
	o := s.owner
	if o == nil {
		return nil
	}
	for range tries * looks {
		if s.complete() {
			s.owner = nil
			o.inFlight--
			return o
		}
	}
	return nil
}

// release gives the memory back.
func (s *segment) release() {
	if s.memory != nil {
		unmapShared(s.memory)
		*s = segment{}
	}
}

// sharable returns why this process cannot share memory with others on its host.
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

// offer says where rank 0 has made the memory.
type offer struct{ pid, fd, token uint64 }

func (o *offer) name() string { return fmt.Sprintf("tutti-%016x", o.token) }

// share sets the segment up: rank 0 makes it, and it is used if all others can map it. It
// is collective.
func (e *endpoint) share(ctx context.Context) error {
	if e.native() {
		e.unshared = errors.New("collectives are native")
	}
	if e.native() || e.size == 1 {
		return nil
	}
	s := segment{rank: e.rank, size: e.size, capacity: sharedLimit / (e.size - 1)}
	out := newCells() // an offer, and whether this rank has the memory; MPI's after an error
	o, all := &hostmem.Slice[offer](out.at(0), 1)[0], &hostmem.Slice[uint64](out.at(3), 1)[0]
	reason := sharable()
	if e.rank == 0 && reason == nil {
		made := offer{pid: uint64(os.Getpid()), token: rand.Uint64()}
		var fd int
		if fd, s.memory, reason = createShared(made.name(), s.bytes()); reason == nil {
			defer closeShared(fd)
			made.fd = uint64(fd)
			*o = made
		}
	}
	defer func() {
		if e.segment.memory == nil {
			s.release()
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
		s.memory, reason = openShared(int(o.pid), int(o.fd), o.name(), s.bytes())
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
		s.lay()
		e.segment = s
	} else if e.unshared = reason; reason == nil {
		e.unshared = errors.New("not all ranks can")
	}
	return nil
}

// setUp makes a call that does not enter the call log, and waits for it.
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
	return e.wait(ctx, comm.OpSplit)
}
