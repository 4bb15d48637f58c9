// Command select writes the AVX2 kernels that search and sum float32 arrays: selection and counting by magnitude key,
// sums, squared deviations, scaling.
//
// Each kernel handles whole blocks from the start of its slices and returns the number of elements it has handled.
// The calling Go code handles the remainder.
package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"

	. "github.com/tutti-go/tutti/internal/simd/gen/avx"
)

func main() {
	selectRange(false)
	selectRange(true)
	countRange()
	sum()
	squaredDeviations()
	scale()
	Generate()
}

const vector = 8 // float32 in one register

// loop walks over the slice parameter with the given name, step elements at a time, while a whole step is left and
// goOn, if not nil, does not jump to the label that it gets. body receives the address of the current element 0. The
// returned register counts the elements done.
func loop(name string, step int, goOn func(stop LabelRef), body func(x Mem, done Register)) Register {
	x := Load(Param(name).Base(), GP64())
	last := Load(Param(name).Len(), GP64())
	done := GP64()
	SUBQ(Imm(uint64(step)), last)
	XORQ(done, done)
	Label("loop")
	CMPQ(done, last)
	JGT(LabelRef("end"))
	if goOn != nil {
		goOn("end")
	}
	body(Mem{Base: x, Index: done, Scale: 4}, done)
	ADDQ(Imm(uint64(step)), done)
	JMP(LabelRef("loop"))
	Label("end")
	return done
}

// keys finds the elements with a key in the range [lo, lo+width].
type keys struct {
	magnitude, lo, width VecVirtual
}

// loadKeys loads the range from the parameters lo and width.
func loadKeys() keys {
	return keys{
		magnitude: Lanes(1<<31 - 1),
		lo:        Broadcast(Load(Param("lo"), GP32())),
		width:     Broadcast(Load(Param("width"), GP32())),
	}
}

// match returns all ones in the lanes of x (a register or memory) with a key in the range. The test is key-lo <=
// width in unsigned integers.
func (k keys) match(x Op) VecVirtual {
	hit := YMM()
	low := YMM()
	VPAND(x, k.magnitude, hit)
	VPSUBD(k.lo, hit, hit)
	VPMINUD(k.width, hit, low)
	VPCMPEQD(low, hit, hit)
	return hit
}

