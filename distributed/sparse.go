package distributed

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// Sparse averages one gradient tensor over the ranks, step after step, with
// one of the [Patterns]. It keeps what is particular to that tensor: the
// residual, thresholds, regions and scratch memory. Make one per tensor (or
// per bucket, see [GradientSync]) with [NewSparse].
//
// A Sparse belongs to one goroutine at a time, and so do the calls of its
// communicator during a step.
type Sparse struct {
	*engine
	meter    *comm.Meter
	selector selector
	exchange exchange

	steps   int     // all steps, also dense ones
	picked  message // what the selector picked
	remains buffer  // the residual
	closed  bool

	// Of the last step.
	stats   StepStats
	counted bool            // stats has what is on the device, too
	picks   runtime.Entries // unless it was dense
	result  result
}

// StepStats tells what the last step of a [Sparse] did on this rank.
type StepStats struct {
	Step     int  // number of the step, from 0
	Dense    bool // the step sent everything
	Elements int  // length of the tensor
	K        int  // entries that a rank was to pick
	// PickedLocal is how many entries this rank picked.
	PickedLocal int
	// PickedGlobal is how many entries the result was put together from: the
	// number of entries that it has, or, where an exchange does not merge the
	// ranks' lists before it gathers them, the sum of their lengths.
	PickedGlobal int
	// Threshold is the magnitude that the picked entries have at least,
	// GlobalThreshold (oktopk) that of the sums that went into the result.
	Threshold, GlobalThreshold float32
	// SentElements and SentBytes are what this rank sent as comm.Meter counts:
	// a value and an index are one element each, an allgather counts what the
	// rank receives.
	SentElements, SentBytes int64
	// SelectTime is the host's time for adding the gradient to the residual
	// and picking, ExchangeTime for everything after. On a device with streams
	// the host runs ahead, and each may contain the device's work of the other.
	SelectTime, ExchangeTime time.Duration
}

