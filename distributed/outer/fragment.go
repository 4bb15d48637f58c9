package outer

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// fragment is a part of the parameters that is exchanged at once.
type fragment struct {
	from, n int               // its elements in the arrays
	params  []part            // rows of parameters
	deltas  []*runtime.Tensor // outer gradients, F32, parts of Loop.delta
	sync    *ddp.Gradients    // averages deltas

	phase        phase              // where it is between two exchanges
	sent, before moment             // when it was sent last, and the time before
	weight       float64            // of this rank, with Config.Weighted
	divisor      float64            // what weigh divides by the mean weight
	begun        chan error         // of begin
	cancel       context.CancelFunc // ends begin's exchange; set in phase inFlight
}

// part is rows of a parameter of the program, which begin with an element.
type part struct {
	*runtime.Tensor
	number int // among the parameters
	from   int // its first element in the arrays
}

// visit calls do with the rank's own parameters in a fragment and where they are in the arrays.
func (l *Loop) visit(f *fragment, do func(ptr uintptr, dt dtype.DType, offset, n int) error) error {
	offset := f.from
	for i, p := range f.params {
		ptr, err := p.Ptr()
		if err != nil {
			return err
		}
		n := f.deltas[i].Len()
		if err := do(ptr+uintptr(p.from*p.DType().Size()), p.DType(), offset, n); err != nil {
			return err
		}
		offset += n
	}
	return nil
}

// moment is the end of a step.
type moment struct {
	Step int     // how many steps have ended
	Made float64 // what they counted
}

// phase is where the exchange of a fragment is.
type phase uint8

const (
	resting    phase = iota // deltas hold nothing
	unaveraged              // deltas are this rank's, to be averaged
	inFlight                // deltas are being averaged
	landed                  // deltas are averages
	skipped                 // the ranks have found that one of them was not finite
)

func (p phase) String() string {
	return [...]string{"resting", "not averaged", "in flight", "landed", "skipped"}[p]
}

// send makes deltas this rank's outer gradients: common - own. With a Delay it begins their average.
func (l *Loop) send(ctx context.Context, f *fragment, now moment) error {
	if err := l.agree(ctx); err != nil {
		return err
	}
	if err := l.subtract(f); err != nil {
		return err
	}
	f.phase = unaveraged
	f.before = f.sent
	f.sent = now
	f.weight = now.Made - f.before.Made
	f.divisor = f.weight
	if l.cfg.Delay > 0 {
		l.begin(ctx, f)
	}
	return nil
}

// begin begins the average of deltas, beside steps of the program on a goroutine, which weighs them and
// selects from them. On a device with streams the host submits that at once, in the order of its other work.
func (l *Loop) begin(ctx context.Context, f *fragment) {
	f.phase = inFlight
	f.begun = make(chan error, 1)
	ctx, f.cancel = context.WithCancel(context.WithoutCancel(ctx))
	begin := func() { f.begun <- l.launch(ctx, f) }
	if l.cfg.Delay > 0 && l.rt.ComputeStream() == 0 {
		go begin()
		return
	}
	begin()
}

// launch hands the deltas over to the buckets.
func (l *Loop) launch(ctx context.Context, f *fragment) error {
	if err := l.weigh(ctx, f); err != nil {
		return err
	}
	for i, delta := range f.deltas {
		err := f.sync.Ready(ctx, i, delta)
		if err != nil {
			ended := f.sync.Wait(ctx) // of the step, so that it can be repeated
			return cmp.Or(ended, err)
		}
	}
	return nil
}

// wait waits until begin has ended, which it does early when ctx is done.
func (f *fragment) wait(ctx context.Context) error {
	defer f.cancel()
	defer context.AfterFunc(ctx, f.cancel)()
	return <-f.begun
}

// weigh scales a fragment's deltas, with Config.Weighted: by this rank's weight divided by the ranks'
// mean. When they are averaged again with other ranks, there is another mean. Reproducible ones are multiplied by
// their weight when they are rounded.
func (l *Loop) weigh(ctx context.Context, f *fragment) error {
	switch {
	case l.cfg.Reduce.Weighted && l.cfg.Weighted:
		return f.sync.Weigh(f.weight)
	case l.cfg.Reduce.Weighted:
		return f.sync.Weigh(1)
	case !l.cfg.Weighted:
		return nil
	}
	mean, err := distributed.AverageMetrics(ctx, l.rt, l.c, 1, f.weight)
	if err != nil {
		return err
	}
	share := 0.0
	if mean[0] != 0 {
		share = f.divisor / mean[0]
	}
	f.divisor = mean[0]
	if share == 0 { // whatever the deltas are
		return l.rt.Fill(address(l.delta, f), f.n, dtype.F32, 0)
	}
	if err := l.set(weightWord, share); err != nil {
		return err
	}
	return l.kernels.Scale(address(l.delta, f), dtype.F32, f.n, l.word(weightWord))
}

