package main

import (
	"fmt"
	"slices"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/ir"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/tutti-go/tutti/internal/simd/gen/avx"
)

// A kernel combines all sources and stores to all destinations. Its registers hold one group of elements at a time.
// The group is loaded from the first source, combined with each other source, finished, and stored to each
// destination. So each source is read once, each destination is written once, and a destination may be a source.
type kernel struct {
	name  string
	cases []kindOp
	size  int // bytes of an element in memory
	// lanes is the number of elements in a full vector in memory. unroll is the number of vectors in one turn of the
	// main loop.
	lanes, unroll int
	// steps loads constants and returns the parts of the loops. count is the register with the number of sources.
	steps func(count reg.GPVirtual) steps
}

// kindOp is a reduction, with package dtype's names.
type kindOp struct{ kind, op string }

// steps are the parts of a kernel that depend on the kind and op. A vector of elements takes one or more registers
// while it is combined; w is its size in memory in bytes.
type steps struct {
	// load reads w bytes into accumulators.
	load func(w int, from Mem) vector
	// combine folds w bytes of the next source into the accumulators.
	combine func(w int, acc vector, from Mem)
	// finish converts the accumulators to one register of w bytes to store.
	finish func(w int, acc vector) reg.VecVirtual
}

// vector is a vector of elements while it is combined.
type vector []reg.VecVirtual

// arguments are the parameters of a kernel in registers.
type arguments struct {
	dsts, dstsEnd, srcs, srcsEnd, offset, left reg.GPVirtual
	stream                                     reg.GPVirtual
}

