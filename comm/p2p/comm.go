package p2p

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Comm is a communicator over another one of the same GPUs, of which it takes
// over what goes faster over the memory of peers.
type Comm struct {
	comm.Methods
	comm.Wrapped
	streams // of the base, which both submit to
	check   comm.Check
	rt      *cuda.Runtime
	options
	here  *endpoint
	takes takes

	stream  atomic.Pointer[cuda.Stream] // the base's, as last seen
	failure atomic.Pointer[error]
	closed  atomic.Bool
	closing sync.Once
	turns   comm.Turns

	mu       sync.Mutex
	children map[*Comm]struct{}
	parent   *Comm
}

// streams are the base's operations on streams.
type streams interface {
	comm.StreamSyncOps
	comm.StreamOrder
}

var (
	_ comm.Communicator  = (*Comm)(nil)
	_ comm.StreamSyncOps = (*Comm)(nil)
	_ comm.StreamOrder   = (*Comm)(nil)
	_ comm.Ender         = (*Comm)(nil)
)

// MaxRanks is how many ranks a communicator can have.
const MaxRanks = maxRanks

// Option changes how New makes a communicator.
type Option func(*options)

type options struct {
	patience time.Duration
	most     int
}

// WithPatience bounds how long a kernel waits for a peer if nobody on the host
// does: a minute unless set. A Sync with a context that ends sooner ends the wait
// sooner.
func WithPatience(d time.Duration) Option { return func(o *options) { o.patience = d } }

// WithLimit takes over operations up to so many bytes, instead of up to the size
// that is measured.
func WithLimit(bytes int) Option { return func(o *options) { o.most = bytes } }

// New makes a communicator of base, whose memory and streams are those of rt, and
// is collective on base. base goes on to be used through the new communicator,
// whose Close closes it too.
//
// All ranks get a communicator or all get an error: [comm.ErrUnsupported] where
// their GPUs do not reach each other's memory.
func New(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, opts ...Option) (*Comm, error) {
	if base == nil || rt == nil {
		return nil, fmt.Errorf("p2p: %w: base communicator or runtime is nil", comm.ErrArgument)
	}
	ops, ok := comm.As[streams](base)
	if !ok {
		return nil, fmt.Errorf("p2p: %w: the base communicator has no stream", comm.ErrUnsupported)
	}
	o := options{patience: time.Minute, most: -1}
	for _, opt := range opts {
		opt(&o)
	}
	return newComm(ctx, base, ops, rt, o, nil)
}

// newComm makes a communicator that takes over what it is told, or, for nil, what
// it finds out.
func newComm(ctx context.Context, base comm.Communicator, ops streams, rt *cuda.Runtime, o options, t *takes) (*Comm, error) {
	here, err := connect(ctx, base, rt, defaults(base.WorldSize()), o.patience)
	if err != nil {
		return nil, err
	}
	c := &Comm{Wrapped: comm.Wrap(base), streams: ops, rt: rt, options: o, here: here, children: map[*Comm]struct{}{}}
	c.check = comm.Check{Backend: "p2p", Rank: base.Rank(), WorldSize: base.WorldSize()}
	c.Methods = comm.Methods{Do: c.do, Together: c.together}
	if t != nil {
		c.takes = *t
	} else if err := c.choose(ctx); err != nil {
		here.stopWaiting()
		return nil, errors.Join(err, here.discard(c.current()))
	}
	return c, nil
}

// do makes a call, here or on the base.
func (c *Comm) do(x comm.Call) error {
	c.turns.Count([]comm.Call{x})
	if !c.takes.call(&x) {
		if err := c.sound(); err != nil {
			return c.check.Fail(x.Op.String(), err)
		}
		return x.Make(c.Communicator)
	}
	if err := c.check.Call(&x); err != nil {
		return err
	}
	if err := c.submit(&x); err != nil {
		return c.check.Fail(x.Op.String(), err)
	}
	return nil
}

