package hostops

import (
	"math"
	"slices"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/simd/simdtest"
)

// refReduce combines the bits of elements, one of each source.
func refReduce(k dtype.DType, op reductions.Op, sources []uint64) uint64 {
	if len(sources) == 1 && k != dtype.Bool {
		return sources[0]
	}
	switch {
	case k == dtype.Bool:
		return refBool(op, sources)
	case k.IsFloat():
		return refFloat(k, op, sources)
	}
	return refInteger(k, op, sources)
}

func refBool(op reductions.Op, sources []uint64) uint64 {
	isTrue := func(b uint64) bool { return b != 0 }
	isFalse := func(b uint64) bool { return b == 0 }
	result := slices.ContainsFunc(sources, isTrue)
	if op == reductions.Prod || op == reductions.Min {
		result = !slices.ContainsFunc(sources, isFalse)
	}
	if result {
		return 1
	}
	return 0
}

func refInteger(k dtype.DType, op reductions.Op, sources []uint64) uint64 {
	unused := 64 - 8*k.Size()
	less := func(a, b uint64) bool { return a<<unused < b<<unused }
	if k.IsSigned() {
		less = func(a, b uint64) bool { return int64(a<<unused) < int64(b<<unused) }
	}
	acc := sources[0]
	for _, next := range sources[1:] {
		switch {
		case op == reductions.Sum:
			acc += next
		case op == reductions.Prod:
			acc *= next
		case op == reductions.Min && less(next, acc), op == reductions.Max && less(acc, next):
			acc = next
		}
	}
	return acc << unused >> unused
}

// refFloat accumulates in float64, rounding to the precision of the
// accumulator after every step: for float32 that gives the same as float32
// arithmetic, because 53 >= 2*24+2 bits.
func refFloat(k dtype.DType, op reductions.Op, sources []uint64) uint64 {
	round := func(v float64) float64 { return float64(float32(v)) }
	if k == dtype.F64 {
		round = func(v float64) float64 { return v }
	}
	acc := simdtest.Decode(k, sources[0])
	for _, bits := range sources[1:] {
		next := simdtest.Decode(k, bits)
		switch op {
		case reductions.Sum, reductions.Avg:
			acc = round(acc + next)
		case reductions.Prod:
			acc = round(acc * next)
		case reductions.Min:
			acc = math.Min(acc, next)
		case reductions.Max:
			acc = math.Max(acc, next)
		}
		// math.Min prefers an infinity to a NaN.
		if (op == reductions.Min || op == reductions.Max) && (acc != acc || next != next || simdtest.IsNaN(k, sources...)) {
			acc = math.NaN()
		}
	}
	if op == reductions.Avg {
		acc = round(acc / float64(len(sources)))
	}
	if acc != acc {
		return simdtest.QuietNaN(k)
	}
	return simdtest.Encode(k, acc)
}
