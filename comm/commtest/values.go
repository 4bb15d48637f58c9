package commtest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// period is the number of distinct elements in an input; longer ones repeat.
// It is prime, so that an implementation which mixes up blocks (whose sizes
// are anything but a multiple of it) computes something else.
const period = 1009

// mix hashes three numbers (SplitMix64's finalizer over a linear combination):
// the suite's only source of "random" data, the same in every process.
func mix(a, b, c uint64) uint64 {
	x := a*0x9E3779B97F4A7C15 + b*0xC2B2AE3D27D4EB4F + c*0x165667B19E3779F9 + 0x27D4EB2F165667C5
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}

// payload returns n bytes for a collective that only moves data: any bit
// patterns, different for every key.
func payload(n int, keys ...int) []byte {
	seed := uint64(len(keys))
	for _, k := range keys {
		seed = mix(seed, uint64(k), 1)
	}
	block := make([]byte, 0, 4096)
	for i := 0; len(block) < min(n, 4093); i++ {
		block = binary.LittleEndian.AppendUint64(block, mix(seed, uint64(i), 2))
	}
	if n <= 4093 {
		return block[:n]
	}
	return tile(block[:4093], 0, n)
}

// tile returns n bytes of the endless repetition of block, from offset on.
func tile(block []byte, offset, n int) []byte {
	out := make([]byte, n)
	done := copy(out, block[offset%len(block):])
	for done < n {
		// Once a whole block is there, the output repeats itself: copy ever
		// larger pieces.
		if done >= len(block) {
			done += copy(out[done:], out[done-len(block)*(done/len(block)):done])
			continue
		}
		done += copy(out[done:], block)
	}
	return out
}

// precision is the number of significant bits of a float type.
func precision(dt dtype.DType) int {
	switch dt {
	case dtype.F64:
		return 53
	case dtype.F32:
		return 24
	case dtype.F16:
		return 11
	case dtype.BF16:
		return 8
	case dtype.FP8E4M3:
		return 4
	case dtype.FP8E5M2:
		return 3
	}
	panic("commtest: precision of " + dt.String())
}

// reductionInput returns one period of a rank's input to a reduction, encoded.
func reductionInput(dt dtype.DType, op comm.ReduceOp, rank, size int) []byte {
	switch {
	case dt.IsFloat():
		return encodeFloats(dt, floatInput(dt, op, rank, size))
	case dt == dtype.Bool:
		return boolInput(op, rank, size)
	}
	out := make([]byte, 0, period*dt.Size())
	for i := range period {
		out = appendInt(out, intInput(op, rank, i), dt)
	}
	return out
}

// exactElement reports whether element i of a float input is chosen so that
// every partial result, in any order, is representable: the reduction must
// then be exact however often a backend rounds. The others carry full
// mantissas and are compared with a tolerance.
func exactElement(dt dtype.DType, op comm.ReduceOp, i int) bool {
	switch op {
	case comm.Min, comm.Max:
		return true
	case comm.Prod:
		return precision(dt) < 8 || i%3 != 0
	}
	return i%3 != 0
}

// floatInput returns a rank's values before they are rounded to dt.
func floatInput(dt dtype.DType, op comm.ReduceOp, rank, size int) []float64 {
	out := make([]float64, period)
	for i := range out {
		h := mix(uint64(rank), uint64(i), 3)
		sign := 1 - 2*float64(h&1)
		if i%5 == 0 {
			sign = 1 // sums that do not cancel tell Sum from Avg
		}
		fraction := float64(h>>11) / (1 << 53) // [0, 1)
		switch exact := exactElement(dt, op, i); {
		case op == comm.Min || op == comm.Max:
			out[i] = sign * (1 + 15*fraction)
		case op == comm.Prod:
			// At most five ranks differ from 1, so nothing overflows.
			factor := 0.5 + 1.5*fraction
			if exact {
				factor = math.Ldexp(1, int(h>>1%3)-1)
			}
			if (rank+i)%((size+3)/4) != 0 {
				factor = 1
			}
			out[i] = sign * factor
		case exact:
			out[i] = sign * exactTerm(dt, h>>1, rank+i, size)
		default:
			out[i] = sign * (0.25 + 3*fraction)
		}
	}
	return out
}

// exactTerm returns a positive integer (or zero) small enough that the sum
// over all ranks is an exact number of the type.
func exactTerm(dt dtype.DType, h uint64, turn, size int) float64 {
	limit := 1 << min(precision(dt), 20)
	if size <= limit {
		return float64(1 + h%uint64(limit/size))
	}
	if turn%((size+limit-1)/limit) == 0 {
		return 1
	}
	return 0
}

