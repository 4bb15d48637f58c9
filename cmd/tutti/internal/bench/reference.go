package bench

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// reference knows what every rank puts in and what every rank must get out.
//
// Element i of a rank's input is entry i mod period of a table of that rank, so
// the expected result is a table too, however large the buffers. The period is
// a prime: a result that is shifted, or comes from another rank, differs.
//
// The ranks of a process share it. A table is made when a rank first needs it.
type reference struct {
	collective *collective
	dt         dtype.DType
	op         comm.ReduceOp
	ranks      int
	inputs     []func() ([]byte, error) // the table of each rank
	reduced    func() ([]byte, error)   // the table of the reduction over all ranks
	tolerate   float64                  // relative error allowed in a reduction of floats
}

// period of the tables, in elements.
const period = 1021

// chunkBytes is about how much is compared or copied at a time.
const chunkBytes = 1 << 20

// chunkOf repeats a table until it covers a chunk, or all elements of a buffer
// if that has fewer; size is that of an element.
func chunkOf(table []byte, elements, size int) []byte {
	return bytes.Repeat(table, min(chunkBytes/(period*size)+1, elements/period+1))
}

func newReference(k *collective, dt dtype.DType, op comm.ReduceOp, ranks int) *reference {
	r := &reference{collective: k, dt: dt, op: op, ranks: ranks, inputs: make([]func() ([]byte, error), ranks)}
	for rank := range ranks {
		r.inputs[rank] = sync.OnceValues(func() ([]byte, error) { return encode(dt, r.inputValues(rank)) })
	}
	r.reduced = sync.OnceValues(func() ([]byte, error) { return encode(dt, r.reducedValues()) })
	if k.reduces && dt.IsFloat() {
		// Each of the ranks-1 additions, and the division, may round.
		r.tolerate = float64(ranks) * epsilon(dt)
	}
	return r
}

// inputValues is the table of one rank. Reductions get small integers, whose
// sums no type overflows (at most 32·3 or 100·1), whatever the number of ranks;
// a movement gets larger ones.
func (r *reference) inputValues(rank int) []float64 {
	rng := rand.New(rand.NewPCG(uint64(rank), uint64(r.dt)))
	values := make([]float64, period)
	for i := range values {
		switch {
		case !r.collective.reduces:
			values[i] = float64(rng.IntN(127))
		case r.op == comm.Prod:
			// Ones, and a two from at most three ranks.
			values[i] = 1
			if rank < 3 {
				values[i] += float64(rng.IntN(2))
			}
		case r.ranks <= 32:
			values[i] = float64(rng.IntN(4))
		case rank < 100:
			values[i] = float64(rng.IntN(2))
		}
	}
	return values
}

// reducedValues combines the values of the ranks in float64, which is exact for
// those of inputValues.
func (r *reference) reducedValues() []float64 {
	var result []float64
	for rank := range r.ranks {
		values := r.inputValues(rank)
		if r.dt == dtype.Bool {
			// Any value but zero is true; sum and max are "or", the others "and".
			for i, v := range values {
				values[i] = min(v, 1)
			}
		}
		if rank == 0 {
			result = values
			continue
		}
		for i, v := range values {
			result[i] = combine(r.op, result[i], v)
		}
	}
	if r.op == comm.Avg {
		for i := range result {
			result[i] /= float64(r.ranks)
		}
	}
	return result
}

// combine is one step of a reduction.
func combine(op comm.ReduceOp, a, b float64) float64 {
	switch op {
	case comm.Prod:
		return a * b
	case comm.Min:
		return min(a, b)
	case comm.Max:
		return max(a, b)
	}
	return a + b
}

// encode writes values as elements of type dt, in native byte order.
func encode(dt dtype.DType, values []float64) ([]byte, error) {
	out := make([]byte, 0, len(values)*dt.Size())
	for _, v := range values {
		bits, err := dtype.FromFloat64(dt, v)
		if err != nil {
			return nil, err
		}
		switch dt.Size() {
		case 1:
			out = append(out, uint8(bits))
		case 2:
			out = binary.NativeEndian.AppendUint16(out, uint16(bits))
		case 4:
			out = binary.NativeEndian.AppendUint32(out, uint32(bits))
		default:
			out = binary.NativeEndian.AppendUint64(out, bits)
		}
	}
	return out, nil
}

