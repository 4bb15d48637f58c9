package p2p

import (
	"cmp"
	_ "embed"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cuda"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// The kernels' PTX, compiled from kernels/p2p.cu by runtime/cuda/kernels/generate.sh.
//
//go:embed kernels/p2p.ptx.gz
var compressed []byte

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

	tileValues, tileBytes       = 512, 528 // of rounded values
	roundedSlots, slotAlignment = 3, 128
	roundedWidth                = 320 // measured: threads of a block, at most
)

// layout holds the offsets and the sizes of the parts of a rank's scratch memory, in bytes. It
// is the same on all ranks, and a struct of the kernels.
type layout struct {
	words, wordsSize   uint64
	tagged, taggedSize uint64
	ring, ringSlot     uint64
	lines, chunk       uint32
}

// worldParameters is the kernels' struct world.
type worldParameters struct {
	rank, ranks uint32
	scratch     [maxRanks]uint64
	host        uint64
	at          layout
}

// callParameters is the kernels' struct call.
type callParameters struct {
	send, recv                 uint64
	bytes, total               uint64
	sendStride, recvStride     uint64
	reduction, root, operation uint32
	keeper, aligned, idle      uint32
	tiles                      uint32
	factor                     float32
	gradType                   uint32
	grad, gradFactor, lost     uint64
}

// launchParameters is the kernels' struct launch.
type launchParameters struct {
	world worldParameters
	call  callParameters
}

// watch is the kernels' struct watch: words in host memory that kernels and host share.
type watch struct {
	abort, told                uint32
	limit                      int64 // nanoseconds
	rank, peer, operation, why uint32
	epoch                      uint64
}

// The types of a gradient that is added to rounded values.
const (
	gradNone = iota
	gradF32
	gradF16
	gradBF16
)

// Why a rank aborts; what a peer tells is more than these.
const (
	whyAsked = iota
	whyTimedOut
)

// sizes are the parameters that must be equal on all ranks.
type sizes struct {
	words, tagged     int // bytes of each of the two places of a wire
	ringBlocks, chunk int // of kernels with rings, and packs of a slot
	once, twice       int // largest allreduce in one step and in two, in bytes
	blocks            int // most blocks of any kernel
}

// defaults returns the sizes for a number of ranks.
func defaults(ranks int) sizes {
	s := sizes{words: 8 << 20, tagged: 2 << 20, ringBlocks: 128, blocks: maxBlocks}
	switch {
	case ranks <= 2:
		s.once, s.chunk = 8<<20, 256
	case ranks <= 4:
		s.words, s.once, s.twice, s.chunk = 16<<20, 256<<10, 8<<20, 128
	default:
		s.once, s.twice, s.chunk = 96<<10, 4<<20, 64
	}
	return s
}

// layout places the parts, and returns their total size.
func (s sizes) layout(ranks int) (l layout, bytes int) {
	at := uint64(headBytes)
	l.words, l.wordsSize = at, uint64(s.words)
	at += 2 * l.wordsSize
	l.tagged, l.taggedSize = at, uint64(s.tagged)
	at += 2 * l.taggedSize
	l.ring, l.ringSlot = at, uint64(s.chunk*packBytes)
	l.lines, l.chunk = uint32(s.ringBlocks*maxWidth/lineWidth), uint32(s.chunk)
	stages := uint64(min(ranks, 3) - 1) // of an allreduce
	at += stages * 2 * uint64(l.lines) * ringSlots * uint64(ranks-1) * l.ringSlot
	return l, int(at)
}

// element is an element type in the kernels.
type element struct {
	name   string // in kernels' names
	signed bool
	words  bool // uses the sentinel wire, which reserves one value
}

var elements = [...]element{
	dtype.F64: {"f64", false, true}, dtype.F32: {"f32", false, true},
	dtype.F16: {"f16", false, true}, dtype.BF16: {"bf16", false, true},
	dtype.FP8E4M3: {"e4m3", false, false}, dtype.FP8E5M2: {"e5m2", false, false},
	dtype.I64: {"i64", true, false}, dtype.U64: {"i64", false, false},
	dtype.I32: {"i32", true, false}, dtype.U32: {"i32", false, false},
	dtype.I16: {"i16", true, false}, dtype.U16: {"i16", false, false},
	dtype.I8: {"i8", true, false}, dtype.U8: {"i8", false, false}, dtype.Bool: {"i8", false, false},
}

// The kernels' enum reduction.
const (
	reduceSum = iota
	reduceProduct
	reduceMinimum
	reduceMaximum
	reduceAverage
	reduceSignedMinimum
	reduceSignedMaximum
	reduceAny
	reduceAll
)

