package main

import (
	"fmt"
	"strings"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/tutti-go/tutti/internal/simd/gen/avx"
)

// reductions lists the kernels: sums, averages and extrema of the float types of gradients, sums of the integer types
// of compressed gradients, and sums of bytes, with which Copy streams. Portable code computes other reductions;
// package hostops knows which (vectorized).
func reductions() []kernel {
	all := []kernel{integerSum(8), integerSum(32)}
	for _, op := range []string{"Sum", "Avg", "Min", "Max"} {
		all = append(all,
			floats("F64", 8, op, float64s),
			floats("F32", 4, op, float32s),
			halves(op),
			bfloats(op))
	}
	for _, f := range fp8Formats {
		all = append(all, f.reduction("Sum"), f.reduction("Avg"))
	}
	return all
}

// newKernel returns the kernel of an op on the kinds, without its steps.
func newKernel(op string, size, lanes int, kinds ...string) kernel {
	k := kernel{
		name:   strings.ToLower(op) + kinds[0],
		size:   size,
		lanes:  lanes,
		unroll: 4,
	}
	for _, kind := range kinds {
		k.cases = append(k.cases, kindOp{kind, op})
	}
	return k
}

// single makes k combine vectors of one register each, which load loads.
func (k kernel) single(load func(w int, from Mem) reg.VecVirtual,
	parts func(count reg.GPVirtual) (combiner, finisher)) kernel {
	k.steps = func(count reg.GPVirtual) steps {
		combine, finish := parts(count)
		return steps{
			load: func(w int, from Mem) vector {
				return vector{load(w, from)}
			},
			combine: func(w int, acc vector, from Mem) {
				combine(w, acc[0], load(w, from))
			},
			finish: func(w int, acc vector) reg.VecVirtual {
				return finish(w, acc[0])
			},
		}
	}
	return k
}

// floats returns a kernel of floats that are computed in the type in which they are stored.
func floats(kind string, size int, op string, f floatOps) kernel {
	parts := func(count reg.GPVirtual) (combiner, finisher) {
		return f.arithmetic(op, count)
	}
	return newKernel(op, size, ymmBytes/size, kind).single(loadVector, parts)
}

// halves returns a kernel of binary16, which F16C converts. The accumulators are twice as wide as the elements.
func halves(op string) kernel {
	return newKernel(op, 2, ymmBytes/4, "F16").single(widenF16, func(count reg.GPVirtual) (combiner, finisher) {
		combine, finish := float32s.arithmetic(op, count)
		return func(w int, acc, next reg.VecVirtual) { combine(2*w, acc, next) },
			func(w int, acc reg.VecVirtual) reg.VecVirtual { return narrowF16(w, finish(2*w, acc)) }
	})
}

// bfloats returns a kernel of bfloat16. Two neighbors share a 32-bit lane, so a shift widens the even elements and a
// mask the odd ones, and no element leaves its lane.
//
// Rounding needs no special treatment of NaNs here: the lower halves of their payloads are zero, because widening or
// the processor made them, so nothing carries.
func bfloats(op string) kernel {
	k := newKernel(op, 2, ymmBytes/2, "BF16")
	k.unroll = 2
	k.steps = func(count reg.GPVirtual) steps {
		combine, finish := float32s.arithmetic(op, count)
		upper := avx.Lanes(0xffff0000)
		rounding := newBF16Rounding()
		load := func(w int, from Mem) vector {
			odd := loadVector(w, from)
			even := sized(w, YMM())
			VPSLLD(Imm(16), odd, even)
			VPAND(sized(w, upper), odd, odd)
			return vector{even, odd}
		}
		return steps{
			load: load,
			combine: func(w int, acc vector, from Mem) {
				next := load(w, from)
				combine(w, acc[0], next[0])
				combine(w, acc[1], next[1])
			},
			finish: func(w int, acc vector) reg.VecVirtual {
				even := acc[0]
				odd := acc[1]
				for _, v := range acc {
					finish(w, v)
					rounding.add(w, v)
				}
				VPSRLD(Imm(16), even, even)
				VPBLENDW(Imm(0xaa), odd, even, even)
				return even
			},
		}
	}
	return k
}

// integerSum returns the kernel of sums of integers. Signed and unsigned numbers are the same modulo 2^bits.
func integerSum(bits int) kernel {
	add := VPADDD
	if bits == 8 {
		add = VPADDB
	}
	signed := fmt.Sprintf("I%d", bits)
	unsigned := fmt.Sprintf("U%d", bits)
	k := newKernel("Sum", bits/8, ymmBytes*8/bits, signed, unsigned)
	return k.single(loadVector, func(reg.GPVirtual) (combiner, finisher) {
		return inPlace(add), asIs
	})
}
