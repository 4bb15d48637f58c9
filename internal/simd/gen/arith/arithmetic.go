package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/tutti-go/tutti/internal/simd/gen/avx"
)

// instruction is an instruction with its operands in Go's order: sources from
// the last to the first, then the destination.
type instruction = func(ops ...Op)

// combiner emits acc = acc op next on registers of w bytes.
type combiner func(w int, acc, next reg.VecVirtual)

// finisher emits what makes of an accumulator a register of w bytes to be stored, and returns that.
type finisher func(w int, acc reg.VecVirtual) reg.VecVirtual

// floatOps are the instructions of a float type.
type floatOps struct {
	add, mul, min, max, div, compare instruction
	blend                            func(mask, set, clear, dst Op)
	fromInt                          func(value, from, to Op)
	broadcast                        instruction
	// quietNaN returns the NaN that has only the quiet bit set, in every lane.
	quietNaN func() reg.VecVirtual
}

var float32s = floatOps{
	add: VADDPS, mul: VMULPS, min: VMINPS, max: VMAXPS, div: VDIVPS,
	compare: VCMPPS, blend: VBLENDVPS, fromInt: VCVTSI2SSQ, broadcast: VBROADCASTSS,
	quietNaN: func() reg.VecVirtual { return avx.Lanes(0x7fc00000) },
}

var float64s = floatOps{
	add: VADDPD, mul: VMULPD, min: VMINPD, max: VMAXPD, div: VDIVPD,
	compare: VCMPPD, blend: VBLENDVPD, fromInt: VCVTSI2SDQ, broadcast: VBROADCASTSD,
	quietNaN: func() reg.VecVirtual { return broadcast64(0x7ff8 << 48) },
}

// asIs is the finisher of accumulators that are results.
func asIs(_ int, acc reg.VecVirtual) reg.VecVirtual { return acc }

// arithmetic returns how an op combines accumulators and what it does to the
// final ones. count is the register with the number of sources.
func (f floatOps) arithmetic(op string, count reg.GPVirtual) (combiner, finisher) {
	switch op {
	case "Prod":
		return inPlace(f.mul), asIs
	case "Min":
		return f.extremum(f.min, VORPS), asIs
	case "Max":
		return f.extremum(f.max, VANDPS), asIs
	case "Avg":
		by := avx.Zero()
		f.fromInt(count, by.AsX(), by.AsX())
		f.broadcast(by.AsX(), by)
		return inPlace(f.add), func(w int, acc reg.VecVirtual) reg.VecVirtual {
			f.div(sized(w, by), acc, acc)
			return acc
		}
	}
	return inPlace(f.add), asIs
}

// extremum returns the combiner of a minimum or maximum. The processor's gives
// its second operand when both are zeros, so it is asked twice and the signs
// are merged; it would also give the second operand if one were a NaN.
func (f floatOps) extremum(pick, mergeSigns instruction) combiner {
	nan := f.quietNaN()
	return func(w int, acc, next reg.VecVirtual) {
		const isUnordered = 3
		unordered, swapped := sized(w, YMM()), sized(w, YMM())
		f.compare(Imm(isUnordered), next, acc, unordered)
		pick(acc, next, swapped)
		pick(next, acc, acc)
		mergeSigns(swapped, acc, acc)
		f.blend(unordered, sized(w, nan), acc, acc)
	}
}

// inPlace returns the combiner of an instruction.
func inPlace(i instruction) combiner {
	return func(_ int, acc, next reg.VecVirtual) { i(next, acc, acc) }
}

// integerOp returns the combiner of an op on integers of a kind.
func integerOp(op, kind string) combiner {
	simple := map[string]instruction{
		"SumI8": VPADDB, "SumI16": VPADDW, "SumI32": VPADDD, "SumI64": VPADDQ,
		"ProdI16": VPMULLW, "ProdI32": VPMULLD,
		"MinI8": VPMINSB, "MinI16": VPMINSW, "MinI32": VPMINSD,
		"MinU8": VPMINUB, "MinU16": VPMINUW, "MinU32": VPMINUD,
		"MaxI8": VPMAXSB, "MaxI16": VPMAXSW, "MaxI32": VPMAXSD,
		"MaxU8": VPMAXUB, "MaxU16": VPMAXUW, "MaxU32": VPMAXUD,
	}
	if i, ok := simple[op+kind]; ok {
		return inPlace(i)
	}
	switch op + kind {
	case "ProdI8":
		return multiplyBytes()
	case "ProdI64":
		return multiplyQuads
	case "MinU64", "MaxU64":
		return extremumQuads(op, broadcast64(1<<63))
	}
	return extremumQuads(op, nil)
}

// multiplyBytes returns the combiner of 8-bit products. There is no such
// instruction: the even and odd bytes are multiplied as 16-bit numbers.
func multiplyBytes() combiner {
	evenBytes := avx.Lanes(0x00ff00ff)
	return func(w int, acc, next reg.VecVirtual) {
		odd := sized(w, YMM())
		VPSRLW(Imm(8), acc, odd)
		VPMULLW(next, acc, acc)
		VPAND(sized(w, evenBytes), acc, acc)
		VPSRLW(Imm(8), next, next)
		VPMULLW(next, odd, odd)
		VPSLLW(Imm(8), odd, odd)
		VPOR(odd, acc, acc)
	}
}

// multiplyQuads emits the lower halves of 64-bit products from those of the
// 32-bit halves: lo·lo + 2^32 (lo·hi + hi·lo).
func multiplyQuads(w int, acc, next reg.VecVirtual) {
	cross, crossed := sized(w, YMM()), sized(w, YMM())
	VPSRLQ(Imm(32), next, cross)
	VPMULUDQ(cross, acc, cross)
	VPSRLQ(Imm(32), acc, crossed)
	VPMULUDQ(next, crossed, crossed)
	VPADDQ(crossed, cross, cross)
	VPSLLQ(Imm(32), cross, cross)
	VPMULUDQ(next, acc, acc)
	VPADDQ(cross, acc, acc)
}

// extremumQuads returns the combiner of the minimum or maximum of 64-bit
// integers by a signed comparison. Unsigned numbers are compared with their
// upper bit, flip, inverted.
func extremumQuads(op string, flip reg.VecVirtual) combiner {
	return func(w int, acc, next reg.VecVirtual) {
		greater := sized(w, YMM()) // all ones where acc > next
		if flip == nil {
			VPCMPGTQ(next, acc, greater)
		} else {
			flipped := sized(w, YMM())
			VPXOR(sized(w, flip), acc, greater)
			VPXOR(sized(w, flip), next, flipped)
			VPCMPGTQ(flipped, greater, greater)
		}
		if op == "Max" {
			VBLENDVPD(greater, acc, next, acc)
		} else {
			VBLENDVPD(greater, next, acc, acc)
		}
	}
}