var reductions = [...]uint32{
	comm.Sum: reduceSum, comm.Prod: reduceProduct, comm.Min: reduceMinimum, comm.Max: reduceMaximum, comm.Avg: reduceAverage,
}

// reductionOf returns the kernels' number of a reduction.
func reductionOf(dt dtype.DType, op comm.ReduceOp) uint32 {
	switch {
	case dt == dtype.Bool && (op == comm.Sum || op == comm.Max):
		return reduceAny
	case dt == dtype.Bool:
		return reduceAll
	case elements[dt].signed && op == comm.Min:
		return reduceSignedMinimum
	case elements[dt].signed && op == comm.Max:
		return reduceSignedMaximum
	}
	return reductions[op]
}

// The families of kernels; those that reduce come once for each element.
const (
	kernelPair   = iota // sums of aligned buffers, of two ranks
	kernelAdd           // of more ranks
	kernelTwice         // of more ranks, in two steps
	kernelReduce        // all reductions
	kernelRing          // all reductions, of any size
	kernelFamilies
)

var familyNames = [kernelFamilies]string{"pair", "add", "twice", "reduce", "ring"}

// function is an entry point of the PTX.
type function struct {
	*cuda.Kernel
	dependent bool // starts early
}

// kernelSet is all kernels.
type kernelSet struct {
	byType         [kernelFamilies][len(elements)]*function // by dtype.DType
	move, moveRing *function
	leave          *function // tells the peers that this rank aborts
	i8, fp8        pieces    // allreduces of rounded values
	post, receive  *function // of lists
}

// pieces are the kernels of an allreduce whose pieces begin at packs, and of any other.
type pieces struct{ atPacks, ragged *function }

// load looks up all kernels in a module, of which some may start early.
func load(m *cuda.Module, early bool) (k kernelSet, err error) {
	found := map[string]*function{}
	find := func(name string, starts bool) *function {
		if found[name] == nil && err == nil {
			k := &function{dependent: early && starts}
			k.Kernel, err = m.Kernel(name)
			found[name] = k
		}
		return found[name]
	}
	for _, dt := range dtype.All() {
		e := elements[dt]
		for family, name := range familyNames {
			if e.words || family >= kernelReduce {
				// Those for small messages start early.
				k.byType[family][dt] = find(name+"_"+e.name, family <= kernelAdd)
			}
		}
	}
	k.move, k.moveRing, k.leave = find("move", true), find("move_ring", false), find("leave_all", false)
	k.i8 = pieces{find("rounded_i8", false), find("ragged_i8", false)}
	k.fp8 = pieces{find("rounded_e4m3", false), find("ragged_e4m3", false)}
	k.post, k.receive = find("post_list", false), find("receive_lists", true)
	return k, err
}

// all returns every kernel once.
func (k *kernelSet) all() (list []*function) {
	seen := map[*function]bool{nil: true}
	add := func(k *function) {
		if !seen[k] {
			seen[k] = true
			list = append(list, k)
		}
	}
	for _, family := range k.byType {
		for _, kernel := range family {
			add(kernel)
		}
	}
	for _, kernel := range []*function{
		k.move, k.moveRing, k.leave, k.post, k.receive, k.i8.atPacks, k.i8.ragged, k.fp8.atPacks, k.fp8.ragged,
	} {
		add(kernel)
	}
	return list
}

// plan is the launch of one operation. It depends on the operation's arguments alone, so
// that all ranks launch the same.
type plan struct {
	kernel        *function
	blocks, width int
	call          callParameters
}

// planner makes plans for a world.
type planner struct {
	sizes
	ranks           int
	multiprocessors int // that each rank has to itself, at least; 0: enough for all blocks
	kernels         kernelSet
}

// spareMultiprocessors are those that a kernel leaves to others. Where ranks use two communicators in
// opposite order, the kernel of each GPU waits for one that finds room there only.
const spareMultiprocessors = 4

// resident is how many blocks of so many threads find room at once on every rank's GPU, beside those of
// another kernel. Blocks of different ranks wait for each other. Each kernel has at most 128 registers, so
// that a multiprocessor has room for maxWidth threads.
func (p *planner) resident(width int) int {
	if p.multiprocessors == 0 {
		return p.blocks
	}
	occupied := max(p.multiprocessors-spareMultiprocessors, 1)
	return min(p.blocks, occupied*(maxWidth/width))
}

func packsOf(bytes int) int { return (bytes + packBytes - 1) / packBytes }

