package backend

import (
	"context"

	"github.com/tutti-go/tutti/comm"
)

// Backend moves the bytes of one rank. [New] makes a [comm.Communicator] from it, whose methods check arguments and
// manage the communicator's [Life].
//
// Errors need not name the operation: an error that is not an [*comm.OpError] is wrapped in one. An error that is not
// [Refused] aborts the communicator.
type Backend interface {
	// Submit starts a call. Submit, SubmitTogether, and Wait of a Barrier or Split return [Life.Err] if it is not nil,
	// and check it under the lock under which they accept a call. (Otherwise, calls that they accept during Close are
	// refused later, before Release ends.)
	Submit(c comm.Call) error
	// SubmitTogether starts the calls of a group, at least one, all or none.
	// calls belong to the caller again when it returns.
	SubmitTogether(calls []comm.Call) error
	// Wait does a Sync, a Barrier or a Split. Only a Split has a result; a result returned with an error is closed. If
	// the communicator aborts first, Wait returns [Life.Broken] promptly, even if Abort has left nothing to wait for.
	// Close drains with a Sync, even after Abort, and after [Life.Err] has become [comm.ErrClosed].
	Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error)
	// Abort ends the operations in flight and tells the peers, unless they know, that this rank aborts because of
	// cause, the first one passed to [Life.Fail]. When it returns, nobody touches the rank's buffers any more, or ctx
	// has ended. It is called at most once. A decorator whose peers learn the cause from the communicator that it
	// wraps aborts that communicator. Neither Abort nor Release calls Abort or Close of the same communicator.
	Abort(ctx context.Context, cause error)
	// Release frees all resources, and tells the peers that this rank leaves. It is the last call, made once: after a
	// Sync that found nothing in flight, or after Abort. ctx bounds its waits, except the Close of a communicator that
	// it wraps.
	Release(ctx context.Context) error
}

// Base is a [comm.Communicator] made from a [Backend]. A handle with more methods embeds it, and keeps the backend in
// a field, because the backend's Abort is a different method. A handle with a cleanup for the garbage collector must
// not be referenced by its backend, and must stay alive through Wait and Close; see comm/local.
type Base struct {
	comm.Methods
	comm.Waits
	check *Check // of arguments, before each call
	life  *Life  // lifecycle of the communicator; refuses calls after its end
}

// New returns a communicator that passes the calls that check accepts to b, and whose lifecycle is l. l must not have
// failed yet.
func New(check *Check, l *Life, b Backend) *Base {
	base := &Base{check: check, life: l}
	do := func(c comm.Call) error { // a closure, so that a call is not copied once more
		if err := check.Call(&c); err != nil {
			return err
		}
		if err := b.Submit(c); err != nil {
			return l.Explain(c.Op.String(), err)
		}
		return nil
	}
	base.Methods = comm.Methods{Do: do, Together: base.group}
	base.Waits = comm.Waits{Wait: base.wait}
	l.backend = b
	l.base = base
	return base
}

// group submits the calls of a group. An empty one has nothing to submit.
func (b *Base) group(calls []comm.Call) error {
	if err := b.check.Group(calls); err != nil {
		return err
	}
	err := b.life.Err()
	if len(calls) > 0 {
		err = b.life.backend.SubmitTogether(calls)
	}
	if err != nil {
		return b.life.Explain(opGroup, err)
	}
	return nil
}

// wait does a Sync, a Barrier or a Split.
func (b *Base) wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	child, err := b.waitAndAdopt(ctx, w)
	if err != nil {
		return nil, b.life.Explain(w.Op.String(), err)
	}
	return child, nil
}

// waitAndAdopt is wait without wrapping errors.
func (b *Base) waitAndAdopt(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	if err := b.life.Err(); err != nil {
		return nil, err
	}
	child, err := b.life.backend.Wait(ctx, w)
	if child == nil {
		return nil, err
	}
	if err != nil {
		_ = comm.CloseAll(child, err) // its other ranks may have their sub-communicators
		return nil, err
	}
	if err := b.life.Adopt(child); err != nil {
		return nil, err
	}
	return child, nil
}

// opGroup is the operation named by errors of a group.
const opGroup = "group"

// Rank implements [comm.Communicator].
func (b *Base) Rank() int {
	return b.check.Rank
}

// WorldSize implements [comm.Communicator].
func (b *Base) WorldSize() int {
	return b.check.WorldSize
}

// Err implements [comm.Communicator].
func (b *Base) Err() error {
	err := b.life.Err()
	if err != nil {
		b.life.known.Store(true)
	}
	return err
}

// Abort implements [comm.Communicator].
func (b *Base) Abort(cause error) {
	if cause == nil {
		cause = comm.ErrCanceled
	}
	b.life.known.Store(true)
	b.life.Fail(cause)
	b.life.abort()
}

// Close implements [comm.Communicator].
func (b *Base) Close() error {
	return b.life.close()
}

// SubCommunicators implements [Parent].
func (b *Base) SubCommunicators() []comm.Communicator {
	return b.life.subCommunicators()
}

// Progress implements [Progresser] if the backend does.
func (b *Base) Progress() Progress {
	if p, ok := b.life.backend.(Progresser); ok {
		return p.Progress()
	}
	return Progress{}
}

// lifeOf finds the life of a handle that embeds a Base.
func (b *Base) lifeOf() *Life { return b.life }
