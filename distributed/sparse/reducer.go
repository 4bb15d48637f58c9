package sparse

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// Reducer averages one gradient tensor over the ranks, step after step, with
// one of the [Patterns]. It keeps what is particular to that tensor: the
// residual, thresholds, partitions and scratch memory. Make one per tensor (or
// per bucket, see package ddp) with [New].
//
// A Reducer belongs to one goroutine at a time, and so do the calls of its
// communicator during a step.
type Reducer struct {
	*engine
	meter    *metered.Communicator
	name     string // of the pattern that serves k
	selector selector
	exchange exchange

	given   Config  // as it was given
	choice  *Choice // for Auto, when it was made
	steps   int     // all steps, also dense ones
	dense   bool    // the exchange is that of dense steps
	entries message // the result as a list, where it was asked for
	onStage func(Stage)
	confirm func(context.Context) error // see BeforeCommit
	remains [2]base.Buffer              // the residual, and that before the step
	closed  bool
	joined  bool // its steps are part of a transaction of several tensors
}

// Stats tells what the last step of a [Reducer] did on this rank.
type Stats struct {
	Step int // number of the step, from 0
	// Pattern is what ran: that of the configuration, "dense" in the warm-up, and
	// what oktopk uses where it is no better: dense, topkA2 or gtopk. It is empty
	// at density 0.
	Pattern  string
	Dense    bool // a step of the dense pattern, or of the warm-up
	Skipped  bool // the step was rolled back by [SkipNonFinite]
	Elements int  // length of the tensor
	K        int  // entries that a rank was to select
	// SelectedLocal is how many entries this rank selected.
	SelectedLocal int
	// SelectedGlobal is how many entries the result was put together from: the
	// number of entries that it has, or, where an exchange does not merge the
	// ranks' lists before it gathers them, the sum of their lengths.
	SelectedGlobal int
	// Threshold is the magnitude that the selected entries have at least,
	// GlobalThreshold (oktopk) that of the sums that went into the result.
	Threshold, GlobalThreshold float32
	// SentElements and SentBytes are what this rank sent as package metered counts:
	// a value and an index are one element each, an allgather counts what the
	// rank receives. What [Auto] sent to choose does not count.
	SentElements, SentBytes int64
	// SelectTime is the host's time for adding the gradient to the residual
	// and selecting, ExchangeTime for everything after. On a device with streams
	// the host runs ahead, and each may contain the device's work of the other.
	SelectTime, ExchangeTime time.Duration
	// Choice is what was found for [Auto], nil for another pattern.
	Choice *Choice
	// InnerElements, InnerBytes and InnerTime are what the dense reduction along the
	// inner dimensions of [Hierarchical] sent, and the host's time for it; 0 without.
	InnerElements, InnerBytes int64
	InnerTime                 time.Duration
}

// New prepares the reduction of a tensor of n elements in rt's memory.
// It does not communicate ([Auto] does in the first step). All ranks of c pass the
// same n and cfg.
//
// Errors: [comm.ErrArgument] for a field of cfg that is out of range or a
// negative n or one above 2^31-1; [runtime.ErrUnsupported] for a runtime
// without [runtime.Kernels], which only the dense pattern in F32 without clipping and detection of
// non-finite gradients does not need, or without those of the Values; [comm.ErrDevice] if c does not reach rt's memory.
func New(rt runtime.Runtime, c comm.Communicator, n int, cfg Config) (*Reducer, error) {
	if rt == nil || c == nil {
		return nil, base.OpError("sparse", fmt.Errorf("%w: runtime or communicator is nil", comm.ErrArgument))
	}
	given := cfg
	cfg, err := cfg.WithDefaults()
	if err != nil {
		return nil, err
	}
	if n < 0 || n > math.MaxInt32 {
		return nil, base.OpError("sparse", fmt.Errorf("%w: %d elements, want 0 to %d (indices have 31 bits)", comm.ErrArgument, n, math.MaxInt32))
	}
	kernels, err := runtime.KernelsOf(rt)
	if err != nil && !cfg.Plain() {
		return nil, base.OpError("sparse", err)
	}
	if err := comm.CheckDevice(c, rt.Device()); err != nil {
		return nil, base.OpError("sparse", err)
	}
	if codec := cfg.codec(); codec != runtime.CodecNone && errors.Is(kernels.Quantize(0, codec, 0, 0, 0), runtime.ErrUnsupported) {
		return nil, base.OpError("sparse", fmt.Errorf("values %s on runtime %s: %w", cfg.Values, rt.Name(), runtime.ErrUnsupported))
	}
	meter := metered.New(c)
	e, err := newEngine(rt, kernels, meter, n, cfg)
	s := &Reducer{engine: e, meter: meter, given: given}
	if err == nil {
		s.permanent = len(s.buffers)
		s.prepare()
		err = e.err
	}
	if err != nil {
		return nil, base.OpError("sparse", errors.Join(err, e.close()))
	}
	return s, nil
}