// allReduce plans an allreduce of count elements, at least one.
func (p *planner) allReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) plan {
	bytes := count * dt.Size()
	packs := packsOf(bytes)
	c := callParameters{
		send: uint64(send), recv: uint64(recv), bytes: uint64(bytes), total: uint64(bytes),
		reduction: reductionOf(dt, op), root: noRank, keeper: noRank, operation: uint32(comm.OpAllReduce),
	}
	if p.ranks == 1 && dt != dtype.Bool {
		return p.move(c) // bit by bit
	}
	if wire, place := p.wire(dt); bytes <= p.once && (p.ranks-1)*packs*wire <= place || p.ranks == 1 {
		return p.reduce(dt, op, packs, c)
	}
	if p.ranks == 2 {
		return p.inRings(p.kernels.byType[kernelRing][dt], packs, c)
	}
	share := (packs + p.ranks - 1) / p.ranks
	c.bytes = uint64(share * packBytes)
	c.sendStride, c.recvStride = c.bytes, c.bytes
	if packs > share*(p.ranks-1) && // every rank has a share to reduce
		elements[dt].words && bytes <= p.twice && 2*(p.ranks-1)*share*packBytes <= p.words {
		return p.atOnce(p.kernels.byType[kernelTwice][dt], share, c)
	}
	return p.inRings(p.kernels.byType[kernelRing][dt], share, c)
}

func sums(op comm.ReduceOp) bool { return op == comm.Sum || op == comm.Avg }

// wire returns the bytes of a pack on the wire of a type, and those of each of the wire's
// two places.
func (p *planner) wire(dt dtype.DType) (pack, place int) {
	if elements[dt].words {
		return packBytes, p.words
	}
	return 2 * packBytes, p.tagged
}

// reduce plans a reduction at once.
func (p *planner) reduce(dt dtype.DType, op comm.ReduceOp, packs int, c callParameters) plan {
	family := kernelReduce
	switch {
	case !elements[dt].words || !sums(op) || !c.isAligned():
	case p.ranks == 2:
		family = kernelPair
	default:
		family = kernelAdd
	}
	return p.atOnce(p.kernels.byType[family][dt], packs, c)
}

// reduceTo plans a reduction to a root, of a type that uses the tagged wire.
func (p *planner) reduceTo(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp, root int) plan {
	l := p.allReduce(send, recv, count, dt, op)
	l.call.keeper, l.call.operation = uint32(root), uint32(comm.OpReduce)
	return l
}

// reduceScatter plans a reduce-scatter of count elements for each rank.
func (p *planner) reduceScatter(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) plan {
	bytes := count * dt.Size()
	packs := packsOf(bytes)
	c := callParameters{
		send: uint64(send), recv: uint64(recv), bytes: uint64(bytes), total: uint64(bytes * p.ranks), sendStride: uint64(bytes),
		reduction: reductionOf(dt, op), root: noRank, keeper: noRank, operation: uint32(comm.OpReduceScatter),
	}
	if p.ranks == 1 {
		return p.allReduce(send, recv, count, dt, op)
	}
	if wire, place := p.wire(dt); (p.ranks-1)*packs*wire <= place {
		return p.reduce(dt, op, packs, c)
	}
	return p.inRings(p.kernels.byType[kernelRing][dt], packs, c)
}

// allGather plans an allgather, given the bytes of each rank.
func (p *planner) allGather(send, recv uintptr, bytes int) plan {
	return p.move(callParameters{
		send: uint64(send), recv: uint64(recv), bytes: uint64(bytes), total: uint64(bytes), recvStride: uint64(bytes),
		root: noRank, keeper: noRank, operation: uint32(comm.OpAllGather),
	})
}

// allToAll plans an exchange, given the bytes between any two ranks.
func (p *planner) allToAll(send, recv uintptr, bytes int) plan {
	return p.move(callParameters{
		send: uint64(send), recv: uint64(recv), bytes: uint64(bytes), total: uint64(bytes * p.ranks),
		sendStride: uint64(bytes), recvStride: uint64(bytes), root: noRank, keeper: noRank, operation: uint32(comm.OpAllToAll),
	})
}

// broadcast plans a broadcast.
func (p *planner) broadcast(buf uintptr, bytes, root int) plan {
	return p.move(callParameters{
		send: uint64(buf), recv: uint64(buf), bytes: uint64(bytes), total: uint64(bytes),
		root: uint32(root), keeper: noRank, operation: uint32(comm.OpBroadcast),
	})
}

