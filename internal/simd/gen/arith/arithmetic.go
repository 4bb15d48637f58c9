package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/tutti-go/tutti/internal/simd/gen/avx"
)

// instruction is an instruction with its operands in Go's order: sources from last to first, then the destination.
type instruction = func(ops ...Op)

// combiner emits acc = acc op next on registers of w bytes.
type combiner func(w int, acc, next reg.VecVirtual)

// finisher emits the conversion of an accumulator to a register of w bytes to store, and returns that register.
type finisher func(w int, acc reg.VecVirtual) reg.VecVirtual

// floatOps holds the instructions of a float type.
type floatOps struct {
	add, min, max, div, compare instruction
	blend                       func(mask, set, clear, dst Op)
	fromInt                     func(value, from, to Op)
	broadcast                   instruction
	// quietNaN returns a register with a NaN in every lane, in which only the quiet bit of the mantissa is set.
	quietNaN func() reg.VecVirtual
}

var float32s = floatOps{
	add: VADDPS, min: VMINPS, max: VMAXPS, div: VDIVPS,
	compare: VCMPPS, blend: VBLENDVPS, fromInt: VCVTSI2SSQ, broadcast: VBROADCASTSS,
	quietNaN: func() reg.VecVirtual { return avx.Lanes(0x7fc00000) },
}

var float64s = floatOps{
	add: VADDPD, min: VMINPD, max: VMAXPD, div: VDIVPD,
	compare: VCMPPD, blend: VBLENDVPD, fromInt: VCVTSI2SDQ, broadcast: VBROADCASTSD,
	quietNaN: func() reg.VecVirtual { return broadcast64(0x7ff8 << 48) },
}

// asIs is the finisher for accumulators that are results.
func asIs(_ int, acc reg.VecVirtual) reg.VecVirtual { return acc }

// arithmetic returns an op's combiner of accumulators and its finisher. count is the register with the number of
// sources.
func (f floatOps) arithmetic(op string, count reg.GPVirtual) (combiner, finisher) {
	switch op {
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

// extremum returns the combiner of a minimum or maximum. The processor's instruction returns its second operand if
// both are zeros, so it is used in both orders and the signs are merged. It also returns the second operand if either
// is a NaN.
func (f floatOps) extremum(pick, mergeSigns instruction) combiner {
	nan := f.quietNaN()
	return func(w int, acc, next reg.VecVirtual) {
		const isUnordered = 3
		unordered := sized(w, YMM())
		swapped := sized(w, YMM())
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