// land waits until a fragment's deltas are averages. After an error they are this rank's, and
// the next call averages them anew.
func (l *Loop) land(ctx context.Context, f *fragment) error {
	started := time.Now()
	switch f.phase {
	case unaveraged:
		l.begin(ctx, f)
	case resting, landed, skipped:
		return nil
	}
	stats, err := f.complete(ctx)
	l.stats.WaitTime += time.Since(started)
	if err != nil {
		f.phase = unaveraged
		return err
	}
	l.stats.SentElements += stats.SentElements
	l.stats.SentBytes += stats.SentBytes
	f.phase = landed
	if stats.Skipped {
		f.phase = skipped
	}
	return nil
}

// complete waits for the average of deltas.
func (f *fragment) complete(ctx context.Context) (ddp.Stats, error) {
	if err := f.wait(ctx); err != nil {
		return ddp.Stats{}, err
	}
	if err := f.sync.Wait(base.Quiet(ctx)); err != nil {
		return ddp.Stats{}, err
	}
	return f.sync.Stats(ctx)
}

// finish is land, and moves the common parameters by what has landed, and this rank's to them.
func (l *Loop) finish(ctx context.Context, f *fragment) error {
	// The ranks may differ from those that sent it.
	if err := l.agree(ctx); err != nil {
		return err
	}
	if err := l.land(ctx, f); err != nil {
		return err
	}
	// From here on an error stays, as the common parameters may have moved.
	l.err = l.apply(ctx, f)
	if l.err != nil {
		return l.err
	}
	f.phase = resting
	l.stats.Exchanges++
	return nil
}

// apply moves the common parameters by a fragment's averages, unless it was skipped, and this rank's to them.
func (l *Loop) apply(ctx context.Context, f *fragment) error {
	if f.phase != landed {
		l.stats.Skipped++
		l.reportSkip(ctx, f)
		return l.adopt(f, false)
	}
	if err := l.optimize(f); err != nil {
		return err
	}
	if l.cfg.Decay != 1 {
		if err := f.sync.ScaleResidual(l.cfg.Decay); err != nil {
			return err
		}
	}
	return l.adopt(f, true)
}

// subtract makes deltas the difference of the common parameters, as ranks have them after
// rounding, and the rank's own.
func (l *Loop) subtract(f *fragment) error {
	k := l.kernels
	return l.visit(f, func(ptr uintptr, dt dtype.DType, offset, n int) (err error) {
		delta := base.At(l.delta.Ptr, offset)
		common := base.At(l.common.Ptr, offset)
		src := kernel.Source{
			X:      delta,
			N:      n,
			From:   common,
			Grad:   ptr,
			DType:  dt,
			Factor: l.word(minusWord),
		}
		if dt != dtype.F32 {
			rounded := l.rounded.Ptr
			err = errors.Join(k.Store(rounded, dt, common, n, 1, 0), l.rt.Fill(delta, n, dtype.F32, 0),
				k.Accumulate(kernel.Source{X: delta, N: n, Grad: rounded, DType: dt}))
			src.From = 0
		}
		return errors.Join(err, k.Accumulate(src))
	})
}

// optimize moves the common parameters by the averages in deltas, which it may change: v =
// momentum·v + Δ, and common -= rate·v, or with Nesterov's rate·(Δ + momentum·v).
func (l *Loop) optimize(f *fragment) error {
	k := l.kernels
	move := address(l.delta, f)
	if l.cfg.Momentum > 0 {
		v := address(l.velocity, f)
		err := errors.Join(k.Scale(v, dtype.F32, f.n, l.word(momentumWord)),
			k.Accumulate(kernel.Source{X: v, N: f.n, Grad: move, DType: dtype.F32}))
		if l.cfg.Nesterov {
			velocity := kernel.Source{
				X:      move,
				N:      f.n,
				Grad:   v,
				DType:  dtype.F32,
				Factor: l.word(momentumWord),
			}
			err = errors.Join(err, k.Accumulate(velocity))
		} else {
			move = v
		}
		if err != nil {
			return err
		}
	}
	common := address(l.common, f)
	return k.Accumulate(kernel.Source{X: common, N: f.n, Grad: move, DType: dtype.F32, Factor: l.word(rateWord)})
}

// adopt makes the rank's parameters the common ones, mixed with what they are if asked for.
func (l *Loop) adopt(f *fragment, mix bool) error {
	return l.visit(f, func(ptr uintptr, dt dtype.DType, offset, n int) (err error) {
		from := base.At(l.common.Ptr, offset)
		if mix && l.cfg.Mix > 0 {
			delta := base.At(l.delta.Ptr, offset)
			err = errors.Join(l.kernels.Store(delta, dtype.F32, from, n, float32(1-l.cfg.Mix), 0),
				l.kernels.Accumulate(kernel.Source{X: delta, N: n, Grad: ptr, DType: dt, Factor: l.word(mixWord)}))
			from = delta
		}
		return errors.Join(err, l.kernels.Store(ptr, dt, from, n, 1, 0))
	})
}