// barrier plans a barrier.
func (p *planner) barrier() plan {
	return p.move(callParameters{root: noRank, keeper: noRank, operation: uint32(comm.OpBarrier)})
}

// rounded plans an allreduce of float32 values that travel in a codec, if there is a kernel for it.
func (p *planner) rounded(src kernel.Source, to uintptr, codec kernel.Codec, op comm.ReduceOp) (l plan, ok bool) {
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
	share := (src.N + p.ranks - 1) / p.ranks
	l.kernel = kernels.atPacks
	if share%4 != 0 {
		l.kernel = kernels.ragged
	}
	c := callParameters{
		send: uint64(src.X), recv: uint64(to), bytes: uint64(share * 4), total: uint64(src.N * 4), sendStride: uint64(share * 4), recvStride: uint64(share * 4),
		root: noRank, keeper: noRank, operation: uint32(comm.OpAllReduce), factor: 1,
	}
	if src.Take {
		c.lost = c.send
	}
	if src.Grad != 0 {
		switch src.DType {
		case dtype.F32:
			c.gradType = gradF32
		case dtype.F16:
			c.gradType = gradF16
		case dtype.BF16:
			c.gradType = gradBF16
		}
		if c.gradType == gradNone || src.Keep != 0 {
			return plan{}, false
		}
		c.send, c.grad, c.gradFactor = uint64(cmp.Or(src.From, src.X)), uint64(src.Grad), uint64(src.Factor)
	}
	if op == comm.Avg {
		c.factor = 1 / float32(p.ranks)
	}
	tiles := (share + tileValues - 1) / tileValues
	l.blocks = min((tiles+7)/8, 2*p.resident(maxWidth), p.blocks) // two of a multiprocessor
	// A warp has four tiles in a round, or as many as its block has room for.
	each := min((tiles+l.blocks-1)/l.blocks, 4*roundedWidth/lineWidth, p.roundedRoom(l.blocks))
	c.tiles = uint32(each)
	l.width = min(each*lineWidth, roundedWidth)
	l.call = c
	if (c.send|c.recv|c.lost)%packBytes == 0 && (src.Grad == 0 || src.Grad%uintptr(4*src.DType.Size()) == 0) {
		l.call.aligned = 1
	}
	return l, each > 0
}

// roundedRoom returns how many tiles a slot of one of so many blocks has room for.
func (p *planner) roundedRoom(blocks int) int {
	at, _ := p.layout(p.ranks)
	slots := int(at.lines) * ringSlots * int(at.ringSlot)
	if p.ranks == 2 { // two stages share a place
		slots /= 2
	}
	return (slots/(blocks*roundedSlots) - slotAlignment) / tileBytes
}

func (p *planner) move(c callParameters) plan {
	packs := packsOf(int(c.bytes))
	if (p.ranks-1)*(packs+1)*2*packBytes <= p.tagged {
		return p.atOnce(p.kernels.move, packs, c)
	}
	return p.inRings(p.kernels.moveRing, packs, c)
}

// atOnce is a plan in which each thread has few packs of a piece.
func (p *planner) atOnce(k *function, packs int, c callParameters) plan {
	blocks, width := geometry(packs)
	return plan{kernel: k, blocks: min(blocks, p.resident(width)), width: width, call: c.checked()}
}

// isAligned reports whether all pieces of all buffers start at packs.
func (c callParameters) isAligned() bool {
	return (c.send|c.recv|c.lost|c.sendStride|c.recvStride)%packBytes == 0
}

// checked sets aligned.
func (c callParameters) checked() callParameters {
	c.aligned = 0
	if c.isAligned() {
		c.aligned = 1
	}
	return c
}

// geometry returns the measured best number of blocks, and of threads in each, for a number
// of packs.
func geometry(packs int) (blocks, width int) {
	switch {
	case packs <= 64:
		return 1, 64
	case packs <= 256:
		return 1, (packs + 31) / 32 * 32
	case packs <= 2048:
		return (packs + 63) / 64, 64
	case packs <= 4096:
		return 64, 64
	case packs <= 16384:
		return 128, 128
	case packs <= 32768:
		return 256, 128
	}
	return 128, maxWidth
}

// inRings is a plan for messages that fit no other wire.
func (p *planner) inRings(k *function, packs int, c callParameters) plan {
	stripe := p.chunk * maxWidth / lineWidth
	blocks := (packs + stripe - 1) / stripe
	return plan{kernel: k, blocks: min(max(blocks, 1), p.ringBlocks, p.resident(maxWidth)), width: maxWidth, call: c.checked()}
}
