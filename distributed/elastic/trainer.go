package elastic

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

// Trainer is the part of a member's training that a [Member] moves from epoch to epoch. [ddp.Gradients] and
// [outer.Loop] implement it. Make them with a communicator of one rank ([noop.New]): [Member.Next] moves them to each
// epoch's communicator. A program with its own state embeds one of them, or [Plain], and adds its state to SharedState
// and Restore. Tensors that are the same on all members belong in [Config].
//
// A Trainer may also have a method Hash(context.Context) (uint64, error). Members compare its result in the first vote
// of an epoch, instead of a hash of Config.Tensors. The hash covers the state that is the same on all members.
//
// All methods are called by the goroutine that calls the methods of the [Member].
type Trainer interface {
	// Rebind moves the trainer to the communicator of an epoch. All members call it for each epoch, before state is sent.
	Rebind(ctx context.Context, c comm.Communicator) error
	// BeforeCommit sets the vote that ends a step. [Join] passes [Member.Commit]. The trainer calls vote in each step,
	// before anything that cannot be rolled back, and rolls the step back if vote fails.
	BeforeCommit(vote func(ctx context.Context) error)
	// SharedState returns what a joining member needs beside Config.Tensors, up to 2 GiB.
	SharedState(ctx context.Context) ([]byte, error)
	// Restore restores the SharedState of another member. It is called once when this member joins, unless that state is
	// empty, after Rebind and after Config.Tensors have been received.
	Restore(ctx context.Context, states ...[]byte) error
	// Residuals returns F32 tensors with the values that this member has not sent yet, the same list on all members. A
	// joining member begins with zeros. A member that leaves in order has its residuals added to another member's.
	Residuals() ([]*runtime.Tensor, error)
}

// hasher is implemented by a [Trainer] whose hash members compare.
type hasher interface {
	// Hash returns the hash of this member.
	Hash(ctx context.Context) (uint64, error)
}

// Plain is a [Trainer] without state. Its program calls [Member.Commit] itself, between exchange and update.
type Plain struct{}

var _ Trainer = Plain{}

// Rebind implements [Trainer]: nothing is bound to a communicator.
func (Plain) Rebind(context.Context, comm.Communicator) error { return nil }

// BeforeCommit implements [Trainer]: the program votes.
func (Plain) BeforeCommit(func(context.Context) error) {}

// SharedState implements [Trainer]. It returns nil: members share Config.Tensors only.
func (Plain) SharedState(context.Context) ([]byte, error) { return nil, nil }

// Restore implements [Trainer].
func (Plain) Restore(context.Context, ...[]byte) error { return nil }

// Residuals implements [Trainer]. It returns nil: everything is sent.
func (Plain) Residuals() ([]*runtime.Tensor, error) { return nil, nil }