// NewSparse prepares the reduction of a tensor of n elements in rt's memory.
// It does not communicate. All ranks of c pass the same n and cfg.
//
// Errors: [comm.ErrArgument] for a field of cfg that is out of range or a
// negative n or one above 2^31-1; [runtime.ErrUnsupported] for a runtime
// without [runtime.Kernels], which only the dense pattern without clipping does
// not need; [comm.ErrDevice] if c does not reach rt's memory.
func NewSparse(rt runtime.Runtime, c comm.Communicator, n int, cfg Config) (*Sparse, error) {
	if rt == nil || c == nil {
		return nil, opError("sparse", fmt.Errorf("%w: runtime or communicator is nil", comm.ErrArgument))
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if n < 0 || n > math.MaxInt32 {
		return nil, opError("sparse", fmt.Errorf("%w: %d elements, want 0 to %d (indices have 31 bits)", comm.ErrArgument, n, math.MaxInt32))
	}
	kernels, err := runtime.KernelsOf(rt)
	if err != nil && (cfg.Pattern != Dense || cfg.ClipNorm > 0) {
		return nil, opError("sparse", err)
	}
	if err := comm.CheckDevice(c, rt.Device()); err != nil {
		return nil, opError("sparse", err)
	}
	meter := comm.NewMeter(c)
	e, err := newEngine(rt, kernels, meter, n, cfg)
	s := &Sparse{engine: e, meter: meter}
	if err == nil && cfg.Pattern != Dense {
		e.allocate(&s.remains, n*wordSize)
		e.residual = s.remains.ptr
		e.fill(e.residual, n)
		err = e.err
	}
	e.permanent = len(e.buffers)
	if err != nil {
		return nil, opError("sparse", errors.Join(err, e.close()))
	}
	return s, nil
}

// AllReduce replaces t by (an approximation of) the average of all ranks' t:
// the same bits on every rank, zero where no rank's entry made it into the
// result. t has the n elements that NewSparse was told, in any shape; F32, F16
// or BF16 ([comm.ErrUnsupported] otherwise), and its runtime has the compute
// stream of the one that NewSparse was told ([runtime.ErrDevice] otherwise). What
// was not sent is kept, in F32, and added to the next step's gradient. The result
// is ready as that of [AllReduce] is.
//
// A wrong argument is an error before anything happened. After any other
// error t's content is undefined, the ranks may be out of step, and later
// calls return that error again. The other ranks wait for this one then, until
// their contexts end or this rank closes its communicator, which is
// [comm.ErrPeerFailed] on them: so close it. Lengths that another rank announces
// and that no tensor of n elements has are [comm.ErrMismatch].
func (s *Sparse) AllReduce(ctx context.Context, t *runtime.Tensor) error {
	const op = "sparse allreduce"
	if s.closed {
		return opError(op, comm.ErrClosed)
	}
	if s.err != nil {
		return opError(op, s.err)
	}
	ptr, err := s.checkTensor(op, t)
	if err != nil {
		return err
	}
	before := s.meter.Totals()
	s.stats, s.counted = StepStats{Step: s.steps, Elements: s.n}, false
	density, dense := s.cfg.Schedule.density(s.steps, s.cfg.Density)
	if dense || s.cfg.Pattern == Dense {
		s.reduceDense(ctx, ptr, t.DType())
	} else {
		s.reduceSparse(ctx, ptr, t.DType(), density)
	}
	if s.err != nil {
		return opError(op, s.err)
	}
	s.steps++
	after := s.meter.Totals()
	s.stats.SentElements = after.SentElements - before.SentElements
	s.stats.SentBytes = after.SentBytes - before.SentBytes
	return nil
}

// Stats returns what the last step did. Numbers that are on the device are
// waited for, until ctx is done.
func (s *Sparse) Stats(ctx context.Context) (StepStats, error) {
	if s.counted || s.stats.Dense || s.picks.Idx == 0 || s.closed || s.err != nil {
		return s.stats, nil
	}
	if s.read(ctx); s.err != nil {
		return s.stats, opError("stats", s.err)
	}
	local, err := s.lengthOf(s.picks)
	global := 0
	for _, l := range s.result.lists {
		n, e := s.lengthOf(l)
		global, err = global+n, errors.Join(err, e)
	}
	if s.result.dense != 0 {
		global = s.n
		if local == 0 { // it was not asked to pick
			local = s.n
		}
	}
	s.stats.PickedLocal, s.stats.PickedGlobal = local, global
	s.stats.Threshold, s.stats.GlobalThreshold = s.float(numUsed), s.globalThreshold
	if err != nil {
		return s.stats, opError("stats", err)
	}
	s.counted = true
	return s.stats, nil
}

// Residual returns this rank's residual as a tensor of n F32 elements (a view,
// valid until Close), for checkpoints, inspection, and to forget what was not
// sent (fill it with zeros). It is nil for the dense pattern, which has none.
func (s *Sparse) Residual() (*runtime.Tensor, error) {
	if s.closed {
		return nil, opError("residual", comm.ErrClosed)
	}
	if s.cfg.Pattern == Dense {
		return nil, nil
	}
	return runtime.Wrap(s.rt, s.residual, dtype.F32, []int{s.n}, nil, nil)
}

// Close frees the memory. The communicator and tensors stay as they are.
// Closing twice is fine.
//
// If a step has failed in the middle of an exchange, Close waits for the
// communicator, at most 5 seconds. After an error of that wait the memory is not
// given back, because the communicator may still write it: close the communicator
// then, and after it the Sparse again.
func (s *Sparse) Close() error {
	s.closed = true
	if err := s.engine.close(); err != nil {
		return opError("sparse close", err)
	}
	return nil
}

// checkTensor checks a gradient and returns its address.
func (s *Sparse) checkTensor(op string, t *runtime.Tensor) (uintptr, error) {
	ptr, err := address(op, "gradient", s.c, t)
	if err != nil {
		return 0, err
	}
	if err := checkGradientType(t.DType()); err != nil {
		return 0, opError(op, err)
	}
	if t.Len() != s.n {
		return 0, shapeError(op, "gradient has %d elements, want %d", t.Len(), s.n)
	}
	if err := sameStream(s.rt, t.Runtime()); err != nil {
		return 0, opError(op, fmt.Errorf("the runtime of NewSparse and the gradient: %w", err))
	}
	return ptr, nil
}

// checkGradientType refuses what the kernels cannot add to a residual.
func checkGradientType(dt dtype.DType) error {
	switch dt {
	case dtype.F32, dtype.F16, dtype.BF16:
		return nil
	}
	return fmt.Errorf("%w: gradient is %v, want f32, f16 or bf16", comm.ErrUnsupported, dt)
}

// reduceDense averages the gradient itself. Residuals are not touched: dense
// steps come before sparse ones, so there is nothing in them yet.
func (s *Sparse) reduceDense(ctx context.Context, grad uintptr, dt dtype.DType) {
	started := time.Now()
	s.stats.Dense, s.stats.K = true, s.n
	s.stats.PickedLocal, s.stats.PickedGlobal = s.n, s.n
	if factor := s.clip(ctx, grad, dt); factor != 0 && s.err == nil {
		s.check(s.kernels.Scale(grad, dt, s.n, factor))
	}
	exchanging := time.Now()
	s.communicate(ctx, comm.AllReduceCall(grad, grad, s.n, dt, comm.Avg))
	s.stats.SelectTime = exchanging.Sub(started)
	s.stats.ExchangeTime = time.Since(exchanging)
}

func (s *Sparse) reduceSparse(ctx context.Context, grad uintptr, dt dtype.DType, density float64) {
	started := time.Now()
	k := count(density, s.n)
	s.plan(k)
	s.stats.K = k
	if s.cfg.NoErrorFeedback {
		s.fill(s.residual, s.n)
	}
	s.target = gradient{grad, dt, s.clip(ctx, grad, dt)}
	s.picks, s.result = runtime.Entries{}, result{}
	if k == 0 {
		s.accumulate(s.target)
		s.merge(grad, dt, nil, 1)
		s.stats.SelectTime = time.Since(started)
		return
	}
	s.picks = s.selector.pick(s.target, k, s.message(&s.picked, s.selector.capacity(k)))
	exchanging := time.Now()
	s.result = s.exchange.run(ctx, s.picks)
	if s.result.dense != 0 {
		s.store(grad, dt, s.result.dense)
	} else {
		s.merge(grad, dt, s.result.lists, s.result.scale)
	}
	s.stats.SelectTime = exchanging.Sub(started)
	s.stats.ExchangeTime = time.Since(exchanging)
}

// count returns how many of n entries a density stands for.
func count(density float64, n int) int {
	if density == 0 || n == 0 {
		return 0
	}
	return min(n, max(1, int(math.Round(density*float64(n)))))
}

// plan chooses what serves k entries. When k changes, thresholds and regions
// start anew and scratch memory is fitted to the new size.
func (s *Sparse) plan(k int) {
	if k == s.k {
		return
	}
	s.release(s.permanent)
	s.k = k
	s.set(numState, 0, 0)
	if k > 0 {
		p := find(s.cfg.Pattern, s.engine, k)
		s.selector, s.exchange = p.selector(s.engine), p.exchange(s.engine)
	}
}
