package p2p

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Comm is a communicator over another one of the same GPUs, of which it takes
// over what goes faster over the memory of peers.
type Comm struct {
	methods
	comm.Wrapped
	streams // of the base, which both submit to
	check   backend.Check
	rt      *cuda.Runtime
	options
	here    *endpoint
	offload offloadTable

	stream  atomic.Pointer[cuda.Stream] // the base's, as last seen
	failure atomic.Pointer[error]
	closed  atomic.Bool
	closing sync.Once

	progress progress

	mu       sync.Mutex
	children map[*Comm]struct{}
	parent   *Comm
}

// methods keeps the field of [backend.Calls] to this package.
type methods = backend.Calls

// streams are the base's operations on streams.
type streams interface {
	comm.StreamSyncOps
	comm.StreamOrder
}

var (
	_ comm.Communicator  = (*Comm)(nil)
	_ comm.StreamSyncOps = (*Comm)(nil)
	_ comm.StreamOrder   = (*Comm)(nil)
	_ comm.Progresser    = (*Comm)(nil)
)

// newComm makes a communicator that takes over what it is told, or, for nil, what
// it finds out.
func newComm(ctx context.Context, base comm.Communicator, ops streams, rt *cuda.Runtime, o options, t *offloadTable) (*Comm, error) {
	here, err := connect(ctx, base, rt, defaults(base.WorldSize()), o.patience)
	if err != nil {
		return nil, err
	}
	c := &Comm{Wrapped: comm.Wrap(base), streams: ops, rt: rt, options: o, here: here, children: map[*Comm]struct{}{}}
	c.progress.marks.Init(rt)
	c.check = backend.Check{Backend: "p2p", Rank: base.Rank(), WorldSize: base.WorldSize()}
	c.methods = backend.NewCalls(&c.check, adapter{c})
	if t != nil {
		c.offload = *t
	} else if err := c.choose(ctx); err != nil {
		here.stopWaiting()
		discarded := here.discard(c.current(), nil)
		c.progress.marks.Close(discarded != nil)
		return nil, errors.Join(err, discarded)
	}
	return c, nil
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

// explain wraps the error of an operation, if there is one.
func (c *Comm) explain(op string, err error) error {
	var named *comm.OpError
	if err == nil || errors.As(err, &named) && named.Op == op {
		return err
	}
	return c.check.Fail(op, err)
}
