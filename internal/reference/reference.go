// Package reference has inputs of collectives and their expected results, independent of any backend and the same in
// every process.
package reference

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
)

// Period is the number of distinct elements in an input; longer ones repeat. It is prime, so that an implementation
// that mixes up blocks (whose sizes are hardly multiples of it) computes something else.
const Period = 1009

// mix hashes three numbers (SplitMix64's finalizer over a linear combination). It is the only source of "random" data,
// the same in every process.
func mix(a, b, c uint64) uint64 {
	x := a*0x9E3779B97F4A7C15 + b*0xC2B2AE3D27D4EB4F + c*0x165667B19E3779F9 + 0x27D4EB2F165667C5
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}

// Payload returns n bytes for a collective that only moves data: any bit
// patterns, different for every key.
func Payload(n int, keys ...int) []byte {
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
	return Tile(block[:4093], 0, n)
}

// Tile returns n bytes of the infinite repetition of block, beginning at offset.
func Tile(block []byte, offset, n int) []byte {
	first := offset % len(block)
	end := first + n
	if end <= len(block) {
		return slices.Clone(block[first:end])
	}
	blocks := (end + len(block) - 1) / len(block)
	return bytes.Repeat(block, blocks)[first:end:end]
}

// tiles reports whether got is the infinite repetition of block, beginning at offset.
func tiles(got, block []byte, offset int) bool {
	first := offset % len(block)
	head := min(len(got), len(block)-first)
	if !bytes.Equal(got[:head], block[first:][:head]) {
		return false
	}
	tail := got[head:]
	start := min(len(tail), len(block))
	return bytes.Equal(tail[:start], block[:start]) && bytes.Equal(tail[start:], tail[:len(tail)-start])
}

// precision is the number of significant bits of a float type.
var precision = map[dtype.DType]int{
	dtype.F64:     53,
	dtype.F32:     24,
	dtype.F16:     11,
	dtype.BF16:    8,
	dtype.FP8E4M3: 4,
	dtype.FP8E5M2: 3,
}

// inputs and results are cached by reduction. The ranks of a process share them.
var inputs, results sync.Map

// reduction is a cache key; of a result, rank is 0.
type reduction struct {
	dt         dtype.DType   // type of the elements
	op         reductions.Op // the operation
	rank, size int           // of the input; number of ranks
}

// once returns the cached value of a key, and calls f to make it.
func once[T any](m *sync.Map, key reduction, f func() T) T {
	v, ok := m.Load(key)
	if !ok {
		v, _ = m.LoadOrStore(key, f())
	}
	return v.(T)
}

// Input returns one period of a rank's input to a reduction, encoded. It must not be changed.
func Input(dt dtype.DType, op reductions.Op, rank, size int) []byte {
	return once(&inputs, reduction{dt, op, rank, size}, func() []byte {
		return input(dt, op, rank, size)
	})
}

func input(dt dtype.DType, op reductions.Op, rank, size int) []byte {
	switch {
	case dt.IsFloat():
		return Encode(dt, floatInput(dt, op, rank, size)...)
	case dt == dtype.Bool:
		return boolInput(op, rank, size)
	}
	out := make([]byte, 0, Period*dt.Size())
	for i := range Period {
		out = appendBits(out, intInput(op, rank, i), dt)
	}
	return out
}

// exactElement reports whether element i of a float input is chosen so that every partial result, in any order, is
// representable: the reduction must then be exact however often a backend rounds. Other elements have full mantissas
// and are compared with a tolerance.
func exactElement(dt dtype.DType, op reductions.Op, i int) bool {
	switch op {
	case reductions.Min, reductions.Max:
		return true
	case reductions.Prod:
		return precision[dt] < 8 || i%3 != 0
	}
	return i%3 != 0
}