// together starts a group on the base, but for what that cannot do.
func (c *Comm) together(calls []comm.Call) error {
	err := c.sound()
	if err == nil {
		err = c.check.Group(calls)
	}
	if err != nil {
		return c.check.Fail("group", err)
	}
	c.turns.Count(calls)
	var rest, own []comm.Call
	for _, x := range calls {
		if c.takes.alone(&x) {
			own = append(own, x)
		} else {
			rest = append(rest, x)
		}
	}
	if len(own) == 0 {
		return c.Communicator.Group(calls...)
	}
	if err := c.Communicator.Group(rest...); err != nil {
		return err
	}
	for i := range own {
		if err := c.submit(&own[i]); err != nil {
			return c.check.Fail("group", err)
		}
	}
	return nil
}

// submit launches a call's kernel in the base's stream, behind what the base
// submitted there.
func (c *Comm) submit(x *comm.Call) error {
	if err := c.usable(); err != nil || x.Count == 0 {
		return err
	}
	return c.launch(c.here.plan(x))
}

func (c *Comm) launch(p plan) error {
	err := c.here.submit(c.current(), p)
	if err == nil {
		return nil
	}
	var refused *cuda.Error
	if errors.As(err, &refused) && refused.InCapture() {
		return err
	}
	return c.breakDown(err)
}

// plan plans a call.
func (p *planner) plan(x *comm.Call) plan {
	switch x.Op {
	case comm.OpAllReduce:
		return p.allReduce(x.Send, x.Recv, x.Count, x.DType, x.Reduce)
	case comm.OpReduce:
		return p.reduceTo(x.Send, x.Recv, x.Count, x.DType, x.Reduce, x.Peer)
	case comm.OpReduceScatter:
		return p.reduceScatter(x.Send, x.Recv, x.Count, x.DType, x.Reduce)
	case comm.OpAllGather:
		return p.allGather(x.Send, x.Recv, x.Bytes())
	case comm.OpAllToAll:
		return p.allToAll(x.Send, x.Recv, x.Bytes())
	case comm.OpBroadcast:
		return p.broadcast(x.Recv, x.Bytes(), x.Peer)
	}
	return p.barrier()
}

// current is the base's stream, which it may change (nccl.Comm.UseStream).
func (c *Comm) current() *cuda.Stream {
	handle := c.CommStream()
	s := c.stream.Load()
	if s == nil || s.Handle() != handle {
		s = c.rt.WrapStream(handle)
		c.stream.Store(s)
	}
	return s
}

// usable returns why nothing can be submitted any more, nil if it can.
func (c *Comm) usable() error {
	if c.closed.Load() {
		return comm.ErrClosed
	}
	return c.sound()
}

// sound returns what broke the communicator, nil if nothing did. Kernels that gave
// up break it when somebody looks.
func (c *Comm) sound() error {
	if cause := c.failure.Load(); cause != nil {
		return fmt.Errorf("%w: %w", comm.ErrBroken, *cause)
	}
	return nil
}

// breakDown breaks the communicator: its kernels stop waiting. It returns cause.
func (c *Comm) breakDown(cause error) error {
	c.failure.CompareAndSwap(nil, &cause)
	c.here.stopWaiting()
	return cause
}

// turn waits if it is this goroutine's turn.
func (c *Comm) turn(ctx context.Context, op comm.Op, wait func() error) error {
	return c.explain(op.String(), c.turns.Wait(ctx, wait))
}

// Sync implements [comm.Communicator]. When ctx ends the wait, kernels that wait
// for peers end, and the error names the peer.
func (c *Comm) Sync(ctx context.Context) error {
	return c.turn(ctx, comm.OpSync, func() error { return c.sync(ctx) })
}