// prepare allocates what the steps of the pattern keep.
func (s *Reducer) prepare() {
	if s.residual != 0 || !s.cfg.Keeps() {
		return
	}
	s.allocate(&s.remains[0], s.held*base.WordSize)
	if !s.cfg.NoUndo && !s.cfg.NoErrorFeedback { // otherwise nothing is kept that could be lost
		s.allocate(&s.remains[1], s.held*base.WordSize)
	}
	s.permanent = len(s.buffers)
	s.fill(s.remains[0].Ptr, s.held)
	if s.err == nil { // otherwise the next step that chooses a pattern does it again
		s.residual, s.origin = s.remains[0].Ptr, s.remains[1].Ptr
	}
}

// Rebind moves s to another communicator, say what is left of the old one after
// a rank has failed. It does not communicate; all ranks of c do it. The residual
// stays as it is, averages are over the ranks of c, and thresholds and partitions
// start anew. What the residual of a rank held that is not part of c is lost with
// that rank; where c has fewer ranks, its rank 0 logs how many went. Ranks of which only
// some have completed the step that failed ([Stats].Step) are a step apart from then
// on: under a [Schedule] that is not over, the next step is [comm.ErrMismatch] on all of
// them until they have restored one step's states ([Reducer.Restore]).
//
// If a step has failed on the old communicator, Rebind waits for that as
// [Reducer.Close] does: close it first. After an error of that wait, or of a
// communicator that is nil or does not reach the memory, s is still with the old
// one; an error of the runtime stays.
func (s *Reducer) Rebind(c comm.Communicator) error {
	had := s.size
	err := s.rebind(c)
	if err == nil && s.cfg.Keeps() && !s.joined && s.confirm == nil {
		base.ReportLost(had, c)
	}
	s.joined = s.joined && err != nil
	return base.OpError("rebind", err)
}

func (s *Reducer) rebind(c comm.Communicator) error {
	err := inOrder(s.ready, func() error { return base.CheckComm(c) }, func() error { return comm.CheckDevice(c, s.rt.Device()) },
		s.order.DrainToFree, s.learn)
	if err != nil {
		return err
	}
	if s.check(s.leaveShared(context.Background(), true)); s.err != nil {
		return s.err
	}
	s.release(s.permanent)
	s.meter = metered.New(c)
	s.bind(s.meter)
	s.k, s.selected, s.result = 0, runtime.Entries{}, result{}
	return s.err
}

// ready returns why nothing can be done: s is closed, an earlier error stays, or a step is open.
func (s *Reducer) ready() error {
	switch {
	case s.closed:
		return base.ClosedError("the Reducer")
	case s.err == nil && s.phase.open():
		return fmt.Errorf("%w: in the middle of a step, want after Commit or RollBack", comm.ErrArgument)
	}
	return s.err
}

// inOrder makes calls until one fails, and returns its error.
func inOrder(calls ...func() error) error {
	for _, call := range calls {
		if err := call(); err != nil {
			return err
		}
	}
	return nil
}

// learn finds out whether the device skipped the last step, before the numbers are
// those of another communicator.
func (s *Reducer) learn() error {
	if !s.deferred || s.counted {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), base.DrainLimit)
	defer cancel()
	counts := make([]int32, s.skips)
	err := s.order.HostAfterCompute(ctx)
	if err == nil {
		err = s.rt.CopyOut(hostmem.Bytes(counts), s.skip)
	}
	if err == nil && slices.ContainsFunc(counts, func(n int32) bool { return n != 0 }) {
		s.skipped()
	}
	s.deferred = s.deferred && err != nil
	return err
}