// floatInput returns a rank's values before they are rounded to dt.
func floatInput(dt dtype.DType, op reductions.Op, rank, size int) []float64 {
	out := make([]float64, Period)
	for i := range out {
		h := mix(uint64(rank), uint64(i), 3)
		sign := 1 - 2*float64(h&1)
		if i%5 == 0 {
			sign = 1 // sums that do not cancel distinguish Sum from Avg
		}
		fraction := float64(h>>11) / (1 << 53) // [0, 1)
		switch exact := exactElement(dt, op, i); {
		case op == reductions.Min || op == reductions.Max:
			out[i] = sign * (1 + 15*fraction)
		case op == reductions.Prod:
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
			// Sums over any number of ranks stay within the range of all types.
			out[i] = sign * (0.25 + 3*fraction) * min(1, 64/float64(size))
		}
	}
	return out
}

// exactTerm returns a positive integer (or zero) small enough that the sum
// over all ranks is an exact number of the type.
func exactTerm(dt dtype.DType, h uint64, turn, size int) float64 {
	limit := 1 << min(precision[dt], 20)
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
func intInput(op reductions.Op, rank, i int) uint64 {
	h := mix(uint64(rank), uint64(i), 4)
	if i%3 == 0 {
		h = uint64(int64(h%19) - 9)
	}
	if op == reductions.Prod && i%4 != 0 {
		h |= 1 // or products would soon be zero
	}
	return h
}

// boolInput returns booleans, about half of whose reductions are true. Any nonzero byte is true; most of them are 1.
func boolInput(op reductions.Op, rank, size int) []byte {
	or := op == reductions.Sum || op == reductions.Max
	out := make([]byte, Period)
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

// Result is the expected result of a reduction, one period of it.
type Result struct {
	dt dtype.DType // type of the elements
	// exact is the encoded result for types without a tolerance.
	exact []byte
	// value and tolerance describe the result for float types.
	value, tolerance []float64
}

// New reduces the inputs of all ranks, independently of any backend:
// floats in float64, integers modulo 2^64.
//
// A backend may round after each of the size-1 steps; one rounding of a partial
// result errs by at most u times its magnitude (u = 2^-precision), which is at
// most the sum of the operands' magnitudes. The tolerance of a sum is therefore
// (size-1)·u·Σ|x|, of an average one step more, of a product
// (size-1)·u·|result|, of minimum and maximum 0. For F64 it is doubled, since
// the reference rounds as well.
func New(dt dtype.DType, op reductions.Op, size int) *Result {
	return once(&results, reduction{
		dt:   dt,
		op:   op,
		size: size,
	}, func() *Result {
		return newResult(dt, op, size)
	})
}

func newResult(dt dtype.DType, op reductions.Op, size int) *Result {
	inputs := make([][]byte, size)
	for r := range inputs {
		inputs[r] = Input(dt, op, r, size)
	}
	ref := &Result{dt: dt}
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

func (ref *Result) floats(op reductions.Op, inputs [][]byte) {
	size := len(inputs)
	operands := make([][]float64, size)
	for r, in := range inputs {
		operands[r] = decode(ref.dt, in)
	}
	u := math.Ldexp(1, -precision[ref.dt])
	if ref.dt == dtype.F64 {
		u *= 2
	}
	ref.value = make([]float64, Period)
	ref.tolerance = make([]float64, Period)
	for i := range Period {
		acc := operands[0][i]
		magnitude := math.Abs(acc)
		for _, x := range operands[1:] {
			acc = reduceFloats(op, acc, x[i])
			magnitude += math.Abs(x[i])
		}
		steps := float64(size - 1)
		exact := exactElement(ref.dt, op, i)
		switch {
		case op == reductions.Prod:
			magnitude = math.Abs(acc)
		case op == reductions.Avg && size > 1:
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

func reduceFloats(op reductions.Op, a, b float64) float64 {
	switch op {
	case reductions.Prod:
		return a * b
	case reductions.Min:
		return min(a, b)
	case reductions.Max:
		return max(a, b)
	}
	return a + b
}

func (ref *Result) bools(op reductions.Op, inputs [][]byte) {
	or := op == reductions.Sum || op == reductions.Max
	for i := range Period {
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

func (ref *Result) ints(op reductions.Op, inputs [][]byte) {
	for i := range Period {
		acc := intAt(inputs[0], i, ref.dt)
		for _, in := range inputs[1:] {
			acc = reduceInts(ref.dt, op, acc, intAt(in, i, ref.dt))
		}
		ref.exact = appendBits(ref.exact, acc, ref.dt)
	}
}

// reduceInts reduces two integers as intAt returns them, modulo 2^64.
func reduceInts(dt dtype.DType, op reductions.Op, acc, x uint64) uint64 {
	smaller := x < acc
	if dt.IsSigned() {
		smaller = int64(x) < int64(acc)
	}
	switch {
	case op == reductions.Prod:
		return acc * x
	case op == reductions.Sum:
		return acc + x
	case smaller == (op == reductions.Min):
		return x
	}
	return acc
}

// intAt is bitsAt, extended to 64 bits by the sign if it has one.
func intAt(b []byte, i int, dt dtype.DType) uint64 {
	return extended(bitsAt(b, i, dt), dt)
}

func extended(x uint64, dt dtype.DType) uint64 {
	if unused := 64 - 8*dt.Size(); dt.IsSigned() {
		return uint64(int64(x<<unused) >> unused)
	}
	return x
}

// Check compares a result whose first element is number offset of the whole. It returns the number of wrong elements,
// and an error that shows the first.
func (ref *Result) Check(got []byte, offset int) (wrong int, err error) {
	size := ref.dt.Size()
	if ref.exact != nil {
		return differences(got, ref.exact, offset%Period*size, size)
	}
	// Backends mostly treat equal elements equally, so the rest mostly repeats the part that is checked first.
	head := got[:min(len(got), Period*size)]
	if wrong, err = ref.checkFloats(head, offset); wrong == 0 && !bytes.Equal(got[len(head):], got[:len(got)-len(head)]) {
		return ref.checkFloats(got, offset)
	}
	return wrong, err
}

func (ref *Result) checkFloats(got []byte, offset int) (wrong int, err error) {
	for i, x := range decode(ref.dt, got) {
		j := (offset + i) % Period
		if !(math.Abs(x-ref.value[j]) <= ref.tolerance[j]) {
			wrong++
			if err == nil {
				err = fmt.Errorf("element %d is %v, want %v ± %.3g", i, x, ref.value[j], ref.tolerance[j])
			}
		}
	}
	return wrong, err
}

// differences is [Differences] to the infinite repetition of block, beginning at offset.
func differences(got, block []byte, offset, size int) (wrong int, err error) {
	if tiles(got, block, offset) {
		return 0, nil
	}
	return Differences(got, Tile(block, offset, len(got)), size)
}

// Differences returns the number of elements of this size in which two encoded arrays differ, and an error that shows
// the first.
func Differences(got, want []byte, size int) (wrong int, err error) {
	if bytes.Equal(got, want) {
		return 0, nil
	}
	for i := 0; i < len(want); i += size {
		if g, w := got[i:i+size], want[i:i+size]; !bytes.Equal(g, w) {
			wrong++
			if err == nil {
				err = fmt.Errorf("element %d is %#x, want %#x", i/size, g, w)
			}
		}
	}
	return wrong, err
}

// Encode rounds values to elements of type dt.
func Encode(dt dtype.DType, values ...float64) (out []byte) {
	for _, v := range values {
		bits, err := dtype.FromFloat64(dt, v)
		if err != nil {
			panic(err)
		}
		out = appendBits(out, bits, dt)
	}
	return out
}

// decode reads values of a float type.
func decode(dt dtype.DType, b []byte) []float64 {
	out := make([]float64, len(b)/dt.Size())
	for i := range out {
		out[i], _ = dtype.ToFloat64(dt, bitsAt(b, i, dt))
	}
	return out
}

// appendBits appends the low bits of x as an element of type dt. All platforms of this
// module are little-endian.
func appendBits(b []byte, x uint64, dt dtype.DType) []byte {
	for range dt.Size() {
		b = append(b, byte(x))
		x = x >> 8
	}
	return b
}

// bitsAt reads element i of b.
func bitsAt(b []byte, i int, dt dtype.DType) uint64 {
	var word [8]byte
	copy(word[:], b[i*dt.Size():][:dt.Size()])
	return binary.LittleEndian.Uint64(word[:])
}
