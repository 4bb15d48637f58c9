package engine

import (
	"context"
	"math"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// estimate finds the threshold that the k largest sums of all ranks pass. All
// ranks search the same intervals of magnitudes (as bits, so in their order)
// by counting how many sums pass; a lower end that at least k pass is kept.
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

// learn has the next step be led by how many sums passed in this one: total, and x.allgather.lengths at each rank, who
// may add that many to the result. All ranks know the same, so they agree.
func (x *okExchange) learn(total, quota int) {
	if slices.Max(x.allgather.lengths) <= quota*14/15 {
		x.hostState.level = min(x.hostState.level+1, levelSteps)
	} else {
		x.hostState.level = 0
	}
	x.adapt(total)
}

// adapt corrects the threshold after a step in which passed sums passed it,
// and has the next step estimate it when it is far off.
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

// far reports whether a threshold is far off, by how many sums passed it.
func (x *okExchange) far(passed int) bool {
	return passed > 2*x.k || 4*passed < x.k
}
