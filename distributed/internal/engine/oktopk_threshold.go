package engine

import (
	"context"
	"math"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// estimate finds the threshold that the k largest sums of all ranks reach. All ranks search the same intervals of
// magnitudes (as bits, which sort like magnitudes) by counting the sums that reach a threshold; the lower end is
// always reached by at least k.
func (x *okExchange) estimate(ctx context.Context, sums kernel.Entries) {
	counts := uintptr(0)
	bracket := x.address(numBracket)
	fan := x.address(numFan)
	for range bisectRounds {
		x.do(func() error {
			return x.kernels.Narrow(bracket, counts, x.k, fan, bisectFan)
		})
		counts = x.address(numFanCounts)
		x.do(func() error {
			return x.kernels.CountAbove(sums, fan, bisectFan, counts)
		})
		x.communicate(ctx, comm.AllReduceCall(counts, counts, bisectFan, dtype.I32, comm.Sum))
	}
	x.do(func() error {
		return x.kernels.Narrow(bracket, counts, x.k, fan, bisectFan)
	})
	x.hostState.age = 0
}

// learn prepares the next step from the number of sums that reached the threshold in this one: total, and
// x.allgather.lengths on each rank, which may add up to quota to the result. All ranks know the same numbers, so they
// agree.
func (x *okExchange) learn(total, quota int) {
	if slices.Max(x.allgather.lengths) <= quota*14/15 {
		x.hostState.level = min(x.hostState.level+1, levelSteps)
	} else {
		x.hostState.level = 0
	}
	x.adapt(total)
}

// adapt corrects the threshold after a step in which passed sums reached it, and makes the next step estimate it if it
// is far off.
func (x *okExchange) adapt(passed int) {
	used := x.float(numBracket)
	x.hostState.globalThreshold = used
	if next := correct(used, passed, x.k, thresholdStep); next != used {
		x.setInt(numBracket, int32(math.Float32bits(next)))
	}
	if x.far(passed) {
		x.hostState.age = x.cfg.tuning.ThresholdInterval
	}
}

// far reports whether a threshold is far off, given the number of sums that reached it.
func (x *okExchange) far(passed int) bool {
	return passed > 2*x.k || 4*passed < x.k
}
