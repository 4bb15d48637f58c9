package p2p

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// Constants of the kernels; see kernels/p2p.cu.
const (
	maxRanks  = 8
	maxBlocks = 256
	maxWidth  = 512 // threads of a block
	maxLines  = 128 * maxWidth / lineWidth
	lineWidth = 32
	ringSlots = 4
	packBytes = 16
	noRank    = maxRanks
	headBytes = 512 << 10 // the state and the flags
)

// Constants of the kernels for rounded values.
const (
	tileValues    = 512 // float32 values of a tile
	tileBytes     = 528 // of a tile on the wire
	roundedSlots  = 3
	slotAlignment = 128
	roundedWidth  = 320 // measured: maximum threads of a block
)

// layout is the kernels' struct layout: the offsets and the sizes of the parts of a rank's scratch memory, in
// bytes. It is the same on all ranks.
type layout struct {
	words      uint64 // offset of the words of the sentinel wires, for two operations
	wordsSize  uint64 // bytes for each
	tagged     uint64 // offset of the words of the tagged wire, for two operations
	taggedSize uint64 // bytes for each
	ring       uint64 // offset of the rings
	ringSlot   uint64 // bytes of a slot of a ring
	lines      uint32 // warps that have rings
	chunk      uint32 // packs of a slot
}

// worldParameters is the kernels' struct world.
type worldParameters struct {
	rank    uint32           // of this process
	ranks   uint32           // of the communicator
	scratch [maxRanks]uint64 // addresses of the ranks' scratch memory, as mapped on this one
	host    uint64           // address of the watch
	places  layout           // the parts of each scratch memory
}

// callParameters is the kernels' struct call.
type callParameters struct {
	send       uint64  // address; 0 if the rank sends nothing
	recv       uint64  // address; 0 if it receives nothing
	bytes      uint64  // of a piece
	total      uint64  // of all pieces
	sendStride uint64  // bytes from one piece to the next; 0: all ranks get the same piece
	recvStride uint64  // bytes from one piece to the next
	reduction  uint32  // as package elements numbers it; 0 if data only moves
	root       uint32  // noRank: none
	operation  uint32  // a comm.Op, for errors
	keeper     uint32  // the only rank that stores the result; noRank: all do
	aligned    uint32  // 1: all pieces begin at packs
	idle       uint32  // 1: does nothing
	tiles      uint32  // of rounded values, in a slot
	factor     float32 // of rounded values: their sums are multiplied by it
	gradType   uint32  // of the gradient that is added to rounded values first; gradNone without one
	grad       uint64  // its address
	gradFactor uint64  // address of its factor; 0 means 1
	lost       uint64  // address for the rounding errors; 0 discards them
}

// launchParameters is the kernels' struct launch.
type launchParameters struct {
	world worldParameters // the same for each launch
	call  callParameters  // of this launch
}

// watch is the kernels' struct watch: words in host memory that kernels and host share.
type watch struct {
	abort     uint32 // number of host waits that ask kernels to abort
	told      uint32 // not 0: kernels have aborted, and told the peers' kernels
	limit     int64  // nanoseconds that a kernel waits for a peer
	rank      uint32 // the rank that aborted; valid, like all fields after it, if told is not 0
	peer      uint32 // the peer that it waited for
	operation uint32 // a comm.Op
	reason    uint32 // a reason, or a peer's report: its rank + 1, and in the low 8 bits the rank it waited for + 1
	epoch     uint64 // number of that operation
}

// Reasons why a rank aborts.
const (
	reasonAsked = iota
	reasonTimedOut
)

// The types of a gradient that is added to rounded values.
const (
	gradNone = iota
	gradF32
	gradF16
	gradBF16
)

// gradTypeOf returns the kernels' number of a gradient's type, or gradNone if they do not support it.
func gradTypeOf(dt dtype.DType) uint32 {
	switch dt {
	case dtype.F32:
		return gradF32
	case dtype.F16:
		return gradF16
	case dtype.BF16:
		return gradBF16
	}
	return gradNone
}

// words reports whether elements of a type use the sentinel wire, which reserves one value.
func words(dt dtype.DType) bool {
	switch dt {
	case dtype.F64, dtype.F32, dtype.F16, dtype.BF16:
		return true
	}
	return false
}

// sums reports whether a reduction is a sum or an average, which have separate kernels.
func sums(op comm.ReduceOp) bool {
	return op == comm.Sum || op == comm.Avg
}
