package p2p

import (
	"cmp"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/elements"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// plan is the launch of one operation. It depends only on the operation's arguments, so that all ranks launch the
// same.
type plan struct {
	kernel *function      // nil if nothing is launched
	blocks int            // of the grid
	width  int            // threads of a block
	call   callParameters // the kernel's parameters
}

// planner makes plans for a world.
type planner struct {
	sizes
	ranks           int       // of the communicator
	multiprocessors int       // minimum that each rank has to itself; 0: enough for all blocks
	kernels         kernelSet // loaded when the endpoint is opened
}

// plan plans a call of at least one element.
func (p *planner) plan(x *comm.Call) plan {
	switch x.Op {
	case comm.OpAllReduce, comm.OpReduce:
		return p.allReduce(x)
	case comm.OpReduceScatter:
		return p.reduceScatter(x)
	case comm.OpAllGather:
		return p.allGather(x)
	case comm.OpAllToAll:
		return p.allToAll(x)
	case comm.OpBroadcast:
		return p.broadcast(x)
	}
	return p.barrier()
}

// allReduce plans a reduction whose result all ranks get, or the root of a Reduce alone.
func (p *planner) allReduce(x *comm.Call) plan {
	bytes := x.Bytes()
	packs := packsOf(bytes)
	c := parametersOf(x, x.Op)
	if x.Op == comm.OpReduce {
		c.keeper = uint32(x.Peer)
	}
	c.reduction = elements.Code(x.DType, x.Reduce)
	if p.ranks == 1 && x.DType != dtype.Bool {
		return p.move(c) // as plain bits
	}
	if p.ranks == 1 || bytes <= p.oneStep && p.fits(x.DType, packs) {
		return p.reduce(x, packs, c)
	}
	ring := p.kernels.byType[kernelRing][x.DType]
	if p.ranks == 2 {
		return p.inRings(ring, packs, c)
	}
	share := ceilDiv(packs, p.ranks)
	c.bytes = uint64(share * packBytes)
	c.sendStride = c.bytes
	c.recvStride = c.bytes
	allShare := packs > share*(p.ranks-1) // every rank has a share to reduce
	room := 2*(p.ranks-1)*share*packBytes <= p.words
	if allShare && room && words(x.DType) && bytes <= p.twoSteps && c.forAll() {
		return p.oneRound(p.kernels.byType[kernelTwice][x.DType], share, c)
	}
	return p.inRings(ring, share, c)
}

func (p *planner) reduceScatter(x *comm.Call) plan {
	if p.ranks == 1 {
		return p.allReduce(x)
	}
	packs := packsOf(x.Bytes())
	c := parametersOf(x, comm.OpReduceScatter)
	c.reduction = elements.Code(x.DType, x.Reduce)
	c.total = c.bytes * uint64(p.ranks)
	c.sendStride = c.bytes
	if p.fits(x.DType, packs) {
		return p.reduce(x, packs, c)
	}
	return p.inRings(p.kernels.byType[kernelRing][x.DType], packs, c)
}

func (p *planner) allGather(x *comm.Call) plan {
	c := parametersOf(x, comm.OpAllGather)
	c.recvStride = c.bytes
	return p.move(c)
}

func (p *planner) allToAll(x *comm.Call) plan {
	c := parametersOf(x, comm.OpAllToAll)
	c.total = c.bytes * uint64(p.ranks)
	c.sendStride = c.bytes
	c.recvStride = c.bytes
	return p.move(c)
}

func (p *planner) broadcast(x *comm.Call) plan {
	c := parametersOf(x, comm.OpBroadcast)
	c.send = c.recv
	c.root = uint32(x.Peer)
	return p.move(c)
}

func (p *planner) barrier() plan {
	return p.move(callParameters{root: noRank, keeper: noRank, operation: uint32(comm.OpBarrier)})
}

// parametersOf returns the parameters of a call with one piece.
func parametersOf(x *comm.Call, op comm.Op) callParameters {
	bytes := uint64(x.Bytes())
	return callParameters{
		send:      uint64(x.Send),
		recv:      uint64(x.Recv),
		bytes:     bytes,
		total:     bytes,
		root:      noRank,
		keeper:    noRank,
		operation: uint32(op),
	}
}

// fits reports whether pieces with this number of packs fit a place of the wire of a type.
func (p *planner) fits(dt dtype.DType, packs int) bool {
	if words(dt) {
		return (p.ranks-1)*packs*packBytes <= p.words
	}
	return (p.ranks-1)*packs*2*packBytes <= p.tagged
}

// reduce plans a reduction in one step.
func (p *planner) reduce(x *comm.Call, packs int, c callParameters) plan {
	family := kernelReduce
	if words(x.DType) && sums(x.Reduce) && c.isAligned() && c.forAll() {
		family = kernelAdd
		if p.ranks == 2 {
			family = kernelPair
		}
	}
	return p.oneRound(p.kernels.byType[family][x.DType], packs, c)
}

// move plans an operation that does not compute.
func (p *planner) move(c callParameters) plan {
	packs := packsOf(int(c.bytes))
	if (p.ranks-1)*(packs+1)*2*packBytes <= p.tagged {
		return p.oneRound(p.kernels.move, packs, c)
	}
	return p.inRings(p.kernels.moveRing, packs, c)
}

// oneRound is a plan in which each thread handles a few packs of a piece.
func (p *planner) oneRound(k *function, packs int, c callParameters) plan {
	blocks, width := geometry(packs)
	return plan{kernel: k, blocks: min(blocks, p.resident(width)), width: width, call: c.checked()}
}

// inRings is a plan for messages that fit no other wire.
func (p *planner) inRings(k *function, packs int, c callParameters) plan {
	stripe := p.chunk * maxWidth / lineWidth
	blocks := max(ceilDiv(packs, stripe), 1)
	return plan{
		kernel: k,
		blocks: min(blocks, p.ringBlocks, p.resident(maxWidth)),
		width:  maxWidth,
		call:   c.checked(),
	}
}

// geometry returns the measured best number of blocks, and of threads in each, for a number of packs.
func geometry(packs int) (blocks, width int) {
	switch {
	case packs <= 64:
		return 1, 64
	case packs <= 256:
		return 1, ceilDiv(packs, 32) * 32
	case packs <= 2048:
		return ceilDiv(packs, 64), 64
	case packs <= 4096:
		return 64, 64
	case packs <= 16384:
		return 128, 128
	case packs <= 32768:
		return 256, 128
	}
	return 128, maxWidth
}

// spareMultiprocessors are left to other kernels. If ranks use two communicators in opposite order, the kernel on each
// GPU waits for one that only finds room on these.
const spareMultiprocessors = 4

// resident returns the number of blocks with this many threads that fit on every rank's GPU at once, next to the
// blocks of another kernel. Blocks of different ranks wait for each other. Kernels use at most 128 registers, so a
// multiprocessor has room for maxWidth threads.
func (p *planner) resident(width int) int {
	if p.multiprocessors == 0 {
		return p.blocks
	}
	occupied := max(p.multiprocessors-spareMultiprocessors, 1)
	return min(p.blocks, occupied*(maxWidth/width))
}

// isAligned reports whether all pieces of all buffers start at packs.
func (c callParameters) isAligned() bool {
	return (c.send|c.recv|c.lost|c.sendStride|c.recvStride)%packBytes == 0
}

// forAll reports whether all ranks get the result of a reduction. The kernels pair, add and twice write it on each.
func (c callParameters) forAll() bool {
	return c.keeper == noRank
}

// checked sets aligned.
func (c callParameters) checked() callParameters {
	c.aligned = 0
	if c.isAligned() {
		c.aligned = 1
	}
	return c
}

// rounded plans an allreduce of float32 values encoded by a codec, if there is a kernel for it.
func (p *planner) rounded(src kernel.Source, sum uintptr, codec kernel.Codec, op comm.ReduceOp) (l plan, ok bool) {
	var kernels pieces
	switch codec {
	case kernel.CodecI8:
		kernels = p.kernels.i8
	case kernel.CodecFP8:
		kernels = p.kernels.fp8
	default:
		return plan{}, false
	}
	if p.ranks == 1 || !sums(op) {
		return plan{}, false
	}
	c, ok := roundedParameters(src, sum)
	if !ok {
		return plan{}, false
	}
	if src.N == 0 { // no block has a tile, and nothing is launched
		return plan{}, true
	}
	share := ceilDiv(src.N, p.ranks)
	c.bytes = uint64(share * 4)
	c.sendStride = c.bytes
	c.recvStride = c.bytes
	if op == comm.Avg {
		c.factor = 1 / float32(p.ranks)
	}
	tiles := ceilDiv(share, tileValues)
	blocks := min(ceilDiv(tiles, 8), 2*p.resident(maxWidth), p.blocks) // two on each multiprocessor
	// A warp has four tiles in a round, or fewer if its block has no room for them.
	perSlot := min(ceilDiv(tiles, blocks), 4*roundedWidth/lineWidth, p.roundedRoom(blocks))
	c.tiles = uint32(perSlot)
	function := kernels.packed
	if share%4 != 0 {
		function = kernels.ragged
	}
	l = plan{kernel: function, blocks: blocks, width: min(perSlot*lineWidth, roundedWidth), call: c}
	return l, perSlot > 0
}

// roundedParameters returns the parameters of an allreduce of rounded values that do not depend on the number of
// ranks, if there is a kernel for the source.
func roundedParameters(src kernel.Source, sum uintptr) (c callParameters, ok bool) {
	c = callParameters{
		send:      uint64(src.X),
		recv:      uint64(sum),
		total:     uint64(src.N * 4),
		root:      noRank,
		keeper:    noRank,
		operation: uint32(comm.OpAllReduce),
		factor:    1,
	}
	if src.Take {
		c.lost = c.send
	}
	packed := true // the gradient begins at a multiple of four of its elements
	if src.Grad != 0 {
		c.gradType = gradTypeOf(src.DType)
		if c.gradType == gradNone || src.Keep != 0 {
			return c, false
		}
		c.send = uint64(cmp.Or(src.From, src.X))
		c.grad = uint64(src.Grad)
		c.gradFactor = uint64(src.Factor)
		packed = src.Grad%uintptr(4*src.DType.Size()) == 0
	}
	if packed && (c.send|c.recv|c.lost)%packBytes == 0 {
		c.aligned = 1
	}
	return c, true
}

// roundedRoom returns the number of tiles in a slot if there are this many blocks.
func (p *planner) roundedRoom(blocks int) int {
	places, _ := p.layout(p.ranks)
	slots := int(places.lines) * ringSlots * int(places.ringSlot)
	if p.ranks == 2 { // two stages share a place
		slots /= 2
	}
	return (slots/(blocks*roundedSlots) - slotAlignment) / tileBytes
}

func packsOf(bytes int) int { return ceilDiv(bytes, packBytes) }

// ceilDiv is the quotient of two positive numbers, rounded up.
func ceilDiv(n, d int) int { return (n + d - 1) / d }
