package distributedtest

import (
	"context"
	"math"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// CheckPattern reduces a sequence of F32 gradients of n elements and checks that all ranks get the same bits, that the
// statistics agree with a meter, that oktopk keeps its volume, and, unless NoErrorFeedback is set, that nothing gets
// lost. gradient returns the gradient of any rank in any step. After a gradient with a NaN, an infinity or numbers
// whose sums may be infinite, only the bits are compared.
//
// All ranks of r's world call it together.
func CheckPattern(ctx context.Context, r commtest.Rank, cfg engine.Config, n, steps int,
	gradient func(rank, step int) []float32) error {
	p := newRank(ctx, &suite{}, r)
	return p.run(func(*rank) {
		p.reduces(cfg.Pattern, n, dtype.F32, cfg, func(u *run) {
			for step := range steps {
				for peer := range p.size {
					u.notFinite = u.notFinite || !finite(gradient(peer, step))
				}
				u.step(gradient(p.rank, step))
			}
		})
	})
}

// finite reports whether sums of such gradients are finite.
func finite(x []float32) bool {
	return !slices.ContainsFunc(x, func(v float32) bool {
		return !(math.Abs(float64(v)) < 1e36)
	})
}

// inBudget checks oktopk's bound on what a rank sends in a step, in elements, or in bytes of the codec. With
// streams a few numbers come on top.
func (u *run) inBudget() {
	stats := u.stats
	if u.cfg.Pattern != sparsity.Oktopk || stats.Dense {
		return
	}
	bound := 6 * int64(stats.K) * int64(u.size-1) / int64(u.size)
	if stats.Step == 0 { // the ranks compare what they reduce
		bound += int64(u.size - 1)
	}
	if _, ok := comm.As[comm.StreamOrder](u.c); ok && u.rt.ComputeStream() != 0 {
		bound += 6 * int64(u.size-1)
	}
	switch {
	case u.codec != kernel.CodecNone && stats.Pattern != sparsity.Oktopk: // few entries, beside which headers count
	case u.codec != kernel.CodecNone: // a word of 6k(P-1)/P is half of an entry of a message
		share := max(stats.K/(2*u.size), 1)
		entry := float64(u.codec.Bound(share, u.t.Len())) / float64(share)
		if limit := float64(bound) / 2 * entry; float64(stats.SentBytes) > limit {
			fail("step %d: %d bytes sent, more than 3k(P-1)/P entries of %.2f bytes", stats.Step, stats.SentBytes, entry)
		}
	case stats.SentElements > bound:
		fail("step %d: %d elements sent, more than 6k(P-1)/P = %d", stats.Step, stats.SentElements, bound)
	}
}
