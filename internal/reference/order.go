package reference

import (
	"math"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
)

// InOrder reduces an element of each rank by the order contract of comm.Communicator: in rank order, rounded to the
// type at the end. Elements are bits.
func InOrder(dt dtype.DType, op reductions.Op, elements ...uint64) uint64 {
	if len(elements) == 1 && dt != dtype.Bool {
		return elements[0]
	}
	if !dt.IsFloat() {
		return intsInOrder(dt, op, elements)
	}
	sum := toFloat(dt, elements[0])
	for _, bits := range elements[1:] {
		sum = computed(dt, reduceFloats(op, sum, toFloat(dt, bits)))
	}
	if op == reductions.Avg {
		sum = computed(dt, sum/float64(len(elements)))
	}
	return fromFloat(dt, sum)
}

// computed rounds to the type of the computation. A sum, product or quotient of two 24-bit numbers that is first
// rounded to 53 bits rounds to the same 24-bit result.
func computed(dt dtype.DType, v float64) float64 {
	if dt == dtype.F64 {
		return v
	}
	return float64(float32(v))
}

func intsInOrder(dt dtype.DType, op reductions.Op, elements []uint64) uint64 {
	value := func(bits uint64) uint64 {
		if dt == dtype.Bool {
			return min(bits, 1)
		}
		return extended(bits, dt)
	}
	result := value(elements[0])
	for _, bits := range elements[1:] {
		result = reduceInts(dt, op, result, value(bits))
	}
	if dt == dtype.Bool {
		result = min(result, 1)
	}
	return result
}

// Rough returns a period of a rank's input whose sums depend on their order: numbers of many exponents with full
// mantissas, occasionally arbitrary bits, zeros of both signs, and infinities, but no NaN. For integers it is [Input].
func Rough(dt dtype.DType, op reductions.Op, rank, size int) []byte {
	if !dt.IsFloat() {
		return Input(dt, op, rank, size)
	}
	out := make([]byte, 0, Period*dt.Size())
	for i := range Period {
		out = appendBits(out, rough(dt, op, mix(uint64(rank), uint64(i), 6), i), dt)
	}
	return out
}

func rough(dt dtype.DType, op reductions.Op, h uint64, i int) uint64 {
	if i%16 == 0 {
		if bits := h >> 1; !math.IsNaN(toFloat(dt, bits&(1<<(8*dt.Size())-1))) {
			return bits
		}
	}
	if i%61 == 0 {
		return fromFloat(dt, math.Copysign(0, float64(h&1)-0.5))
	}
	exponents := 13
	if op == reductions.Prod {
		exponents = 3 // or all are zero or infinite
	}
	fraction := 1 + float64(h>>11)/(1<<53)
	exponent := int(h>>1)%exponents - exponents/2
	return fromFloat(dt, math.Copysign(math.Ldexp(fraction, exponent), float64(h&1)-0.5))
}

func toFloat(dt dtype.DType, bits uint64) float64 {
	v, err := dtype.ToFloat64(dt, bits)
	if err != nil {
		panic(err)
	}
	return v
}

func fromFloat(dt dtype.DType, v float64) uint64 {
	bits, err := dtype.FromFloat64(dt, v)
	if err != nil {
		panic(err)
	}
	return bits
}

// Ordered is the expected result of a reduction by the order contract, one period of it.
type Ordered struct {
	dt    dtype.DType // type of the elements
	bytes []byte      // the result so far
}

// NewOrdered reduces a period of inputs, by rank, element by element.
func NewOrdered(dt dtype.DType, op reductions.Op, inputs ...[]byte) *Ordered {
	o := &Ordered{dt: dt}
	elements := make([]uint64, len(inputs))
	for i := range Period {
		for rank, in := range inputs {
			elements[rank] = bitsAt(in, i, dt)
		}
		o.bytes = appendBits(o.bytes, InOrder(dt, op, elements...), dt)
	}
	return o
}

// Check compares a result whose first element is number offset of the whole, and returns an error that shows the first
// difference. All NaNs are equal.
func (o *Ordered) Check(got []byte, offset int) error {
	size := o.dt.Size()
	wrong, err := differences(got, o.bytes, offset%Period*size, size)
	if wrong == 0 || !o.dt.IsFloat() {
		return err
	}
	want := Tile(o.bytes, offset%Period*size, len(got))
	for i := range len(want) / size {
		g := bitsAt(got, i, o.dt)
		w := bitsAt(want, i, o.dt)
		if g != w && !(math.IsNaN(toFloat(o.dt, g)) && math.IsNaN(toFloat(o.dt, w))) {
			_, err := Differences(got[i*size:], want[i*size:], size)
			return err
		}
	}
	return nil
}
