package distributed

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// AverageMetrics returns the averages of metrics, such as loss and accuracy, over the ranks, bit-identical on every
// rank. A rank's weight is the number of samples behind its metrics, so the result averages over all samples even if
// some ranks have fewer. A rank of weight 0 takes part, but its metrics are ignored. If all weights are 0, the averages
// are NaN.
//
// All ranks pass the same number of metrics, in the same order. The averages are computed in F64, and the host waits
// for them. For rt, see [BroadcastBytes]. A negative or non-finite weight is [comm.ErrArgument].
func AverageMetrics(ctx context.Context, rt runtime.Runtime, c comm.Communicator, weight float64,
	metrics ...float64) ([]float64, error) {
	const op = "average metrics"
	m, err := newMail(op, rt, c)
	if err != nil {
		return nil, err
	}
	if !(weight >= 0) || math.IsInf(weight, 1) {
		return nil, base.OpError(op, fmt.Errorf("%w: weight is %v, want a finite number, not negative",
			comm.ErrArgument, weight))
	}
	words := binary.NativeEndian.AppendUint64(nil, math.Float64bits(weight))
	for _, x := range metrics {
		if weight == 0 {
			x = 0
		}
		words = binary.NativeEndian.AppendUint64(words, math.Float64bits(x*weight))
	}
	words = m.move(ctx, words, 0, len(words), func(p uintptr) []comm.Call {
		return []comm.Call{comm.AllReduceCall(p, p, 1+len(metrics), dtype.F64, comm.Sum)}
	}, len(words))
	if m.err != nil {
		return nil, m.err
	}
	sum := func(i int) float64 {
		return math.Float64frombits(binary.NativeEndian.Uint64(words[8*i:]))
	}
	averages := make([]float64, len(metrics))
	for i := range averages {
		averages[i] = sum(1+i) / sum(0)
	}
	return averages, nil
}
