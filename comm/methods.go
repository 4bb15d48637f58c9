package comm

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/dtype"
)

// Methods are the methods of a [Communicator] that move data, made of two
// functions. A decorator embeds it, and beside it [Waits], and [Wrapped] for the
// rest. They are not inlined, so that a [Recorder] sees the line of the call.
type Methods struct {
	Do       func(c Call) error       // one call
	Together func(calls []Call) error // the calls of a Group
}

// AllReduce implements [Communicator].
//
//go:noinline
func (m Methods) AllReduce(send, recv uintptr, count int, dt dtype.DType, op ReduceOp) error {
	return m.Do(AllReduceCall(send, recv, count, dt, op))
}

// Broadcast implements [Communicator].
//
//go:noinline
func (m Methods) Broadcast(buf uintptr, count int, dt dtype.DType, root int) error {
	return m.Do(BroadcastCall(buf, count, dt, root))
}

// Reduce implements [Communicator].
//
//go:noinline
func (m Methods) Reduce(send, recv uintptr, count int, dt dtype.DType, op ReduceOp, root int) error {
	return m.Do(ReduceCall(send, recv, count, dt, op, root))
}

// AllGather implements [Communicator].
//
//go:noinline
func (m Methods) AllGather(send, recv uintptr, count int, dt dtype.DType) error {
	return m.Do(AllGatherCall(send, recv, count, dt))
}

// AllGatherV implements [Communicator].
//
//go:noinline
func (m Methods) AllGatherV(send, recv uintptr, counts, displs []int, dt dtype.DType) error {
	return m.Do(AllGatherVCall(send, recv, counts, displs, dt))
}

// ReduceScatter implements [Communicator].
//
//go:noinline
func (m Methods) ReduceScatter(send, recv uintptr, count int, dt dtype.DType, op ReduceOp) error {
	return m.Do(ReduceScatterCall(send, recv, count, dt, op))
}

// AllToAll implements [Communicator].
//
//go:noinline
func (m Methods) AllToAll(send, recv uintptr, count int, dt dtype.DType) error {
	return m.Do(AllToAllCall(send, recv, count, dt))
}

// AllToAllV implements [Communicator].
//
//go:noinline
func (m Methods) AllToAllV(send uintptr, sendCounts, sendDispls []int, recv uintptr, recvCounts, recvDispls []int, dt dtype.DType) error {
	return m.Do(AllToAllVCall(send, sendCounts, sendDispls, recv, recvCounts, recvDispls, dt))
}

// Gather implements [Communicator].
//
//go:noinline
func (m Methods) Gather(send, recv uintptr, count int, dt dtype.DType, root int) error {
	return m.Do(GatherCall(send, recv, count, dt, root))
}

// Scatter implements [Communicator].
//
//go:noinline
func (m Methods) Scatter(send, recv uintptr, count int, dt dtype.DType, root int) error {
	return m.Do(ScatterCall(send, recv, count, dt, root))
}

// Send implements [Communicator].
//
//go:noinline
func (m Methods) Send(buf uintptr, count int, dt dtype.DType, dest int, tag uint32) error {
	return m.Do(SendCall(buf, count, dt, dest, tag))
}

// Recv implements [Communicator].
//
//go:noinline
func (m Methods) Recv(buf uintptr, count int, dt dtype.DType, src int, tag uint32) error {
	return m.Do(RecvCall(buf, count, dt, src, tag))
}

// Group implements [Communicator].
//
//go:noinline
func (m Methods) Group(calls ...Call) error { return m.Together(calls) }

// Wrapped is the communicator that a decorator wraps: what the decorator does
// not replace is that one's. Methods, [Waits] and [Calls], embedded beside it, come
// before it.
type Wrapped struct{ wrapped }

// wrapped puts the methods one level deeper than those of [Calls].
type wrapped struct{ Communicator }

// Wrap returns what a decorator of c embeds.
func Wrap(c Communicator) Wrapped { return Wrapped{wrapped{c}} }

// Unwrap implements [Unwrapper].
func (w Wrapped) Unwrap() Communicator { return w.Communicator }

// Backend is the door by which a backend takes operations. [NewCalls] makes the
// methods of a [Communicator] of it, and checks the arguments.
//
// Errors need not name the operation: what is no [*OpError] is wrapped in one.
type Backend interface {
	// Submit starts a call.
	Submit(c Call) error
	// SubmitTogether starts the calls of a group, at least one, all or none.
	// calls belong to the caller again when it returns.
	SubmitTogether(calls []Call) error
	// Wait does a Sync, a Barrier or a Split, which alone has a result.
	Wait(ctx context.Context, w Wait) (Communicator, error)
	// Usable returns why nothing can be submitted any more, nil if it can; see
	// [Unusable]. Submit and SubmitTogether return that too.
	Usable() error
}

// Unusable is what [Backend] has Usable return: [ErrClosed], [ErrBroken] with its
// cause, or nil.
func Unusable(closed bool, broken error) error {
	if closed || broken != nil {
		return unusable(closed, broken)
	}
	return nil
}

// unusable is apart so that Unusable is inlined: every call asks it.
func unusable(closed bool, broken error) error {
	if closed {
		return ErrClosed
	}
	return fmt.Errorf("%w: %w", ErrBroken, broken)
}

// brokenBy returns the cause that comes with an [ErrBroken], and other errors as they
// are.
func brokenBy(err error) error {
	for e := err; e != nil; e = errors.Unwrap(e) {
		if both, ok := e.(interface{ Unwrap() []error }); ok {
			if errs := both.Unwrap(); len(errs) == 2 && errs[0] == ErrBroken {
				return errs[1]
			}
		}
	}
	return err
}

// Calls are the methods of a [Communicator] but for Close, for a backend to embed.
type Calls struct {
	Methods
	Waits
	check *Check
}

// NewCalls returns the methods of a communicator that give b what check lets
// pass.
func NewCalls(check *Check, b Backend) Calls {
	return Calls{check: check, Methods: Methods{
		Do: func(c Call) error {
			if err := check.Call(&c); err != nil {
				return err
			}
			if err := b.Submit(c); err != nil {
				return check.Fail(c.Op.String(), err)
			}
			return nil
		},
		Together: func(calls []Call) error {
			err := check.Group(calls)
			switch {
			case err != nil:
			case len(calls) == 0:
				err = b.Usable()
			default:
				err = b.SubmitTogether(calls)
			}
			if err != nil {
				return check.Fail(opGroup, err)
			}
			return nil
		},
	}, Waits: Waits{
		Wait: func(ctx context.Context, w Wait) (Communicator, error) {
			child, err := b.Wait(ctx, w)
			if err != nil {
				return nil, check.fail(w.Op, err)
			}
			return child, nil
		},
	}}
}

// opGroup is what errors of a group name.
const opGroup = "group"

// Rank implements [Communicator].
func (c Calls) Rank() int { return c.check.Rank }

// WorldSize implements [Communicator].
func (c Calls) WorldSize() int { return c.check.WorldSize }