// AllReduce replaces t by (an approximation of) the average of all ranks' t, or,
// with [Config].InPlace, takes what it sends out of t:
// the same bits on every rank, zero where no rank's entry made it into the
// result. t has the n elements that New was told, in any shape; F32, F16
// or BF16 ([comm.ErrUnsupported] otherwise), and its runtime has the compute
// stream of the one that New was told ([runtime.ErrDevice] otherwise). What
// was not sent is kept, in F32, and added to the next step's gradient. The result
// is ready as that of [distributed.AllReduce] is.
//
// A wrong argument is an error before anything happened. A step is a transaction:
// after any error nothing has happened on this rank. t holds the gradient that was
// passed, and the residual what it held before, both bit for bit, and the step does
// not count. So the same call repeats it, with the
// same communicator unless that is aborted, or with another one ([Reducer.Rebind]).
// The exception is an error of the runtime itself while that is restored, or when the
// result has been written to t, which has lost the gradient then: it
// stays, and later calls return it. So does every error of a step with
// [Config].NoUndo: t's content is undefined then.
//
// The other ranks wait for this one after an error, until their contexts end or
// this rank closes its communicator, which is [comm.ErrPeerFailed] on them: so
// close it unless all ranks have the error. A rank that had got all of the result
// by then has completed the step; [Stats.Step] tells. A context that is over
// before the step ([comm.ErrCanceled], [comm.ErrTimeout]) is found before anything
// happens, as a wrong argument is.
//
// Before the first step with a communicator the ranks compare the length, the type, the
// configuration, the step of a [Schedule] that is not over, and the version of this
// module, by one element of each rank: if they differ, that is [comm.ErrMismatch] on
// all of them, and names the difference. Lengths that another rank announces and that
// no tensor of n elements has are [comm.ErrMismatch], and so are indices: those are
// left out of the result, and every step that follows has the error. On a device with
// streams it is the first step that reads numbers of the device, and each 256th that is
// not captured does. What oktopk reads in the step after ([NeedsHost]) is an error of
// that, or of Stats, State and ScaleResidual before it.
func (s *Reducer) AllReduce(ctx context.Context, t *runtime.Tensor) error {
	const op = "sparse allreduce"
	if err := s.ready(); err != nil {
		return base.OpError(op, err)
	}
	ptr, err := s.checkTensor(op, t)
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		return base.OpError(op, comm.ContextError(ctx))
	}
	g := Input{Ptr: ptr, DType: t.DType()}
	if s.cfg.InPlace {
		g.Ptr, s.residual = 0, ptr
		defer func() { s.residual = 0 }()
	}
	if s.Select(ctx, g) != nil || s.Exchange(ctx) != nil || s.end(ctx) != nil {
		return base.OpError(op, s.failed())
	}
	return nil
}

// end completes and commits a step.
func (s *Reducer) end(ctx context.Context) error {
	started := time.Now()
	_, err := s.Complete(ctx)
	if err == nil {
		v := s.judge(ctx)
		if s.confirm != nil && s.err == nil {
			s.check(s.confirm(ctx))
		}
		if err = s.err; err == nil {
			err = s.Commit(v)
		}
	}
	s.stats.ExchangeTime += time.Since(started)
	return err
}

// Stats returns what the last step did. Numbers that are on the device are
// waited for, until ctx is done. After a step that was rolled back they are those of the step
// before, in which what was selected is 0 unless Stats had been asked for it by then.
func (s *Reducer) Stats(ctx context.Context) (Stats, error) {
	if s.counted || s.closed || s.err != nil {
		return s.stats, nil
	}
	idle := s.stats.Dense || s.selected.Idx == 0 // what there is to count, is
	if idle && !s.deferred {
		return s.stats, nil
	}
	found := s.foundNonFinite(ctx)
	s.readPosted(ctx)
	if err := s.failure(); err != nil {
		return s.stats, base.OpError("stats", err)
	}
	if s.deferred && found {
		s.skipped()
	}
	if idle {
		s.counted = true
		return s.stats, nil
	}
	local, err := s.lengthOf(s.selected)
	global := 0
	for _, l := range s.result.lists {
		n, e := s.lengthOf(l)
		global, err = global+n, errors.Join(err, e)
	}
	if s.result.dense != 0 {
		global = s.n
	}
	threshold := s.float(s.used)
	switch s.selector.(type) {
	case nothing:
		local, threshold = s.n, 0
	case *custom:
		threshold = 0
	}
	s.stats.SelectedLocal, s.stats.SelectedGlobal = local, global
	s.stats.Threshold, s.stats.GlobalThreshold = threshold, s.past.globalThreshold
	if err != nil {
		return s.stats, base.OpError("stats", err)
	}
	s.counted = true
	return s.stats, nil
}