// selectRange works in two steps on tiles that stay in the first-level cache, so that no branch depends on the places
// of matches. The first step lists the blocks with a match: it writes each block to the list and advances by the
// outcome of the test. The second step compresses the matching lanes of each vector in these blocks to the front,
// with a permutation looked up by the mask of matches, stores all lanes, and advances by the number of matches.
//
// With a gradient, the first step adds it, so the second finds the sums in the cache. Elements that are left when
// there is no space for matches are still added. If the sums must bypass the caches, they are made in a separate tile
// and move from there to x.
func selectRange(withGrad bool) {
	const (
		vectors = 4
		block   = vectors * vector
		tile    = 16 // blocks
		line    = 64 // bytes of the caches
	)
	if withGrad {
		Kernel("addSelectAVX2",
			"func(x, from, grad []float32, factor float32, base int32, lo, width uint32, "+
				"idx []int32, val []float32, take, ahead bool, tile *[512]float32) (added, done, found int)",
			"addSelectAVX2 stores from + grad*factor in x, in whole blocks of 32 elements, and selects",
			"from these blocks while idx and val have room for another 32. take makes zero in x what it",
			"selects. ahead fetches what lies 8 KiB ahead, in from and grad or behind them. With a tile, stores to x,",
			"which begins at a multiple of 32 bytes, bypass the caches.")
	} else {
		Kernel("selectAVX2",
			"func(x []float32, base int32, lo, width uint32, "+
				"idx []int32, val []float32, take bool) (done, found int)",
			"selectAVX2 selects from whole blocks of 32 elements while idx and val have room for another 32.",
			"take makes zero in x what it selects.")
	}
	k := loadKeys()
	idx := Load(Param("idx").Base(), GP64())
	val := Load(Param("val").Base(), GP64())
	room := Load(Param("idx").Len(), GP64())
	SUBQ(Imm(block), room)
	found := GP64()
	done := GP64()
	last := GP64()
	XORQ(found, found)
	XORQ(done, done)
	Load(Param("x").Len(), last)
	SUBQ(Imm(block), last)
	// The source of the selection: x, or a tile, addressed as if it were at x.
	x := Mem{Base: Load(Param("x").Base(), GP64()), Scale: 4}
	var start Mem // of the tile
	// sum returns vector i of the block, with the gradient.
	sum := func(i int) Op {
		return x.Idx(done, 4).Offset(i * vector * 4)
	}
	// fetch has the caches get what a later block reads.
	fetch := func() {}
	if withGrad {
		start = AllocLocal(8)
		from := Mem{Base: Load(Param("from").Base(), GP64()), Scale: 4}
		grad := Mem{Base: Load(Param("grad").Base(), GP64()), Scale: 4}
		factor := YMM()
		VBROADCASTSS(Address(Param("factor")), factor)
		fetch = func() {
			const distance = 8 << 10 // bytes
			CMPB(Address(Param("ahead")), Imm(0))
			JE(LabelRef("fetched"))
			for offset := distance; offset < distance+4*block; offset += line {
				PREFETCHT1(from.Idx(done, 4).Offset(offset))
				PREFETCHT1(grad.Idx(done, 4).Offset(offset))
			}
			Label("fetched")
		}
		element := sum
		sum = func(i int) Op {
			v := YMM()
			term := YMM()
			VMULPS(grad.Idx(done, 4).Offset(i*vector*4), factor, term)
			VMOVUPS(from.Idx(done, 4).Offset(i*vector*4), v)
			VADDPS(term, v, v)
			VMOVUPS(v, element(i))
			return v
		}
	}
	list := AllocLocal(4 * tile)

	table := GP64()
	LEAQ(Permutations(), table)
	positions := YMM()
	VPADDD(Table("iota8", 0, 1, 2, 3, 4, 5, 6, 7), Broadcast(Load(Param("base"), GP32())), positions)
	step := Lanes(vector)

	Label("tile")
	CMPQ(done, last)
	JGT(LabelRef("end"))
	tileLast := GP64()
	listed := GP64()
	if withGrad {
		CMPQ(Address(Param("tile")), Imm(0))
		JE(LabelRef("placed"))
		MOVQ(done, start)
		MOVQ(done, listed)
		SHLQ(Imm(2), listed)
		MOVQ(Address(Param("tile")), x.Base)
		SUBQ(listed, x.Base)
		Label("placed")
	}
	LEAQ(Mem{Base: done, Disp: (tile - 1) * block}, tileLast)
	CMPQ(tileLast, last)
	CMOVQGT(last, tileLast)
	XORQ(listed, listed)

	Label("test")
	fetch()
	hits := make([]VecVirtual, vectors)
	for i := range hits {
		hits[i] = k.match(sum(i))
	}
	for n := vectors / 2; n > 0; n /= 2 {
		for i := range n {
			VPOR(hits[i], hits[i+n], hits[i])
		}
	}
	anyHit := GP32()
	VPMOVMSKB(hits[0], anyHit)
	MOVL(done.As32(), list.Idx(listed, 4))
	NEGL(anyHit) // carries unless it is zero
	ADCQ(Imm(0), listed)
	ADDQ(Imm(block), done)
	CMPQ(done, tileLast)
	JLE(LabelRef("test"))

	selected := "tile"
	if withGrad {
		selected = "selected"
	}
	next := GP64()
	XORQ(next, next)
	Label("compress")
	CMPQ(next, listed)
	JGE(LabelRef(selected))
	element := GP64()
	MOVL(list.Idx(next, 4), element.As32())
	CMPQ(found, room)
	JGT(LabelRef("full"))
	position := Broadcast(element.As32())
	VPADDD(positions, position, position)
	left := make([]VecVirtual, vectors)
	for i := range left {
		value := YMM()
		order := YMM()
		packed := YMM()
		mask := GP32()
		count := GP32()
		VMOVUPS(x.Idx(element, 4).Offset(i*vector*4), value)
		hit := k.match(value)
		left[i] = YMM()
		VANDNPS(value, hit, left[i])
		VMOVMSKPS(hit, mask)
		POPCNTL(mask, count)
		VPMOVZXBD(Mem{Base: table, Index: mask, Scale: 8}, order)
		VPERMD(position, order, packed)
		VMOVDQU(packed, Mem{Base: idx, Index: found, Scale: 4})
		VPERMPS(value, order, packed)
		VMOVUPS(packed, Mem{Base: val, Index: found, Scale: 4})
		ADDQ(count.As64(), found)
		if i < vectors-1 {
			VPADDD(step, position, position)
		}
	}
	INCQ(next)
	CMPB(Address(Param("take")), Imm(0))
	JE(LabelRef("compress"))
	for i := range left {
		VMOVUPS(left[i], x.Idx(element, 4).Offset(i*vector*4))
	}
	JMP(LabelRef("compress"))

	// stream copies the tile, if there is one, to x.
	stream := func(name string) {
		CMPQ(Address(Param("tile")), Imm(0))
		JE(LabelRef(name + "_end"))
		element := GP64()
		to := GP64()
		MOVQ(start, element)
		MOVQ(Address(Param("x").Base()), to)
		Label(name)
		for i := range vectors {
			v := YMM()
			VMOVUPS(x.Idx(element, 4).Offset(i*vector*4), v)
			VMOVNTPS(v, Mem{Base: to, Index: element, Scale: 4}.Offset(i*vector*4))
		}
		ADDQ(Imm(block), element)
		CMPQ(element, done)
		JL(LabelRef(name))
		Label(name + "_end")
	}
	if withGrad {
		Label(selected)
		stream("stream")
		JMP(LabelRef("tile"))
	}

	Label("full")
	if withGrad {
		Store(element, Return("done"))
		stream("last")
		MOVQ(Address(Param("x").Base()), x.Base)
		Label("rest")
		CMPQ(done, last)
		JGT(LabelRef("added"))
		for i := range vectors {
			sum(i)
		}
		ADDQ(Imm(block), done)
		JMP(LabelRef("rest"))
	} else {
		MOVQ(element, done)
	}
	Label("end")
	Store(done, Return("done"))
	Label("added")
	VZEROUPPER()
	if withGrad {
		SFENCE() // for stores that bypass the caches
		Store(done, Return("added"))
	}
	Store(found, Return("found"))
	RET()
}

