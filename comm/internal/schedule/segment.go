package schedule

import (
	"sync/atomic"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
)

// segment is memory that all ranks of a communicator share if they are on one host. In a
// round, each rank writes what the others need into its own slot and then sets the
// slot's flag. The flag has the fingerprint of all calls of the rank (see callLog), so that
// ranks that disagree wait for each other, and compare their call logs.
//
// Each rank has two slots, for even and odd rounds, and begins a round when it has finished
// the one before. So when all ranks have begun a round, nobody reads the slots of the one
// before any more.
type segment struct {
	memory   []byte // nil if ranks share none
	rank     int    // of this process
	size     int    // number of ranks
	capacity int    // bytes of data in a slot

	slots [2][]slot // for even and odd rounds, by rank

	begun func() // called when this rank begins a round; may be nil

	round uint64 // the last one that this rank has begun
	flag  uint64 // of this rank in that round
	seen  int    // leading ranks that have been seen to begin it
	owner *Op    // waits for the others; nil for none
}

// slot is the memory in which a rank writes its part of a round.
type slot struct {
	flag    *atomic.Uint64 // the round that its rank has begun, and its state
	address uintptr        // of the slot's memory
}

// A slot begins with the flag. Short data shares its cache line, so that one line travels
// between processors. Longer data begins with the next line.
const (
	flagBytes  = 8
	besideFlag = cacheLine - flagBytes
)

// roundBits are the bits of a flag that count rounds, so that the flag differs from the one of
// two rounds before. The others are of the fingerprint.
const roundBits = 1<<16 - 1

// slotBytes is the distance of slots. Processors fetch lines in pairs.
func (s *segment) slotBytes() int {
	return roundUp(cacheLine+s.capacity, 2*cacheLine)
}

func (s *segment) slotsBytes() int { return 2 * s.size * s.slotBytes() }

// bytes returns the size of the memory: the slots, and one word for each rank about its last control message.
func (s *segment) bytes() int { return s.slotsBytes() + 8*s.size }

// lay divides the memory into slots.
func (s *segment) lay() {
	address := hostmem.Addr(s.memory)
	for parity := range s.slots {
		for range s.size {
			flag := &hostmem.Slice[atomic.Uint64](address, 1)[0]
			s.slots[parity] = append(s.slots[parity], slot{flag, address})
			address += uintptr(s.slotBytes())
		}
	}
}

// now returns the slots of the round.
func (s *segment) now() []slot { return s.slots[s.round%2] }

// data returns the address of a rank's data in a collective in which each rank shares at most maxBytes.
func (s *segment) data(rank, maxBytes int) uintptr {
	if maxBytes <= besideFlag {
		return s.now()[rank].address + flagBytes
	}
	return s.now()[rank].address + cacheLine
}

// lastWord returns the word in which a rank publishes the state of its last control message, and the calls up to its
// last barrier. Data in the segment overtakes control messages: without the word, a rank that has aborted would look
// like one that waits.
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

// sharedLimit is the maximum number of bytes that a rank reads from other slots in one round that only moves data. Up
// to this size the segment is faster than messages, on machines with fast and with slow cache lines.
const sharedLimit = 1 << 20

// wholeSharedLimit is the same for a reduction of more than two ranks whose operands each rank reads entirely. Above
// it, a reduction by blocks reads less, in one more round.
const wholeSharedLimit = 16 << 10

// pairBlockBytes is the amount of a long reduction that two ranks read of each other at once.
const pairBlockBytes = 256 << 10

// A long reduction of more ranks uses the segment in at least leastBlocks blocks, unless these are shorter than
// shortBlock or longer than longBlock. Both slots of a rank should stay in a processor's caches. Rounds should be
// short compared to the copies, above all if ranks share processors.
const (
	shortBlock  = 128 << 10
	longBlock   = 512 << 10
	leastBlocks = 16
	allBlocks   = 8 << 20 // the longest blocks of all ranks together, unless they are short
)

// maxBlock is the length of the longest blocks. Results lie behind it, aligned.
func (s *segment) maxBlock() int {
	return min(max(allBlocks/s.size, shortBlock), longBlock) &^ (cacheLine - 1)
}