// kinds are in the order of the types of package dtype, and ops in the order of its reductions.
var (
	kinds = []string{"Invalid", "F64", "F32", "F16", "BF16", "FP8E4M3", "FP8E5M2",
		"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "Bool"}
	ops = []string{"Sum", "Prod", "Min", "Max", "Avg"}
)

// dispatch writes the function that jumps to the kernel of a type and op.
func dispatch(kernels []kernel) {
	avx.Kernel("reduceAVX2", "func(dsts, srcs []uintptr, from, n int, stream bool, dt, op uint8)")
	names := map[int]string{}
	var keys []int
	for _, k := range kernels {
		for _, c := range k.cases {
			key := slices.Index(kinds, c.kind)<<3 | slices.Index(ops, c.op)
			names[key] = k.name
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	key := Load(Param("dt"), GP32())
	op := Load(Param("op"), GP32())
	SHLL(Imm(3), key)
	ORL(op, key)
	var search func(keys []int)
	search = func(keys []int) {
		if len(keys) == 1 {
			target := LabelRef("·" + names[keys[0]] + "<>(SB)")
			Instruction(&ir.Instruction{Opcode: "JMP", Operands: []Op{target}, IsTerminal: true})
			return
		}
		middle := len(keys) / 2
		label := fmt.Sprintf("from%d", keys[middle])
		CMPL(key, Imm(uint64(keys[middle])))
		JGE(LabelRef(label))
		search(keys[:middle])
		Label(label)
		search(keys[middle:])
	}
	search(keys)
}

func (k kernel) generate() {
	avx.Kernel(k.name+"<>", "func(dsts, srcs []uintptr, from, n int, stream bool)")

	count := Load(Param("srcs").Len(), GP64()).(reg.GPVirtual)
	s := k.steps(count)
	a := k.arguments(count)

	width := k.lanes * k.size
	group := k.unroll * k.lanes
	TESTB(a.stream.As8(), a.stream.As8())
	JZ(LabelRef("groups"))
	Label("streams")
	CMPQ(a.left, U32(group))
	JLT(LabelRef("streamed"))
	k.group("stream", a, s, width, k.unroll, true)
	JMP(LabelRef("streams"))
	Label("streamed")
	SFENCE()

	Label("groups")
	CMPQ(a.left, U32(group))
	JLT(LabelRef("vectors"))
	k.group("group", a, s, width, k.unroll, false)
	JMP(LabelRef("groups"))

	Label("vectors")
	if k.unroll > 1 {
		CMPQ(a.left, U32(k.lanes))
		JLT(LabelRef("tail"))
		k.group("vector", a, s, width, 1, false)
		JMP(LabelRef("vectors"))
		Label("tail")
	}
	for lanes := k.lanes / 2; lanes > 0; lanes /= 2 {
		next := fmt.Sprintf("below%d", lanes)
		TESTQ(U32(lanes), a.left)
		JZ(LabelRef(next))
		k.group(fmt.Sprintf("tail%d", lanes), a, s, lanes*k.size, 1, false)
		Label(next)
	}

	VZEROUPPER()
	RET()
}

func (k kernel) arguments(count reg.GPVirtual) arguments {
	a := arguments{
		dsts:    Load(Param("dsts").Base(), GP64()).(reg.GPVirtual),
		dstsEnd: Load(Param("dsts").Len(), GP64()).(reg.GPVirtual),
		srcs:    Load(Param("srcs").Base(), GP64()).(reg.GPVirtual),
		srcsEnd: GP64(),
		offset:  Load(Param("from"), GP64()).(reg.GPVirtual),
		left:    Load(Param("n"), GP64()).(reg.GPVirtual),
		stream:  Load(Param("stream"), GP8()).(reg.GPVirtual),
	}
	LEAQ(Mem{Base: a.dsts, Index: a.dstsEnd, Scale: 8}, a.dstsEnd)
	LEAQ(Mem{Base: a.srcs, Index: count, Scale: 8}, a.srcsEnd)
	for size := 1; size < k.size; size *= 2 {
		ADDQ(a.offset, a.offset)
	}
	return a
}

// prefetchAhead is how many bytes ahead a streaming kernel prefetches a source. The hint says that the source, like
// the destinations, will not be used again.
const prefetchAhead = 512

// group handles unroll vectors of w bytes and advances past them. It uses streaming stores, which need aligned
// destinations, or ordinary ones. Labels start with name.
func (k kernel) group(name string, a arguments, s steps, w, unroll int, stream bool) {
	buffer := GP64()
	next := GP64()
	source := func(displacement int) Mem {
		return Mem{Base: buffer, Index: a.offset, Scale: 1, Disp: displacement}
	}
	prefetch := func() {
		for line := 0; stream && line < unroll*w; line += cacheLine {
			PREFETCHNTA(source(prefetchAhead + line))
		}
	}
	store := storeVector
	if stream {
		store = storeStream
	}

	MOVQ(Mem{Base: a.srcs}, buffer)
	prefetch()
	accs := make([]vector, unroll)
	for i := range accs {
		accs[i] = s.load(w, source(i*w))
	}
	LEAQ(Mem{Base: a.srcs, Disp: 8}, next)
	addresses(name+"_sources", next, a.srcsEnd, func() {
		MOVQ(Mem{Base: next}, buffer)
		prefetch()
		for i, acc := range accs {
			s.combine(w, acc, source(i*w))
		}
	})

	results := make(vector, unroll)
	for i, acc := range accs {
		results[i] = s.finish(w, acc)
	}
	MOVQ(a.dsts, next)
	addresses(name+"_stores", next, a.dstsEnd, func() {
		MOVQ(Mem{Base: next}, buffer)
		for i, result := range results {
			store(w, result, source(i*w))
		}
	})

	ADDQ(U32(unroll*w), a.offset)
	SUBQ(U32(unroll*w/k.size), a.left)
}

// addresses runs body while next, which advances by one address per turn, is below end.
func addresses(label string, next, end reg.GPVirtual, body func()) {
	CMPQ(next, end)
	JGE(LabelRef(label + "_end"))
	Label(label)
	body()
	ADDQ(Imm(8), next)
	CMPQ(next, end)
	JLT(LabelRef(label))
	Label(label + "_end")
}
