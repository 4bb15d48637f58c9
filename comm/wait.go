package comm

import (
	"context"
	"fmt"
)

// Wait is an operation that waits, as a value: Sync, Barrier or Split, with its
// arguments.
type Wait struct {
	Op         Op  // OpSync, OpBarrier or OpSplit
	Color, Key int // of a Split
}

// Make calls the communicator's method for the wait. Only a Split has a result.
func (w Wait) Make(ctx context.Context, on Communicator) (Communicator, error) {
	switch w.Op {
	case OpSync:
		return nil, on.Sync(ctx)
	case OpBarrier:
		return nil, on.Barrier(ctx)
	case OpSplit:
		return on.Split(ctx, w.Color, w.Key)
	}
	return nil, fmt.Errorf("%w: %v is no wait", ErrArgument, w.Op)
}

// Waits implements the methods of a [Communicator] that wait by one function. A decorator embeds it beside [Methods].
type Waits struct {
	Wait func(ctx context.Context, w Wait) (Communicator, error) // does each of them; never nil
}

// Sync implements [Communicator].
func (w Waits) Sync(ctx context.Context) error {
	_, err := w.Wait(ctx, Wait{Op: OpSync})
	return err
}

// Barrier implements [Communicator].
func (w Waits) Barrier(ctx context.Context) error {
	_, err := w.Wait(ctx, Wait{Op: OpBarrier})
	return err
}

// Split implements [Communicator].
func (w Waits) Split(ctx context.Context, color, key int) (Communicator, error) {
	return w.Wait(ctx, Wait{OpSplit, color, key})
}
