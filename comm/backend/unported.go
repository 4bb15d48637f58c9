package backend

import (
	"context"

	"github.com/tutti-go/tutti/comm"
)

// Unported is a [Backend] that keeps its own life.
type Unported interface {
	Submit(c comm.Call) error
	SubmitTogether(calls []comm.Call) error
	Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error)
	Usable() error
}

// Unusable is what [Unported] has Usable return: [comm.ErrClosed], [comm.ErrBroken] with its
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
		return comm.ErrClosed
	}
	return &brokenError{broken}
}

// Calls are the methods of a [comm.Communicator] but for Close, for a backend to embed.
type Calls struct {
	comm.Methods
	comm.Waits
	check *Check
}

// NewCalls returns the methods of a communicator that give b what check lets
// pass.
func NewCalls(check *Check, b Unported) Calls {
	return Calls{check: check, Methods: comm.Methods{
		Do: func(c comm.Call) error {
			if err := check.Call(&c); err != nil {
				return err
			}
			if err := b.Submit(c); err != nil {
				return check.Fail(c.Op.String(), err)
			}
			return nil
		},
		Together: func(calls []comm.Call) error {
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
	}, Waits: comm.Waits{
		Wait: func(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
			child, err := b.Wait(ctx, w)
			if err != nil {
				return nil, check.fail(w.Op, err)
			}
			return child, nil
		},
	}}
}

// Rank implements [comm.Communicator].
func (c Calls) Rank() int { return c.check.Rank }

// WorldSize implements [comm.Communicator].
func (c Calls) WorldSize() int { return c.check.WorldSize }