// Residual returns this rank's residual as a tensor of n F32 elements, for
// inspection, and to be discarded (filled with zeros). It is a view,
// valid until the next step: that leaves the residual at another address, unless
// a step has been captured in a graph ([Config].NoUndo: the address stays). The
// dense pattern in F32 has none, and [Auto] none before it has chosen, and a step in place
// leaves it in the tensor
// ([comm.ErrUnsupported]).
func (s *Reducer) Residual() (*runtime.Tensor, error) {
	if s.closed {
		return nil, base.OpError("residual", base.ClosedError("the Reducer"))
	}
	if s.cfg.Pattern == Auto || s.cfg.Pattern == Dense && s.cfg.Values == F32 {
		return nil, base.OpError("residual", fmt.Errorf("%w: pattern %s has no residual", comm.ErrUnsupported, s.cfg.Pattern))
	}
	if s.cfg.InPlace {
		return nil, base.OpError("residual", fmt.Errorf("%w: in place, the tensor of the step is the residual", comm.ErrUnsupported))
	}
	return runtime.Wrap(s.rt, s.residual, dtype.F32, []int{s.n}, nil, nil)
}

// Close frees the memory. The communicator and tensors stay as they are.
// Closing twice is fine. Where the communicator has symmetric memory
// ([comm.Allocate]), all ranks close together; after an error that memory is left
// to the communicator's Close.
//
// If a step has failed in the middle of an exchange, Close waits for the
// communicator, at most 5 seconds. After an error of that wait the memory is not
// given back, because the communicator may still write it: close the communicator
// then, and after it the Reducer again.
func (s *Reducer) Close() error {
	s.closed = true
	return base.OpError("sparse close", s.engine.close())
}

// checkTensor checks a gradient and returns its address.
func (s *Reducer) checkTensor(op string, t *runtime.Tensor) (uintptr, error) {
	ptr, err := checkGradient(op, s.rt, s.c, s.n, t)
	if err == nil && s.cfg.InPlace && t.DType() != dtype.F32 {
		err = base.OpError(op, fmt.Errorf("%w: tensor is %v, and in place it is the residual, which is f32", comm.ErrUnsupported, t.DType()))
	}
	return ptr, err
}

// checkGradient checks a gradient of n elements and returns its address.
func checkGradient(op string, rt runtime.Runtime, c comm.Communicator, n int, t *runtime.Tensor) (uintptr, error) {
	ptr, err := base.Address(op, "gradient", c, t)
	if err != nil {
		return 0, err
	}
	if err := base.CheckGradientType(t.DType()); err != nil {
		return 0, base.OpError(op, err)
	}
	if t.Len() != n {
		return 0, base.ShapeError(op, "gradient has %d elements, want %d", t.Len(), n)
	}
	if err := base.SameStream(rt, t.Runtime()); err != nil {
		return 0, base.OpError(op, fmt.Errorf("the runtime of the gradient and that of its reduction: %w", err))
	}
	return ptr, nil
}

// readPosted reads what the last step left to be read later, if it is not read yet.
func (s *Reducer) readPosted(ctx context.Context) {
	if x, ok := s.exchange.(*okExchange); ok {
		x.readPosted(ctx)
	}
}

// count returns how many of n entries a density stands for.
func count(density float64, n int) int {
	if density == 0 || n == 0 {
		return 0
	}
	return min(n, max(1, int(math.Round(density*float64(n)))))
}

// plan chooses what serves k entries, or the whole residual. When k changes, thresholds and partitions
// start anew and scratch memory is fitted to the new size.
func (s *Reducer) plan(ctx context.Context, k int, whole bool) {
	if k == s.k && whole == s.dense {
		return
	}
	if NeedsHost(s.cfg.Pattern) && s.err == nil { // what is copied to the device waits for it without a context
		s.check(s.order.HostAfterAll(ctx))
	}
	s.release(s.permanent)
	s.k, s.dense = k, whole
	s.forget(past{})
	s.fill(s.at(numState), 2)
	if k > 0 {
		name, p := Dense, pattern{noSelector, sumAll}
		if !whole {
			name, p = find(&s.cfg, k, s.n, s.size)
		}
		s.name = name
		s.selector, s.exchange = p.selector(s.engine), p.exchange(s.engine)
		if _, all := s.selector.(nothing); !all && s.cfg.Selector != nil {
			s.selector = &custom{engine: s.engine}
		}
	}
	if s.err != nil {
		s.k = 0 // nothing is planned
	}
}
