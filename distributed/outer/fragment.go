package outer

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// fragment is a part of the parameters that is exchanged at once.
type fragment struct {
	from, n int               // its elements in the arrays
	params  []*runtime.Tensor // the program's
	deltas  []*runtime.Tensor // outer gradients, F32, parts of Loop.delta
	sync    *ddp.Gradients

	phase phase
	sent  int     // the step after which it was sent last
	made  float64 // Loop.made then
	// With Config.Weighted: what this rank counted when deltas were scaled, and the ranks' mean.
	weight, mean float64
	// What sent and made were before.
	sentBefore int
	madeBefore float64
}

// phase is where the exchange of a fragment is.
type phase uint8

const (
	resting  phase = iota // deltas hold nothing
	inFlight              // deltas are being averaged
	failed                // deltas are this rank's, as they were sent
	landed                // deltas are averages
	skipped               // the ranks have found that one of them was not finite
)

func (p phase) String() string {
	return [...]string{"resting", "in flight", "failed", "landed", "skipped"}[p]
}

// send begins the average of the outer gradients: common - own, weighted. After an error the
// fragment rests.
func (l *Loop) send(ctx context.Context, f *fragment) error {
	err := l.agree(ctx)
	if err == nil {
		err = l.subtract(f)
	}
	if err == nil {
		f.weight = l.made + l.next - f.made
		err = l.weigh(ctx, f, f.weight)
	}
	if err != nil {
		return err
	}
	for i, t := range f.deltas {
		if err := f.sync.Ready(ctx, i, t); err != nil {
			return errors.Join(err, f.sync.Wait(ctx)) // which ends the step
		}
	}
	f.sentBefore, f.madeBefore = f.sent, f.made
	f.phase, f.sent, f.made = inFlight, l.step+1, l.made+l.next
	return nil
}

// weigh scales a fragment's deltas by over divided by the ranks' mean weight, with Config.Weighted:
// the rank's weight, or the mean that deltas were divided by when they were sent.
func (l *Loop) weigh(ctx context.Context, f *fragment, over float64) error {
	if !l.cfg.Weighted {
		return nil
	}
	mean, err := distributed.AverageMetrics(ctx, l.rt, l.c, 1, f.weight)
	if err != nil {
		return err
	}
	share := 0.0
	if mean[0] != 0 {
		share = over / mean[0]
	}
	f.mean = mean[0]
	return errors.Join(l.set(weightWord, share), l.kernels.Scale(at(l.delta, f), dtype.F32, f.n, l.word(weightWord)))
}

// land waits until a fragment's deltas are averages. After an error they are this rank's, and
// the next call averages them anew.
func (l *Loop) land(ctx context.Context, f *fragment) error {
	var err error
	switch f.phase {
	case inFlight:
		err = f.sync.Wait(ctx)
	case failed:
		if err = l.weigh(ctx, f, f.mean); err == nil { // with other ranks there is another mean
			err = f.sync.ReduceAll(ctx, f.deltas)
		}
	default:
		return nil
	}
	var stats ddp.Stats
	if err == nil {
		stats, err = f.sync.Stats(ctx)
	}
	if err != nil {
		f.phase = failed
		return err
	}
	l.stats.SentElements, l.stats.SentBytes = l.stats.SentElements+stats.SentElements, l.stats.SentBytes+stats.SentBytes
	l.stats.LaunchTime, l.stats.WaitTime = l.stats.LaunchTime+stats.LaunchTime, l.stats.WaitTime+stats.WaitTime
	if f.phase = landed; stats.Skipped {
		f.phase = skipped
	}
	return nil
}

// finish is land and arrive.
func (l *Loop) finish(ctx context.Context, f *fragment) error {
	if err := l.land(ctx, f); err != nil {
		return err
	}
	return l.arrive(f)
}

// arrive moves the common parameters by what has landed, and this rank's to them.
func (l *Loop) arrive(f *fragment) error {
	var err error
	if f.phase == landed {
		err = l.optimize(f)
	} else {
		l.stats.Skipped++
	}
	if err == nil {
		err = l.adopt(f, f.phase == landed)
	}
	if err == nil && l.cfg.Decay != 1 && f.phase == landed {
		err = f.sync.ScaleResidual(l.cfg.Decay)
	}
	if err != nil {
		l.err = err // the common parameters may have moved
		return err
	}
	f.phase = resting
	l.stats.Exchanges++
	return nil
}

// subtract makes deltas the difference of the common parameters, as ranks have them after
// rounding, and the rank's own.
func (l *Loop) subtract(f *fragment) error {
	k, offset := l.kernels, f.from
	for _, t := range f.params {
		own, err := t.Ptr()
		if err != nil {
			return err
		}
		n, delta, common := t.Len(), base.At(l.delta.Ptr, offset), base.At(l.common.Ptr, offset)
		src := runtime.Source{X: delta, N: n, From: common, Grad: own, DType: t.DType(), Factor: l.word(minusWord)}
		if t.DType() != dtype.F32 {
			rounded := l.rounded.Ptr
			err = errors.Join(k.Store(rounded, t.DType(), common, n, 1, 0), l.rt.Fill(delta, n, dtype.F32, 0),
				k.Accumulate(runtime.Source{X: delta, N: n, Grad: rounded, DType: t.DType()}))
			src.From = 0
		}
		if err = errors.Join(err, k.Accumulate(src)); err != nil {
			return err
		}
		offset += n
	}
	return nil
}

// optimize moves the common parameters by the averages in deltas, which it may change: v =
// momentum·v + Δ, and common -= rate·v, or with Nesterov's rate·(Δ + momentum·v).
func (l *Loop) optimize(f *fragment) error {
	k, move := l.kernels, at(l.delta, f)
	if l.cfg.Momentum > 0 {
		v := at(l.velocity, f)
		err := errors.Join(k.Scale(v, dtype.F32, f.n, l.word(momentumWord)),
			k.Accumulate(runtime.Source{X: v, N: f.n, Grad: move, DType: dtype.F32}))
		if l.cfg.Nesterov {
			err = errors.Join(err, k.Accumulate(runtime.Source{X: move, N: f.n, Grad: v, DType: dtype.F32, Factor: l.word(momentumWord)}))
		} else {
			move = v
		}
		if err != nil {
			return err
		}
	}
	return k.Accumulate(runtime.Source{X: at(l.common, f), N: f.n, Grad: move, DType: dtype.F32, Factor: l.word(rateWord)})
}

// adopt makes the rank's parameters the common ones, mixed with what they are if asked for.
func (l *Loop) adopt(f *fragment, mix bool) error {
	k, offset := l.kernels, f.from
	for _, t := range f.params {
		own, err := t.Ptr()
		if err != nil {
			return err
		}
		n, from := t.Len(), base.At(l.common.Ptr, offset)
		if mix && l.cfg.Mix > 0 {
			delta := base.At(l.delta.Ptr, offset)
			err = errors.Join(k.Store(delta, dtype.F32, from, n, float32(1-l.cfg.Mix), 0),
				k.Accumulate(runtime.Source{X: delta, N: n, Grad: own, DType: t.DType(), Factor: l.word(mixWord)}))
			from = delta
		}
		if err = errors.Join(err, k.Store(own, t.DType(), from, n, 1, 0)); err != nil {
			return err
		}
		offset += n
	}
	return nil
}
