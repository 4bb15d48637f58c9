package bench

import (
	"context"
	"math"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reference"
	"github.com/tutti-go/tutti/runtime"
)

// tables hold every rank's input and expected result.
//
// Element i of a rank's input is entry i mod [reference.Period] of that rank's table, so the expected result is a
// table too, however large the buffers.
//
// The ranks of a process share the tables. A table is made when a rank first needs it.
type tables struct {
	collective Collective               // that is measured
	dt         dtype.DType              // of elements
	ranks      int                      // of the world
	inputs     []func() []byte          // of each rank
	reduced    func() *reference.Result // of the reduction over all ranks
}

// chunkBytes is the approximate number of bytes compared or copied at a time.
const chunkBytes = 1 << 20

func newTables(k Collective, dt dtype.DType, op comm.ReduceOp, ranks int) *tables {
	t := &tables{
		collective: k,
		dt:         dt,
		ranks:      ranks,
		inputs:     make([]func() []byte, ranks),
	}
	for rank := range ranks {
		t.inputs[rank] = sync.OnceValue(func() []byte {
			if k.Reduces() {
				return reference.Input(dt, op, rank, ranks)
			}
			return reference.Payload(reference.Period*dt.Size(), rank)
		})
	}
	t.reduced = sync.OnceValue(func() *reference.Result {
		return reference.New(dt, op, ranks)
	})
	return t
}

// chunks calls f for each piece of count elements at ptr, until ctx ends. f gets the piece's address, its first
// element, and space for its bytes.
func (t *tables) chunks(
	ctx context.Context,
	ptr uintptr,
	count int,
	f func(addr uintptr, first int, piece []byte) error,
) error {
	size := t.dt.Size()
	chunk := make([]byte, min(count, chunkBytes/size)*size)
	for first := 0; first < count; first += len(chunk) / size {
		if ctx.Err() != nil {
			return comm.ContextError(ctx)
		}
		piece := chunk[:min(len(chunk), (count-first)*size)]
		if err := f(ptr+uintptr(first*size), first, piece); err != nil {
			return err
		}
	}
	return nil
}

// fill writes the input of a rank, with count elements in each part.
func (t *tables) fill(ctx context.Context, rt runtime.Runtime, rank int, send uintptr, count int) error {
	table := t.inputs[rank]()
	parts, _ := t.collective.parts(t.ranks)
	return t.chunks(ctx, send, count*parts, func(addr uintptr, first int, piece []byte) error {
		return rt.CopyIn(addr, reference.Tile(table, first*t.dt.Size(), len(piece)))
	})
}

// wrong counts the elements of a rank's result that differ from the expected ones.
func (t *tables) wrong(
	ctx context.Context,
	rt runtime.Runtime,
	rank int,
	recv uintptr,
	count int,
) (total int64, err error) {
	size := t.dt.Size()
	_, parts := t.collective.parts(t.ranks)
	for part := range parts {
		from, fromPart := t.collective.origin(rank, t.ranks, part)
		err := t.chunks(ctx, recv+uintptr(part*count*size), count, func(addr uintptr, first int, got []byte) error {
			if err := rt.CopyOut(got, addr); err != nil {
				return err
			}
			var n int // and an error that describes the first wrong element
			first += fromPart * count
			if t.collective.Reduces() {
				n, _ = t.reduced().Check(got, first)
			} else {
				n, _ = reference.Differences(got, reference.Tile(
					t.inputs[from](),
					first%reference.Period*size,
					len(got),
				), size)
			}
			total += int64(n)
			return nil
		})
		if err != nil {
			return 0, err
		}
	}
	return total, nil
}

// epsilon is the distance from 1 to the next larger number of a gradient type.
func epsilon(dt dtype.DType) float64 {
	return math.Ldexp(1, map[dtype.DType]int{
		dtype.F32:  -23,
		dtype.F16:  -10,
		dtype.BF16: -7,
	}[dt])
}
