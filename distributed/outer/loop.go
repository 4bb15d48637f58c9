package outer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/repeats"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Loop exchanges the parameters of a model that each rank trains with its own optimizer.
//
//	loop, err := outer.New(ctx, rt, c, parameters, outer.Config{Every: 50})
//	…
//	for batch := range batches {
//		// forward, backward, the step of the inner optimizer
//		err := loop.Step(ctx)
//	}
//
// It keeps the common parameters in F32, an outer gradient of the same length, with Momentum a velocity, and the state
// of the reduction.
//
// A Loop belongs to one goroutine at a time. So does its communicator during calls. With a Delay, the Loop uses a
// sub-communicator, so that the program can use the communicator between calls.
type Loop struct {
	rt       runtime.Runtime   // of the parameters
	kernels  kernel.Kernels    // of rt
	c        comm.Communicator // another one after Rebind
	ownsComm bool              // c is the loop's
	cfg      Config            // with its defaults
	order    base.Order        // has c's work and the compute stream wait for each other
	agreed   bool              // the ranks of c have compared what they average

	buffers   base.Buffers // those below that hold memory
	common    base.Buffer  // F32: the common parameters
	delta     base.Buffer  // F32: outer gradients, or their averages
	velocity  base.Buffer  // F32; empty without Momentum
	rounded   base.Buffer  // a parameter as its type has it; empty where all are F32
	words     base.Buffer  // factors for kernels
	fragments []*fragment  // which partition the parameters
	n         int          // elements of all parameters

	position position    // between the last step and the next
	next     float64     // what the next step counts
	stats    Stats       // added up since New or Restore
	skips    repeats.Log // of fragments that were skipped
	err      error       // sticky; returned by every later call
	closed   bool        // Close was called
}

// position is where a loop is between two steps.
type position struct {
	Now                  moment // the last step
	Round, First, Length int    // the window: its number, after how many steps it begins, how many it has
}

// Stats describes the work of a [Loop] on this rank. After [Loop.Restore], Steps and Rounds continue from the saved
// run's values, which are FirstStep and FirstRound. The other fields begin at 0.
type Stats struct {
	Steps     int // of the inner optimizer
	Rounds    int // windows that ended
	FirstStep int // what Steps was after New or Restore: this loop has made Steps - FirstStep
	// FirstRound is the value of Rounds after New or Restore.
	FirstRound int
	Exchanges  int // fragments that arrived
	Skipped    int // fragments that the ranks skipped, as one of them was not finite
	// SentElements and SentBytes count as in [ddp.Stats], over all exchanges.
	SentElements, SentBytes int64
	// WaitTime is the host's time in exchanges that steps did not hide.
	WaitTime time.Duration
}

// The words in device memory that kernels multiply by.
const (
	minusWord = iota
	rateWord
	momentumWord
	mixWord
	weightWord
	squareWord = 6 // an F64
	words      = 8
)

