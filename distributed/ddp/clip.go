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
func (t *transaction) clip(
	ctx context.Context, gradients []*runtime.Tensor, buckets int, weight float64,
) (uintptr, error) {
	if t.cfg.ClipNorm == 0 || len(gradients) == 0 {
		return 0, nil
	}
	if err := t.sumSquares(gradients, weight); err != nil {
		return 0, err
	}
	m := len(gradients)
	share := weight * weight
	limit := t.cfg.ClipNorm / math.Sqrt(float64(t.c.WorldSize()))
	if t.cfg.ClipGlobal {
		share = 1 / float64(t.c.WorldSize())
		limit = t.cfg.ClipNorm
		if err := t.weighSquares(ctx, m, weight); err != nil {
			return 0, err
		}
		err := t.order.Around(ctx, func() error {
			return t.c.AllReduce(t.squares, t.squares, m, dtype.F64, comm.Sum)
		})
		if err != nil {
			return 0, err
		}
		if t.cfg.NonFinite != engine.PassNonFinite {
			if err := t.judgeNorm(m, buckets); err != nil {
				return 0, err
			}
		}
	}
	return t.factor, t.kernels.ClipFactor(t.factor, t.squares, m, share, limit)
}

// sumSquares computes the squared norms of gradients.
func (t *transaction) sumSquares(gradients []*runtime.Tensor, weight float64) error {
	if weight == 0 {
		return t.rt.Fill(t.squares, len(gradients), dtype.F64, 0)
	}
	for i, gradient := range gradients {
		ptr, err := gradient.Ptr()
		if err != nil {
			return err
		}
		if err := t.kernels.SumSquares(ptr, gradient.DType(), gradient.Len(), base.At(t.squares, 2*i)); err != nil {
			return err
		}
	}
	return nil
}

// weighSquares makes m squared norms those of gradients that are multiplied by a weight. The host waits and computes
// them, as kernels have no products of F64.
func (t *transaction) weighSquares(ctx context.Context, m int, weight float64) error {
	if weight == 0 || weight == 1 {
		return nil
	}
	if err := t.order.HostAfterCompute(ctx); err != nil {
		return err
	}
	if len(t.norms) < m {
		t.norms = make([]float64, m)
	}
	norms := t.norms[:m]
	if err := t.rt.CopyOut(hostmem.Bytes(norms), t.squares); err != nil {
		return err
	}
	for i := range norms {
		norms[i] *= weight * weight
	}
	return t.rt.CopyIn(t.squares, hostmem.Bytes(norms))
}

// judgeNorm counts the squares that are not finite, of which all ranks know: none of them is clipped
// then. A bucket that sends nothing in this step would not find out.
func (t *transaction) judgeNorm(m, buckets int) error {
	t.layout = [...][1]int{{1}, {2}, {m}}
	err := t.rt.CopyStrided(t.highs, t.layout[0][:], base.At(t.squares, 1), t.layout[1][:], t.layout[2][:], base.WordSize)
	if err != nil {
		return err
	}
	counts := kernel.Entries{
		Idx: t.highs,
		Val: t.highs,
		N:   m,
	}
	return t.kernels.CountAbove(counts, t.limit, 1, base.At(t.flags, buckets*t.c.WorldSize()))
}
