package train

import (
	"cmp"
	"context"

	"gonum.org/v1/gonum/blas/blas32"

	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/runtime"
)

// newReproducible prepares steps whose weights do not depend on the number of ranks.
func (t *trainer) newReproducible(ctx context.Context) (err error) {
	cfg := ddp.Config{Reproducible: t.cfg.Reproducible, ReproducibleBits: t.cfg.ReproducibleBits}
	t.fixed, err = ddp.New(ctx, t.rank.Runtime, t.rank.Comm, []*runtime.Tensor{t.update}, cfg)
	if err == nil {
		t.owned = append(t.owned, t.fixed.Close)
	}
	return err
}

// contribute computes the gradients of this rank's microbatches and averages the gradient over the microbatches of
// all ranks. It returns this rank's term of the loss averaged over ranks. A microbatch has the same examples, and its
// gradient the same bits, on whichever rank it is computed.
func (t *trainer) contribute(ctx context.Context, step, stepsPerEpoch int) (loss float64, err error) {
	batch := t.batch(step, stepsPerEpoch)
	count := t.cfg.Reproducible
	ranks := t.rank.Comm.WorldSize()
	rank := t.rank.Comm.Rank()
	end := (rank + 1) * count / ranks
	for i := rank * count / ranks; i < end; i++ {
		examples := batch[i*len(batch)/count : (i+1)*len(batch)/count]
		loss += t.model.gradient(t.gradient, t.data, examples, float32(count)/float32(len(batch)))
		if err := runtime.CopyIn(t.update, t.gradient); err != nil {
			return 0, err
		}
		if i < end-1 {
			err = t.fixed.Accumulate(0, t.update)
		} else {
			err = t.fixed.Ready(ctx, 0, t.update)
		}
		if err != nil {
			break // Wait rolls the step back
		}
	}
	if err := cmp.Or(t.fixed.Wait(ctx), err); err != nil {
		return 0, err
	}
	if !t.cfg.Elastic { // a member's vote has waited; its step counts even if another member has been lost since
		if err := t.rank.Comm.Sync(ctx); err != nil {
			return 0, err
		}
	}
	return loss * float64(ranks) / float64(len(batch)), runtime.CopyOut(t.gradient, t.fixed.Result(0))
}

// descend moves the weights along the mean gradient, with one momentum for all ranks.
func (t *trainer) descend(step, stepsPerEpoch int) {
	velocity := vector(t.velocity)
	blas32.Scal(float32(t.cfg.Momentum), velocity)
	blas32.Axpy(1, vector(t.gradient), velocity)
	blas32.Axpy(-t.cfg.schedule(step, stepsPerEpoch), velocity, vector(t.model.params))
}
