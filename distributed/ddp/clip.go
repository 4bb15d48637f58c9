package ddp

import (
	"context"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// clip returns the address of what all gradients are multiplied by, 0 if nothing
// bounds their norm. weight multiplies the gradients besides; with 0 they count as zeros.
func (j *transaction) clip(
	ctx context.Context, gradients []*runtime.Tensor, buckets int, weight float64,
) (uintptr, error) {
	if j.cfg.ClipNorm == 0 || len(gradients) == 0 {
		return 0, nil
	}
	if err := j.sumSquares(gradients, weight); err != nil {
		return 0, err
	}
	m, share, limit := len(gradients), weight*weight, j.cfg.ClipNorm/math.Sqrt(float64(j.c.WorldSize()))
	if j.cfg.Clip == engine.ClipGlobal {
		share, limit = 1/float64(j.c.WorldSize()), j.cfg.ClipNorm
		if err := j.weighSquares(ctx, m, weight); err != nil {
			return 0, err
		}
		err := j.order.Around(ctx, func() error { return j.c.AllReduce(j.squares, j.squares, m, dtype.F64, comm.Sum) })
		if err == nil && j.cfg.NonFinite != engine.PassNonFinite {
			err = j.judgeNorm(m, buckets)
		}
		if err != nil {
			return 0, err
		}
	}
	return j.factor, j.kernels.ClipFactor(j.factor, j.squares, m, share, limit)
}

// sumSquares computes the squared norms of gradients.
func (j *transaction) sumSquares(gradients []*runtime.Tensor, weight float64) error {
	if weight == 0 {
		return j.rt.Fill(j.squares, len(gradients), dtype.F64, 0)
	}
	for i, t := range gradients {
		ptr, err := t.Ptr()
		if err != nil {
			return err
		}
		if err := j.kernels.SumSquares(ptr, t.DType(), t.Len(), base.At(j.squares, 2*i)); err != nil {
			return err
		}
	}
	return nil
}

// weighSquares makes m squared norms those of gradients that are multiplied by a weight. The host waits and computes
// them, as kernels have no products of F64.
func (j *transaction) weighSquares(ctx context.Context, m int, weight float64) error {
	if weight == 0 || weight == 1 {
		return nil
	}
	if err := j.order.HostAfterCompute(ctx); err != nil {
		return err
	}
	if len(j.norms) < m {
		j.norms = make([]float64, m)
	}
	norms := j.norms[:m]
	if err := j.rt.CopyOut(hostmem.Bytes(norms), j.squares); err != nil {
		return err
	}
	for i := range norms {
		norms[i] *= weight * weight
	}
	return j.rt.CopyIn(j.squares, hostmem.Bytes(norms))
}

// judgeNorm counts the squares that are not finite, of which all ranks know: none of them is clipped
// then. A bucket that sends nothing in this step would not find out.
func (j *transaction) judgeNorm(m, buckets int) error {
	j.layout = [...][1]int{{1}, {2}, {m}}
	err := j.rt.CopyStrided(j.highs, j.layout[0][:], base.At(j.squares, 1), j.layout[1][:], j.layout[2][:], base.WordSize)
	if err != nil {
		return err
	}
	counts := kernel.Entries{Idx: j.highs, Val: j.highs, N: m}
	return j.kernels.CountAbove(counts, j.limit, 1, base.At(j.flags, buckets*j.c.WorldSize()))
}