func (c *Comm) sync(ctx context.Context) error {
	if err := c.usable(); err != nil {
		return err
	}
	stopped := c.here.stopWith(ctx)
	err := c.Communicator.Sync(ctx)
	gaveUp := stopped()
	what := c.here.awaited()
	switch {
	case what != "" && c.failure.Load() != nil: // another goroutine gave up
		return c.sound()
	case what != "" && ctx.Err() != nil:
		return c.breakDown(fmt.Errorf("%w: %s", comm.ContextError(ctx), what))
	case what != "":
		return c.breakDown(c.here.fault())
	case err == nil:
		return c.sound()
	case gaveUp || errors.Is(err, comm.ErrPeerFailed):
		return c.breakDown(err)
	}
	return err
}

// Barrier implements [comm.Communicator].
func (c *Comm) Barrier(ctx context.Context) error {
	return c.turn(ctx, comm.OpBarrier, func() error {
		err := c.usable()
		if err == nil {
			err = c.launch(c.here.barrier())
		}
		if err == nil {
			err = c.sync(ctx)
		}
		return err
	})
}

// SyncCommStream implements [comm.StreamSyncOps].
func (c *Comm) SyncCommStream() error { return c.Sync(context.Background()) }

// Split implements [comm.Communicator]. What the base splits off is made a
// communicator like this one, where that is possible.
func (c *Comm) Split(ctx context.Context, color, key int) (child comm.Communicator, err error) {
	err = c.turn(ctx, comm.OpSplit, func() error {
		child, err = c.split(ctx, color, key)
		return err
	})
	return child, err
}

func (c *Comm) split(ctx context.Context, color, key int) (comm.Communicator, error) {
	if err := c.usable(); err != nil {
		return nil, c.check.Fail("split", err)
	}
	base, err := c.Communicator.Split(ctx, color, key)
	if base == nil || err != nil {
		if err != nil && ctx.Err() != nil {
			_ = c.breakDown(err)
		}
		return nil, err
	}
	ops, ok := comm.As[streams](base)
	if !ok {
		return base, nil
	}
	var t *takes
	if base.WorldSize() == c.WorldSize() {
		t = &c.takes // the same ranks
	}
	child, err := newComm(ctx, base, ops, c.rt, c.options, t)
	switch {
	case errors.Is(err, comm.ErrUnsupported):
		return base, nil
	case err != nil:
		return nil, errors.Join(c.check.Fail("split", err), base.Close())
	}
	child.parent = c
	c.mu.Lock()
	c.children[child] = struct{}{}
	c.mu.Unlock()
	return child, nil
}

// closeTimeout bounds how long Close waits for pending work.
const closeTimeout = 10 * time.Second

// Close implements [comm.Communicator]: it closes the base, too. Graphs that hold
// operations of this communicator are closed before it.
func (c *Comm) Close() (err error) {
	c.closing.Do(func() { err = c.explain("close", c.close()) })
	return err
}

func (c *Comm) close() error {
	c.closed.Store(true)
	if p := c.parent; p != nil {
		p.mu.Lock()
		delete(p.children, c)
		p.mu.Unlock()
	}
	if c.sound() == nil {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		if err := poll.Until(ctx, c.current().Done); err != nil {
			slog.Error("p2p: closed with work pending", "rank", c.Rank(), "err", err)
			_ = c.breakDown(comm.ErrClosed)
		}
	}
	stream := c.current()
	return errors.Join(c.here.discard(stream), c.Communicator.Close())
}

// End implements [comm.Ender]. The other ranks are not told the cause: their waits
// end with their contexts.
func (c *Comm) End(cause error) error {
	c.mu.Lock()
	children := make([]*Comm, 0, len(c.children))
	for child := range c.children {
		children = append(children, child)
	}
	c.mu.Unlock()
	var errs []error
	for _, child := range children {
		errs = append(errs, child.End(cause))
	}
	if cause != nil && !c.closed.Load() {
		_ = c.breakDown(cause)
	}
	return errors.Join(append(errs, c.Close())...)
}

// explain wraps the error of an operation, if there is one.
func (c *Comm) explain(op string, err error) error {
	var named *comm.OpError
	if err == nil || errors.As(err, &named) && named.Op == op {
		return err
	}
	return c.check.Fail(op, err)
}