// decode reads one element, the inverse of [encode].
func decode(dt dtype.DType, element []byte) (float64, error) {
	var bits uint64
	switch dt.Size() {
	case 1:
		bits = uint64(element[0])
	case 2:
		bits = uint64(binary.NativeEndian.Uint16(element))
	case 4:
		bits = uint64(binary.NativeEndian.Uint32(element))
	default:
		bits = binary.NativeEndian.Uint64(element)
	}
	return dtype.ToFloat64(dt, bits)
}

// epsilon is the distance from 1 to the next larger number of a float type.
func epsilon(dt dtype.DType) float64 {
	bits := map[dtype.DType]int{
		dtype.F64: 52, dtype.F32: 23, dtype.F16: 10, dtype.BF16: 7, dtype.FP8E4M3: 3, dtype.FP8E5M2: 2,
	}
	return math.Ldexp(1, -bits[dt])
}

// fill writes the input of a rank, count elements a part.
func (r *reference) fill(rt runtime.Runtime, rank int, send uintptr, count int) error {
	table, err := r.inputs[rank]()
	if err != nil {
		return err
	}
	return tile(rt, table, send, count*r.collective.sendParts(r.ranks), r.dt.Size())
}

// poison overwrites memory with a value that no table contains, so that an
// element which was not written counts as wrong. It does not wait for it.
func poison(rt runtime.Runtime, ptr uintptr, bytes int) error {
	return rt.Fill(ptr, bytes, dtype.U8, 0xa5)
}

// tile writes a table again and again to elements elements of memory.
func tile(rt runtime.Runtime, table []byte, ptr uintptr, elements, size int) error {
	chunk := chunkOf(table, elements, size)
	for left := elements * size; left > 0; left -= len(chunk) {
		chunk = chunk[:min(len(chunk), left)]
		if err := rt.CopyIn(ptr, chunk); err != nil {
			return err
		}
		ptr += uintptr(len(chunk))
	}
	return nil
}

// wrong counts the elements of a rank's result that are not what they must be.
func (r *reference) wrong(rt runtime.Runtime, rank int, recv uintptr, count int) (int64, error) {
	var total int64
	for part := range r.collective.recvParts(r.ranks) {
		from, fromPart := r.collective.origin(rank, r.ranks, part)
		expected := r.reduced
		if !r.collective.reduces {
			expected = r.inputs[from]
		}
		table, err := expected()
		if err != nil {
			return 0, err
		}
		n, err := r.wrongInPart(rt, table, fromPart*count%period, recv+uintptr(part*count*r.dt.Size()), count)
		if err != nil {
			return 0, err
		}
		total += n
	}
	return total, nil
}

// wrongInPart compares count elements with a table, from its entry phase on.
func (r *reference) wrongInPart(rt runtime.Runtime, table []byte, phase int, recv uintptr, count int) (int64, error) {
	size := r.dt.Size()
	turned := append(append([]byte{}, table[phase*size:]...), table[:phase*size]...)
	want := chunkOf(turned, count, size)
	got := make([]byte, len(want))
	var total int64
	for left := count * size; left > 0; left -= len(got) {
		got = got[:min(len(got), left)]
		if err := rt.CopyOut(got, recv); err != nil {
			return 0, err
		}
		recv += uintptr(len(got))
		if bytes.Equal(got, want[:len(got)]) {
			continue
		}
		n, err := r.differences(got, want[:len(got)])
		if err != nil {
			return 0, err
		}
		total += n
	}
	return total, nil
}

// differences counts the elements that differ by more than the rounding that a reduction
// may do.
func (r *reference) differences(got, want []byte) (count int64, err error) {
	size := r.dt.Size()
	for at := 0; at < len(got); at += size {
		if bytes.Equal(got[at:at+size], want[at:at+size]) {
			continue
		}
		g, gErr := decode(r.dt, got[at:])
		w, wErr := decode(r.dt, want[at:])
		err = errors.Join(err, gErr, wErr)
		if !(r.tolerate > 0 && math.Abs(g-w) <= r.tolerate*math.Abs(w)) {
			count++
		}
	}
	return count, err
}