// blockBytes returns the length of a block of a reduction of this many bytes.
func (s *segment) blockBytes(bytes int) int {
	return min(max(bytes/leastBlocks, shortBlock), s.maxBlock())
}

// blocksOf returns the number of blocks of a reduction of count elements for each rank, and the number of elements in
// a block. Blocks of all ranks together are no longer than [segment.maxBlock], or have one element each.
func (s *segment) blocksOf(count, size, to int) (blocks, block int) {
	bytes := count * size
	if to == nobody {
		bytes *= s.size
	}
	block = s.blockBytes(bytes) / size
	if to == nobody {
		block /= s.size
	}
	block = max(block, 1)
	blocks = max(1, (count+block-1)/block)
	block = max(1, (count+blocks-1)/blocks)
	return max(1, (count+block-1)/block), block
}

// resultRoom is the maximum amount by which the share of a block is rounded up.
const resultRoom = 8 * cacheLine

// operands returns the address of a rank's operands of a block in its slot.
func (s slot) operands() uintptr { return s.address + cacheLine }

// results returns the address of a rank's share of the result of a block in its slot.
func (s *segment) results(rank int, slots []slot) uintptr {
	return slots[rank].operands() + uintptr(s.maxBlock())
}

// fits reports whether each rank may read this many bytes of every other rank in one round.
func (s *segment) fits(bytes int) bool {
	return s.memory != nil && bytes <= min(s.capacity, sharedLimit/(s.size-1))
}

// begin begins a round of o with bytes that o sends. The operation continues when all ranks have begun it.
func (s *segment) begin(o *Op, bytes int) {
	s.next(o)
	hostops.Copy(s.data(s.rank, o.round.maxBytes), o.send, bytes, false)
	s.announce(o)
}

// next begins the next round, in which this rank's slot may be written.
func (s *segment) next(o *Op) {
	s.round++
	s.flag = o.round.fingerprint&^roundBits | s.round&roundBits
}

// announce publishes the round together with the written data.
func (s *segment) announce(o *Op) {
	s.now()[s.rank].flag.Store(s.flag)
	if s.begun != nil {
		s.begun()
	}
	s.seen = 0
	if !s.complete() {
		s.owner = o
		o.inFlight++
	}
}

// complete reports whether all ranks have begun the round.
func (s *segment) complete() bool {
	for slots := s.now(); s.seen < len(slots); s.seen++ {
		if slots[s.seen].flag.Load() != s.flag {
			return false
		}
	}
	return true
}

// due reports whether a round is complete whose operation has not continued.
func (s *segment) due() bool { return s.owner != nil && s.complete() }

// hasBegun reports whether a rank has begun the round.
func (s *segment) hasBegun(rank int) bool {
	return s.now()[rank].flag.Load() == s.flag
}

// looks is the number of polls of the flags for each poll of MPI.
const looks = 64

// await polls the flags a number of times and returns the operation that can continue, nil if the round is not
// complete.
func (s *segment) await(tries int) *Op {
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

// SegmentBytes returns the size of the memory that the ranks of one host share for short collectives.
func SegmentBytes(size int) int {
	s := newSegment(0, size)
	return s.bytes()
}

func newSegment(rank, size int) segment {
	s := segment{rank: rank, size: size}
	s.capacity = max(sharedLimit/(size-1), s.maxBlock()+s.maxBlock()/size+resultRoom)
	return s
}

// Share makes short collectives use memory of [SegmentBytes] that all ranks have mapped, zero at first. All ranks must
// call it at the same place, with nothing in flight. The engine accesses it until Release. begun may be nil; it is
// called when this rank has begun a round, in which others may wait for it.
func (e *Engine) Share(memory []byte, begun func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.segment = newSegment(e.rank, e.size)
	e.segment.memory = memory
	e.segment.begun = begun
	e.segment.lay()
}

// SharesMemory reports whether collectives go over memory that all ranks share, on all ranks alike.
func (e *Engine) SharesMemory() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.segment.memory != nil
}
