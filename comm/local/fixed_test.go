package local_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/fixedpoint"
)

// fixedLengths are those of arrays that are summed in one call: without elements, of less than a block, of many chunks.
var fixedLengths = []int{1, 0, 63, 1 << 18, 64, 5000}

// fixedSums makes what each rank has of sums: rank r has r terms, small integers, of each array.
func fixedSums(m memory, ranks, divisor int, lengths ...int) (sums [][]fixedpoint.Sum, results [][][]float32) {
	for r := range ranks {
		var list []fixedpoint.Sum
		var mine [][]float32
		for a, n := range lengths {
			result, at := alloc(m, n, float32(-1))
			s := fixedpoint.Sum{N: n, Bits: 24, Divisor: divisor, DType: dtype.F32, Result: at}
			for range r {
				x, ptr := alloc(m, n, float32(0))
				for i := range x {
					x[i] = float32((i*7+a)%1000 + r)
				}
				s.Terms = append(s.Terms, fixedpoint.Term{Ptr: ptr, DType: dtype.F32})
			}
			list = append(list, s)
			mine = append(mine, result)
		}
		sums = append(sums, list)
		results = append(results, mine)
	}
	return sums, results
}

func allReduceFixed(c comm.Communicator, sums []fixedpoint.Sum) error {
	return c.(fixedpoint.Reducer).AllReduceFixed(sums)
}

// Sums of small integers are exact, whatever is in flight before and behind them.
func TestSumsInFixedPoint(t *testing.T) {
	const ranks, divisor = 3, 4
	ctx := within(t)
	m := newMemory(t)
	comms := world(t, ranks)
	sums, results := fixedSums(m, ranks, divisor, fixedLengths...)
	small, smallAt := perRank(m, ranks, 1, rankPlusOne)
	long, longAt := perRank(m, ranks, 1<<16, rankPlusOne)
	requireAll(t, onAll(comms, func(c comm.Communicator) error {
		r := c.Rank()
		err := errors.Join(
			c.AllReduce(smallAt[r], smallAt[r], 1, dtype.I32, comm.Sum),
			allReduceFixed(c, sums[r]),
			c.AllReduce(longAt[r], longAt[r], 1<<16, dtype.I32, comm.Sum),
			allReduceFixed(c, nil),
			allReduceFixed(c, sums[r][:2]),
		)
		return errors.Join(err, c.Sync(ctx))
	}))
	for r := range ranks {
		requireFilled(t, small[r], 1, 6)
		requireFilled(t, long[r], 1<<16, 6)
		for a, n := range fixedLengths {
			for i, got := range results[r][a][:n] {
				value := (i*7 + a) % 1000
				if want := float32(3*value+1+2*2) / divisor; got != want {
					t.Fatalf("rank %d, array %d: element %d is %v, want %v", r, a, i, got, want)
				}
			}
		}
	}
}

// A rank that sums other arrays, or calls something else, is an error on all ranks, and no result is written.
func TestMismatchOfSums(t *testing.T) {
	m := newMemory(t)
	for name, call := range map[string]func(c comm.Communicator, sums []fixedpoint.Sum) error{
		"length": func(c comm.Communicator, sums []fixedpoint.Sum) error {
			sums[0].N++
			sums[1].N--
			return allReduceFixed(c, sums)
		},
		"divisor": func(c comm.Communicator, sums []fixedpoint.Sum) error {
			sums[1].Divisor++
			return allReduceFixed(c, sums)
		},
		"bits": func(c comm.Communicator, sums []fixedpoint.Sum) error {
			sums[1].Bits--
			return allReduceFixed(c, sums)
		},
		"stored": func(c comm.Communicator, sums []fixedpoint.Sum) error {
			sums[1].Result = 0
			return allReduceFixed(c, sums)
		},
		"plain": func(c comm.Communicator, sums []fixedpoint.Sum) error {
			return c.AllReduce(sums[0].Result, sums[0].Result, 150, dtype.F32, comm.Sum)
		},
		"small": func(c comm.Communicator, sums []fixedpoint.Sum) error {
			return c.AllReduce(sums[0].Result, sums[0].Result, 2, dtype.F32, comm.Sum)
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := within(t)
			comms := world(t, 2)
			sums, results := fixedSums(m, 2, 1, 50, 100)
			for r, err := range onAll(comms, func(c comm.Communicator) error {
				if c.Rank() == 0 {
					return errors.Join(allReduceFixed(c, sums[0]), c.Sync(ctx))
				}
				return errors.Join(call(c, sums[1]), c.Sync(ctx))
			}) {
				require.ErrorIs(t, err, comm.ErrMismatch, "rank %d", r)
				require.ErrorContains(t, err, "sum in fixed point", "rank %d", r)
			}
			for r := range results {
				assert.Equal(t, float32(-1), results[r][1][99], "rank %d", r)
			}
		})
	}
}

// Where a rank aborts instead, no rank has a result, and all know that.
func TestAbortedSums(t *testing.T) {
	const ranks = 3
	ctx := within(t)
	m := newMemory(t)
	comms := world(t, ranks)
	sums, results := fixedSums(m, ranks, 1, 1<<18)
	for r, err := range onAll(comms, func(c comm.Communicator) error {
		if c.Rank() == 1 {
			c.Abort(errors.New("out of data"))
			return c.Err()
		}
		return errors.Join(allReduceFixed(c, sums[c.Rank()]), c.Sync(ctx))
	}) {
		require.ErrorContains(t, err, "out of data", "rank %d", r)
		for i, got := range results[r][0] {
			if got != -1 {
				t.Fatalf("rank %d: element %d is %v, as before it was -1", r, i, got)
			}
		}
	}
}