// intInput returns a rank's element i: small numbers of both signs, and any bit
// pattern, so that sums and products wrap around.
func intInput(op comm.ReduceOp, rank, i int) uint64 {
	h := mix(uint64(rank), uint64(i), 4)
	if i%3 == 0 {
		h = uint64(int64(h%19) - 9)
	}
	if op == comm.Prod && i%4 != 0 {
		h |= 1 // or products would soon be zero
	}
	return h
}

// boolInput returns booleans, about half of whose reductions are true. Any byte
// but zero is true, though 1 is what most of them are.
func boolInput(op comm.ReduceOp, rank, size int) []byte {
	or := op == comm.Sum || op == comm.Max
	out := make([]byte, period)
	for i := range out {
		h := mix(uint64(rank), uint64(i), 5)
		rare := h%uint64(2*size) == 0
		if rare == or {
			out[i] = 1
			if i%4 == 0 {
				out[i] = byte(h>>56) | 2
			}
		}
	}
	return out
}

// reference is what a reduction must give, one period of it.
type reference struct {
	dt dtype.DType
	// exact is the encoded result of types that have no tolerance.
	exact []byte
	// value and tolerance describe the result of float types.
	value, tolerance []float64
}

// newReference reduces the inputs of all ranks, independently of any backend:
// floats in float64, integers modulo 2^64.
//
// A backend may round after each of the size-1 steps; one rounding of a partial
// result errs by at most u times its magnitude (u = 2^-precision), which is at
// most the sum of the operands' magnitudes. The tolerance of a sum is therefore
// (size-1)·u·Σ|x|, of an average one step more, of a product
// (size-1)·u·|result|, of minimum and maximum 0. For F64 it is doubled, since
// the reference rounds as well.
func newReference(dt dtype.DType, op comm.ReduceOp, size int) *reference {
	inputs := make([][]byte, size)
	for r := range inputs {
		inputs[r] = reductionInput(dt, op, r, size)
	}
	ref := &reference{dt: dt}
	switch {
	case dt.IsFloat():
		ref.floats(op, inputs)
	case dt == dtype.Bool:
		ref.bools(op, inputs)
	default:
		ref.ints(op, inputs)
	}
	return ref
}

func (ref *reference) floats(op comm.ReduceOp, inputs [][]byte) {
	size := len(inputs)
	operands := make([][]float64, size)
	for r, in := range inputs {
		operands[r] = decodeFloats(ref.dt, in)
	}
	u := math.Ldexp(1, -precision(ref.dt))
	if ref.dt == dtype.F64 {
		u *= 2
	}
	ref.value = make([]float64, period)
	ref.tolerance = make([]float64, period)
	for i := range period {
		acc := operands[0][i]
		magnitude := math.Abs(acc)
		for _, x := range operands[1:] {
			acc = reduceFloats(op, acc, x[i])
			magnitude += math.Abs(x[i])
		}
		steps := float64(size - 1)
		exact := exactElement(ref.dt, op, i)
		switch {
		case op == comm.Prod:
			magnitude = math.Abs(acc)
		case op == comm.Avg && size > 1:
			acc /= float64(size)
			magnitude /= float64(size)
			steps++
			exact = exact && size&(size-1) == 0
		}
		ref.value[i] = acc
		if !exact {
			ref.tolerance[i] = steps * u * magnitude
		}
	}
}

func reduceFloats(op comm.ReduceOp, a, b float64) float64 {
	switch op {
	case comm.Prod:
		return a * b
	case comm.Min:
		return math.Min(a, b)
	case comm.Max:
		return math.Max(a, b)
	}
	return a + b
}

func (ref *reference) bools(op comm.ReduceOp, inputs [][]byte) {
	or := op == comm.Sum || op == comm.Max
	for i := range period {
		trues := 0
		for _, in := range inputs {
			if in[i] != 0 {
				trues++
			}
		}
		result := byte(0)
		if trues == len(inputs) || or && trues > 0 {
			result = 1
		}
		ref.exact = append(ref.exact, result)
	}
}

func (ref *reference) ints(op comm.ReduceOp, inputs [][]byte) {
	for i := range period {
		acc := intAt(inputs[0], i, ref.dt)
		for _, in := range inputs[1:] {
			acc = reduceInts(op, acc, intAt(in, i, ref.dt), ref.dt.IsSigned())
		}
		ref.exact = appendInt(ref.exact, acc, ref.dt)
	}
}

