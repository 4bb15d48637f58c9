package ddp

import (
	"context"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// clip returns the address of what all gradients are multiplied by, 0 if nothing
// bounds their norm.
func (j *transaction) clip(ctx context.Context, gradients []*runtime.Tensor, buckets int) (uintptr, error) {
	if j.cfg.ClipNorm == 0 || len(gradients) == 0 {
		return 0, nil
	}
	for i, t := range gradients {
		ptr, err := t.Ptr()
		if err == nil {
			err = j.kernels.SumSquares(ptr, t.DType(), t.Len(), base.At(j.squares, 2*i))
		}
		if err != nil {
			return 0, err
		}
	}
	m, share, limit := len(gradients), 1.0, j.cfg.ClipNorm/math.Sqrt(float64(j.c.WorldSize()))
	if j.cfg.Clip == sparse.ClipGlobal {
		share, limit = 1/float64(j.c.WorldSize()), j.cfg.ClipNorm
		err := j.order.Around(ctx, func() error { return j.c.AllReduce(j.squares, j.squares, m, dtype.F64, comm.Sum) })
		if err == nil && j.cfg.NonFinite != sparse.PassNonFinite {
			err = j.judgeNorm(m, buckets)
		}
		if err != nil {
			return 0, err
		}
	}
	return j.factor, j.kernels.ClipFactor(j.factor, j.squares, m, share, limit)
}

// judgeNorm counts the squares that are not finite, of which all ranks know: none of them is clipped
// then. A bucket that sends nothing in this step would not find out.
func (j *transaction) judgeNorm(m, buckets int) error {
	j.layout = [...][1]int{{1}, {2}, {m}}
	err := j.rt.CopyStrided(j.highs, j.layout[0][:], base.At(j.squares, 1), j.layout[1][:], j.layout[2][:], base.WordSize)
	if err != nil {
		return err
	}
	counts := runtime.Entries{Idx: j.highs, Val: j.highs, N: m}
	return j.kernels.CountAbove(counts, j.limit, 1, base.At(j.flags, buckets*j.c.WorldSize()))
}