// countRange subtracts the matches (all ones, that is -1) from a counter in each lane, which 2^31 elements cannot
// overflow.
func countRange() {
	const vectors = 4
	Kernel("countAVX2", "func(x []float32, lo, width uint32) (done, found int)",
		"countAVX2 counts in whole blocks of 32 elements.")
	k := loadKeys()
	counts := zeros(vectors)
	done := loop("x", vectors*vector, nil, func(x Mem, _ Register) {
		for i, count := range counts {
			VPSUBD(k.match(x.Offset(i*vector*4)), count, count)
		}
	})
	VPADDD(counts[0], counts[1], counts[0])
	VPADDD(counts[2], counts[3], counts[2])
	VPADDD(counts[0], counts[2], counts[0])
	found := GP32()
	VMOVD(Fold(counts[0], VPADDD), found)
	VZEROUPPER()
	Store(done, Return("done"))
	Store(found.As64(), Return("found"))
	RET()
}

// zeros returns n vectors of zeros.
func zeros(n int) []VecVirtual {
	list := make([]VecVirtual, n)
	for i := range list {
		list[i] = Zero()
	}
	return list
}

// sums writes the loop and the end of a kernel that adds terms in float64 to sixteen partial sums, four per register,
// and stores these in acc. term converts four elements, as float64, to their terms.
func sums(term func(x VecVirtual)) {
	const vectors, doubles = 4, 4
	acc := zeros(vectors)
	done := loop("x", vectors*doubles, nil, func(x Mem, _ Register) {
		for i := range acc {
			v := YMM()
			VCVTPS2PD(x.Offset(i*doubles*4), v)
			term(v)
			VADDPD(v, acc[i], acc[i])
		}
	})
	target := Mem{Base: Load(Param("acc"), GP64())}
	for i := range acc {
		VMOVUPD(acc[i], target.Offset(i*doubles*8))
	}
	VZEROUPPER()
	Store(done, ReturnIndex(0))
	RET()
}

func sum() {
	Kernel("sumAVX2", "func(x []float32, acc *[16]float64) (done int)",
		"sumAVX2 stores the partial sums of whole blocks of 16 elements in acc.")
	sums(func(VecVirtual) {})
}

func squaredDeviations() {
	Kernel("squareAVX2", "func(x []float32, center float64, acc *[16]float64) (done int)",
		"squareAVX2 stores the partial sums of (x-center)^2 of whole blocks of 16 elements in acc.",
		"It rounds products before it adds them, as the portable code does.")
	center := YMM()
	VBROADCASTSD(Address(Param("center")), center)
	sums(func(x VecVirtual) {
		VSUBPD(center, x, x)
		VMULPD(x, x, x)
	})
}

func scale() {
	const vectors = 4
	Kernel("scaleAVX2", "func(dst, src []float32, s float32) (done int)",
		"scaleAVX2 scales whole blocks of 32 elements.")
	factor := YMM()
	VBROADCASTSS(Address(Param("s")), factor)
	dst := Load(Param("dst").Base(), GP64())
	done := loop("src", vectors*vector, nil, func(x Mem, done Register) {
		for i := range vectors {
			v := YMM()
			VMULPS(x.Offset(i*vector*4), factor, v)
			VMOVUPS(v, Mem{Base: dst, Index: done, Scale: 4}.Offset(i*vector*4))
		}
	})
	VZEROUPPER()
	Store(done, ReturnIndex(0))
	RET()
}
