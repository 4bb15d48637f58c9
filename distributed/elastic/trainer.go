package elastic

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

// Trainer is what a member trains with. [ddp.Gradients] and [outer.Loop] implement it, made with a communicator of
// one rank ([noop.New]): [Member.Next] moves them to each epoch's. A program with its own state embeds one
// of them, or [Plain], and adds its state to SharedState and Restore. Tensors that all members have alike are in
// [Config], not here.
//
// A Trainer may have one more method, Hash(context.Context) (uint64, error): members compare what it returns in the
// first vote of an epoch, instead of a hash of Config.Tensors. It covers what all members have alike.
//
// All methods are called by the goroutine that calls the methods of the [Member].
type Trainer interface {
	// Rebind moves the trainer to the communicator of an epoch. All members call it for each epoch, before state is sent.
	Rebind(ctx context.Context, c comm.Communicator) error
	// BeforeCommit sets the vote that ends a step. [Join] passes [Member.Commit]. The trainer calls it in each step
	// between what can be rolled back and what cannot, and rolls the step back if it fails.
	BeforeCommit(vote func(ctx context.Context) error)
	// SharedState returns what a joining member needs beside Config.Tensors, up to 2 GiB.
	SharedState(ctx context.Context) ([]byte, error)
	// Restore takes the SharedState of another member, once, unless that is empty. It is called when this member joins,
	// after Rebind, when Config.Tensors are those of the others.
	Restore(ctx context.Context, states ...[]byte) error
	// Residuals returns tensors of F32 with what this member has not sent yet, the same list on all members. A joining
	// member begins with zeros. A member that leaves in order has its residuals added to another member's.
	Residuals() ([]*runtime.Tensor, error)
}

// hasher is implemented by a [Trainer] whose hash members compare.
type hasher interface {
	// Hash returns the hash of this member.
	Hash(ctx context.Context) (uint64, error)
}

// Plain is a [Trainer] that keeps nothing. Its program calls [Member.Commit] itself, between exchange and update.
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