func reduceInts(op comm.ReduceOp, a, b uint64, signed bool) uint64 {
	less := a < b
	if signed {
		less = int64(a) < int64(b)
	}
	switch op {
	case comm.Prod:
		return a * b
	case comm.Min:
		if less {
			return a
		}
		return b
	case comm.Max:
		if less {
			return b
		}
		return a
	}
	return a + b
}

// check compares a result whose first element is number offset of the whole.
func (ref *reference) check(got []byte, offset int) error {
	size := ref.dt.Size()
	if ref.exact != nil {
		want := tile(ref.exact, offset%period*size, len(got))
		return diff(got, want, ref.dt)
	}
	head := got[:min(len(got), period*size)]
	if err := ref.checkFloats(head, offset); err != nil {
		return err
	}
	// Backends mostly treat equal elements equally: then the rest repeats what
	// was just checked.
	if bytes.Equal(got[len(head):], got[:len(got)-len(head)]) {
		return nil
	}
	return ref.checkFloats(got, offset)
}

func (ref *reference) checkFloats(got []byte, offset int) error {
	for i, x := range decodeFloats(ref.dt, got) {
		j := (offset + i) % period
		if !(math.Abs(x-ref.value[j]) <= ref.tolerance[j]) {
			return fmt.Errorf("element %d is %v, want %v ± %.3g", i, x, ref.value[j], ref.tolerance[j])
		}
	}
	return nil
}

// diff reports the first element in which two encoded arrays differ.
func diff(got, want []byte, dt dtype.DType) error {
	if bytes.Equal(got, want) {
		return nil
	}
	size := dt.Size()
	wrong, first := 0, -1
	for i := 0; i < len(want); i += size {
		if !bytes.Equal(got[i:i+size], want[i:i+size]) {
			wrong++
			if first < 0 {
				first = i
			}
		}
	}
	return fmt.Errorf("element %d is %#x, want %#x (%d of %d elements differ)",
		first/size, got[first:first+size], want[first:first+size], wrong, len(want)/size)
}

// appendInt appends the low bits of x as an integer of type dt.
func appendInt(b []byte, x uint64, dt dtype.DType) []byte {
	switch dt.Size() {
	case 1:
		return append(b, byte(x))
	case 2:
		return binary.NativeEndian.AppendUint16(b, uint16(x))
	case 4:
		return binary.NativeEndian.AppendUint32(b, uint32(x))
	}
	return binary.NativeEndian.AppendUint64(b, x)
}

// intAt reads integer i of b, extended to 64 bits by its sign if it has one.
func intAt(b []byte, i int, dt dtype.DType) uint64 {
	b = b[i*dt.Size():]
	var x uint64
	switch dt.Size() {
	case 1:
		x = uint64(b[0])
	case 2:
		x = uint64(binary.NativeEndian.Uint16(b))
	case 4:
		x = uint64(binary.NativeEndian.Uint32(b))
	default:
		x = binary.NativeEndian.Uint64(b)
	}
	if unused := 64 - 8*dt.Size(); dt.IsSigned() {
		return uint64(int64(x<<unused) >> unused)
	}
	return x
}

// encodeFloats rounds values to dt.
func encodeFloats(dt dtype.DType, values []float64) []byte {
	out := make([]byte, len(values)*dt.Size())
	if dt == dtype.F64 {
		for i, x := range values {
			binary.NativeEndian.PutUint64(out[8*i:], math.Float64bits(x))
		}
		return out
	}
	narrow := make([]float32, len(values))
	for i, x := range values {
		narrow[i] = float32(x)
	}
	if err := dtype.FromFloat32(out, dt, narrow); err != nil {
		panic(err) // a float type always converts
	}
	return out
}

// decodeFloats reads values of type dt.
func decodeFloats(dt dtype.DType, b []byte) []float64 {
	out := make([]float64, len(b)/dt.Size())
	if dt == dtype.F64 {
		for i := range out {
			out[i] = math.Float64frombits(binary.NativeEndian.Uint64(b[8*i:]))
		}
		return out
	}
	narrow := make([]float32, len(out))
	if err := dtype.ToFloat32(narrow, b, dt); err != nil {
		panic(err) // a float type always converts
	}
	for i, x := range narrow {
		out[i] = float64(x)
	}
	return out
}
