package engine

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/repeats"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/internal/stages"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Reducer averages one gradient tensor over the ranks, step after step. It keeps the state of that tensor: the
// residual, thresholds, partitions and scratch memory. One goroutine may use it at a time.
type Reducer struct {
	*engine
	meter    *metered.Communicator // of c; counts what steps send
	name     string                // of the pattern that serves k
	selector selector              // of the step's pattern
	exchange exchange              // the same

	// configured are the settings before a pattern was chosen for Auto. The settings of the steps are cfg.
	configured Settings
	choice     *Choice                     // for Auto, after it was made
	steps      int                         // all steps, also dense ones
	dense      bool                        // the exchange belongs to a dense step
	entries    listBuffer                  // the result as a list, if requested
	observe    stages.Observer             // of the step; nil for none, as in package ddp, which observes buckets itself
	confirm    func(context.Context) error // see BeforeCommit
	remains    [2]base.Buffer              // the residual, and the one before the step
	closed     bool
	joined     bool        // its steps are part of a transaction of several tensors
	skipLog    repeats.Log // counts skipped steps and lost residuals
}

// New prepares the reduction of a tensor of n elements in rt's memory. It does not communicate.
func New(rt runtime.Runtime, c comm.Communicator, n int, cfg Config) (*Reducer, error) {
	if err := base.Reaches(rt, c); err != nil {
		return nil, base.OpError("sparse", err)
	}
	settings, err := cfg.Settings()
	if err != nil {
		return nil, err
	}
	return NewReducer(rt, c, n, settings)
}

// NewReducer is [New] for resolved settings, whose pattern may have been chosen before.
func NewReducer(rt runtime.Runtime, c comm.Communicator, n int, cfg Settings) (*Reducer, error) {
	if err := base.Reaches(rt, c); err != nil {
		return nil, base.OpError("sparse", err)
	}
	if n < 0 || n > math.MaxInt32 {
		return nil, base.OpError("sparse", fmt.Errorf("%w: %d elements, want 0 to %d (indices have 31 bits)",
			comm.ErrArgument, n, math.MaxInt32))
	}
	kernels, err := kernel.Lookup(rt)
	if err != nil && !cfg.Plain() {
		return nil, base.OpError("sparse", err)
	}
	codec := cfg.codec()
	if codec != kernel.CodecNone && errors.Is(kernels.Quantize(0, codec, 0, 0, 0), runtime.ErrUnsupported) {
		return nil, base.OpError("sparse", fmt.Errorf("values %s on runtime %s: %w",
			cfg.Values, rt.Name(), runtime.ErrUnsupported))
	}
	meter := metered.New(c)
	e, err := newEngine(rt, kernels, meter, n, cfg)
	s := &Reducer{engine: e, meter: meter, configured: cfg}
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

// prepare allocates the permanent memory of the pattern's steps.
func (s *Reducer) prepare() {
	if s.residual != 0 || !s.cfg.keeps() {
		return
	}
	s.allocate(&s.remains[0], s.held*base.WordSize)
	if !s.cfg.NoUndo && !s.cfg.NoErrorFeedback { // otherwise there is nothing that could be lost
		s.allocate(&s.remains[1], s.held*base.WordSize)
	}
	s.permanent = len(s.buffers)
	s.fill(s.remains[0].Ptr, s.held)
	if s.err == nil { // otherwise the next step that chooses a pattern does it again
		s.residual = s.remains[0].Ptr
		s.origin = s.remains[1].Ptr
	}
}

// ready returns the reason why no step can begin: s is closed, an earlier error stays, or a step is open.
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

// Residual returns a view of this rank's residual, valid until the next step. Without a residual it returns
// [comm.ErrUnsupported].
func (s *Reducer) Residual() (*runtime.Tensor, error) {
	if s.closed {
		return nil, base.OpError("residual", base.ClosedError("the Reducer"))
	}
	if s.cfg.Pattern == sparsity.Auto || s.cfg.Pattern == sparsity.Dense && s.cfg.Values == sparsity.F32 && !s.cfg.chosen {
		return nil, base.OpError("residual", fmt.Errorf("%w: pattern %s has no residual", comm.ErrUnsupported, s.cfg.Pattern))
	}
	return runtime.Wrap(s.rt, s.residual, dtype.F32, []int{s.n}, nil, nil)
}

// Close frees the memory. It may be called again after an error.
func (s *Reducer) Close() error {
	s.closed = true
	return base.OpError("sparse close", s.engine.close())
}

// checkTensor checks a gradient and returns its address.
func (s *Reducer) checkTensor(op string, t *runtime.Tensor) (uintptr, error) {
	ptr, err := checkGradient(op, s.rt, s.c, s.n, t)
	for _, kept := range []uintptr{s.residual, s.origin} {
		if err == nil && kept != 0 && kept < ptr+uintptr(t.Bytes()) && ptr < base.At(kept, s.held) {
			err = base.OpError(op, fmt.Errorf("%w: the tensor shares memory with the residual", comm.ErrArgument))
		}
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
		return 0, base.OpError(op, fmt.Errorf("the runtimes of the gradient and its reduction: %w", err))
	}
	return ptr, nil
}

// readPosted reads the numbers that the last step left to be read later, unless they are read.
func (s *Reducer) readPosted(ctx context.Context) {
	if x, ok := s.exchange.(*okExchange); ok {
		x.readPosted(ctx)
	}
}

// count returns the number of entries, of n, for a density.
func count(density float64, n int) int {
	if density == 0 || n == 0 {
		return 0
	}
	return min(n, max(1, int(math.Round(density*float64(n)))))
}

// plan chooses the pattern for k entries, or for the whole residual. When k changes, thresholds and partitions start
// over and scratch memory is fitted to the new size.
func (s *Reducer) plan(ctx context.Context, k int, whole bool) {
	if k == s.k && whole == s.dense {
		return
	}
	if sparsity.NeedsHost(s.cfg.Pattern) && s.err == nil { // copies to the device wait for it without a context
		s.check(s.order.HostAfterAll(ctx))
	}
	s.release(s.permanent)
	s.k = k
	s.dense = whole
	s.forget(hostState{})
	s.fill(s.address(numState), 2)
	if k > 0 {
		name := sparsity.Dense
		p := pattern{noSelector, sumAll}
		if !whole {
			name, p = find(&s.cfg, k, s.n, s.size)
		}
		s.name = name
		s.selector = p.selector(s.engine)
		s.exchange = p.exchange(s.engine)
		if _, all := s.selector.(nothing); !all && s.cfg.Selector != nil {
			s.selector = &custom{engine: s.engine}
		}
	}
	if s.err != nil {
		s.k = 0 // nothing is planned
	}
}