// New prepares a loop for parameters, contiguous tensors of F32, F16 or BF16 in rt's memory, which the program's
// optimizer changes and Step replaces. All ranks of c call it together, with the same configuration, and with
// parameters of the same lengths, types and bits ([distributed.BroadcastAll]), the first common parameters.
//
// Errors are those of [ddp.New], and [comm.ErrArgument] for a field of cfg that is out of range, and for two parameters
// that share memory. A difference between ranks is [comm.ErrMismatch] when the first fragment is sent.
func New(ctx context.Context, rt runtime.Runtime, c comm.Communicator, params []*runtime.Tensor,
	cfg Config) (*Loop, error) {
	const op = "outer loop"
	if rt == nil || c == nil || len(params) == 0 {
		return nil, base.OpError(op, fmt.Errorf("%w: runtime or communicator is nil, or there are no parameters",
			comm.ErrArgument))
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	l := &Loop{
		rt:   rt,
		c:    c,
		cfg:  cfg,
		next: 1,
	}
	if err := l.prepare(ctx, params); err != nil {
		return nil, base.OpError(op, errors.Join(err, l.Close()))
	}
	return l, nil
}

// prepare makes what a new loop needs. After an error, Close frees what there is of it.
func (l *Loop) prepare(ctx context.Context, params []*runtime.Tensor) error {
	l.position.Length = l.cfg.Every
	var err error
	l.kernels, err = kernel.Lookup(l.rt)
	if err != nil {
		return err
	}
	if err := l.allocate(params); err != nil {
		return err
	}
	if err := l.bind(ctx, l.c); err != nil {
		return err
	}
	for _, f := range l.fragments {
		f.sync, err = ddp.New(ctx, l.rt, l.c, f.deltas, l.cfg.Reduce)
		if err != nil {
			return err
		}
	}
	return nil
}

// bind makes c the loop's communicator, or with a Delay one split from it.
func (l *Loop) bind(ctx context.Context, c comm.Communicator) error {
	if l.cfg.Delay > 0 {
		split, err := c.Split(ctx, 0, c.Rank())
		if err != nil {
			return err
		}
		c = split
	}
	l.c = c
	l.ownsComm = l.cfg.Delay > 0
	l.order = base.NewOrder(l.rt, c)
	l.agreed = false
	return nil
}

// allocate checks the parameters, allocates what the loop keeps of them, and cuts them into fragments of about equal
// length.
func (l *Loop) allocate(params []*runtime.Tensor) error {
	widest := 0
	for i, t := range params {
		if _, err := base.Address("outer loop", fmt.Sprintf("parameter %d", i), l.c, t); err != nil {
			return err
		}
		if err := errors.Join(base.SameStream(l.rt, t.Runtime()), base.CheckGradientType(t.DType())); err != nil {
			return &distributed.TensorError{
				Role:  "parameter",
				Index: i,
				Err:   err,
			}
		}
		l.n += t.Len()
		if t.DType() != dtype.F32 {
			widest = max(widest, t.Bytes())
		}
	}
	if err := base.Disjoint("parameter", params); err != nil {
		return err
	}
	arrays := map[*base.Buffer]int{
		&l.common:  l.n * base.WordSize,
		&l.delta:   l.n * base.WordSize,
		&l.rounded: widest,
		&l.words:   words * base.WordSize,
	}
	if l.cfg.Momentum > 0 {
		arrays[&l.velocity] = l.n * base.WordSize
	}
	for b, bytes := range arrays {
		if err := l.buffers.Allocate(l.rt, b, bytes); err != nil {
			return err
		}
		if bytes == 0 {
			continue
		}
		if err := l.rt.Fill(b.Ptr, bytes/base.WordSize, dtype.F32, 0); err != nil {
			return err
		}
	}
	factors := map[int]float64{
		minusWord:    -1,
		rateWord:     -l.cfg.LearningRate,
		momentumWord: l.cfg.Momentum,
		mixWord:      l.cfg.Mix,
	}
	for word, x := range factors {
		if err := l.set(word, x); err != nil {
			return err
		}
	}
	return l.cut(params)
}

// cut makes the fragments of the parameters, whole rows each, and copies what they have.
func (l *Loop) cut(params []*runtime.Tensor) error {
	next := 0
	for i := range l.cfg.Fragments {
		f := &fragment{from: next}
		offset := 0
		for number, t := range params {
			shape := append([]int{1}, t.Shape()[min(1, len(t.Shape())):]...)
			row := 1
			for _, d := range shape {
				row *= max(d, 1)
			}
			rowsBefore := func(i int) int { // of t's rows, those before the fragment
				return min(max(i*l.n/l.cfg.Fragments-offset, 0)/row*row, t.Len())
			}
			from := rowsBefore(i)
			to := rowsBefore(i + 1)
			offset += t.Len()
			if from == to {
				continue
			}
			shape[0] = (to - from) / row
			d, err := runtime.Wrap(l.rt, base.At(l.delta.Ptr, next), dtype.F32, shape, nil, nil)
			if err != nil {
				return err
			}
			f.params = append(f.params, part{t, number, from})
			f.deltas = append(f.deltas, d)
			next += d.Len()
		}
		f.n = next - f.from
		if f.n == 0 {
			return base.ConfigError("Fragments is %d, more than there are rows of parameters", l.cfg.Fragments)
		}
		l.fragments = append(l.fragments, f)
		err := l.visit(f, func(ptr uintptr, dt dtype.DType, offset, n int) error {
			return l.kernels.Accumulate(kernel.Source{
				X:     base.At(l.common.Ptr, offset),
				N:     n,
				Grad:  ptr,
				DType: dt,
			})
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Step ends a step of the inner optimizer. It sends a fragment that is due. When a fragment arrives, the host waits for
// the exchange, the common parameters move, and the rank's parameters become the common ones or are mixed with them.
// Without a Delay a fragment arrives in the step that sends it.
//
// A round is a transaction. After an error of an exchange, its fragment on this rank is as before, and the step does
// not count. The same call repeats it, after [Loop.Rebind] if the communicator is aborted. A fragment that arrived in
// the step before another could not be sent has arrived, and the repeat skips it. If outer gradients are not finite on
// any rank, all ranks discard them and adopt the common parameters ([Stats].Skipped), unless Config.Reduce says
// otherwise. An error of the runtime while the common parameters move is permanent.
func (l *Loop) Step(ctx context.Context) error {
	return l.do("outer step", func() error {
		now := l.position.Now
		return l.step(ctx, moment{Step: now.Step + 1, Made: now.Made + l.next})
	})
}

func (l *Loop) step(ctx context.Context, now moment) error {
	for _, f := range l.fragments {
		if f.phase != resting && f.sent.Step < now.Step && now.Step >= f.sent.Step+l.cfg.Delay {
			if err := l.finish(ctx, f); err != nil {
				return err
			}
		}
	}
	next := l.position
	for i, f := range l.fragments {
		turn := next.First + (i+1)*next.Length/len(l.fragments)
		if now.Step != turn {
			continue
		}
		if f.sent.Step != now.Step {
			if err := l.send(ctx, f, now); err != nil {
				return err
			}
		}
		if l.cfg.Delay == 0 {
			if err := l.finish(ctx, f); err != nil {
				return err
			}
		}
	}
	next.Now = now
	if now.Step == next.First+next.Length {
		next.Round++
		next.First = now.Step
		next.Length = l.cfg.Every
	}
	l.position = next
	l.next = 1
	return nil
}

// Weigh sets the weight of the step that Step ends next, with Config.Weighted: its number of samples, for example, or 0
// if the rank had no data and made none. The default is 1. With Reduce.Reproducible weights are whole numbers, and a
// rank's weights in a window add up to at most 2^24.
func (l *Loop) Weigh(weight float64) error {
	if !(weight >= 0) || math.IsInf(weight, 1) {
		return base.OpError("outer weight", fmt.Errorf("%w: weight is %v, want a finite number, not negative",
			comm.ErrArgument, weight))
	}
	if l.cfg.Reduce.Weighted && weight != math.Trunc(weight) {
		return base.OpError("outer weight", fmt.Errorf("%w: weight is %v, want a whole number with Reduce.Reproducible",
			comm.ErrArgument, weight))
	}
	l.next = weight
	return nil
}

// Adopt sets the rank's parameters to the common ones. Call it on a rank without parameters after [Loop.Restore], or
// before evaluating the common model.
func (l *Loop) Adopt() error {
	return l.do("outer adopt", func() (err error) {
		for _, f := range l.fragments {
			err = errors.Join(err, l.adopt(f, false))
		}
		return err
	})
}

// Stats returns the statistics of the loop since New or Restore.
func (l *Loop) Stats() Stats {
	s := l.stats
	s.Steps = l.position.Now.Step
	s.Rounds = l.position.Round
	return s
}

// Close frees the memory, and the communicator that New split. Parameters stay as they are. In the middle of an
// exchange, see [ddp.Gradients.Close]: after an error the memory is not freed until a Close succeeds. Closing twice is
// fine.
func (l *Loop) Close() error {
	l.closed = true
	errs := []error{l.order.DrainToFree()}
	for _, f := range l.fragments {
		if f.phase == inFlight {
			ctx, cancel := context.WithTimeout(context.Background(), base.DrainLimit)
			_ = f.wait(ctx) // Close finds what it leaves in flight
			cancel()
			f.phase = resting
		}
		if f.sync != nil {
			errs = append(errs, f.sync.Close())
		}
	}
	if l.ownsComm {
		errs = append(errs, l.c.Close())
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, f := range l.fragments {
		for _, t := range f.deltas {
			errs = append(errs, t.Free())
		}
	}
	return errors.Join(append(errs, l.buffers.Release(l.rt, 0))...)
}

// do calls f, unless the loop is of no use.
func (l *Loop) do(op string, f func() error) error {
	if l.closed {
		return base.OpError(op, base.ClosedError("outer loop"))
	}
	if l.err != nil {
		return base.OpError(op, l.err)
	}
	return base.OpError(op, f())
}

// agree compares the ranks' configurations, where they are, and which exchanges of fragments have
// failed, before the first exchange or arrival with a communicator.
func (l *Loop) agree(ctx context.Context) error {
	if l.agreed || l.c.WorldSize() == 1 {
		return nil
	}
	p := l.position
	terms := fmt.Sprintf("%s\nstep %d, round %d from step %d to %d",
		l.cfg.terms(), p.Now.Step, p.Round, p.First, p.First+p.Length)
	for i, f := range l.fragments {
		if f.phase != resting {
			terms += fmt.Sprintf("\nfragment %d, sent after step %d: %v", i, f.sent.Step, f.phase)
		}
	}
	err := base.Agree(ctx, l.rt, l.c, &l.order, &l.buffers, terms)
	l.agreed = err == nil
	return err
}

// address returns the address of a fragment's elements in an array.
func address(b base.Buffer, f *fragment) uintptr {
	return base.At(b.Ptr, f.from)
}

// word returns the address of a word, and set stores it.
func (l *Loop) word(i int) uintptr {
	return base.At(l.words.Ptr, i)
}

func (l *Loop) set(i int, x float64) error {
	return l.rt.CopyIn(l.word(i), binary.NativeEndian.AppendUint32(nil, math.Float32bits(float32(x))))
}
