package base

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

// Order puts a communicator's work and a runtime's compute stream into an
// order. If both have streams, one stream waits for the other and the host goes
// on; otherwise the host waits.
type Order struct {
	rt      runtime.Runtime   // of the compute stream
	C       comm.Communicator // whose work is ordered
	Streams comm.StreamOrder  // nil: the host waits
	compute uintptr           // the runtime's stream
	// pending: communication may be in flight that the compute stream does not
	// wait for.
	pending bool
}

// DrainLimit is how long a drain waits.
const DrainLimit = 5 * time.Second

// NewOrder returns the order of a runtime and a communicator.
func NewOrder(rt runtime.Runtime, c comm.Communicator) Order {
	o := Order{
		rt:      rt,
		C:       c,
		compute: rt.ComputeStream(),
	}
	if o.compute != 0 {
		o.Streams, _ = comm.As[comm.StreamOrder](c)
	}
	return o
}

// CommAfterCompute lets communication submitted from now on see what the
// compute stream was given so far.
func (o *Order) CommAfterCompute(ctx context.Context) error {
	var err error
	if o.Streams == nil {
		err = o.HostAfterCompute(ctx)
	} else {
		err = o.Streams.CommAfter(o.compute)
	}
	o.pending = o.pending || err == nil
	return err
}

// ComputeAfterComm lets work submitted to the compute stream from now on see
// what the communicator was given so far.
func (o *Order) ComputeAfterComm(ctx context.Context) error {
	var err error
	if o.Streams == nil {
		err = o.C.Sync(ctx)
	} else {
		err = o.Streams.AfterComm(o.compute)
	}
	o.pending = o.pending && err != nil
	return err
}

// Around submits communication between what the compute stream was given before and what it
// is given afterwards.
func (o *Order) Around(ctx context.Context, submit func() error) error {
	err := o.CommAfterCompute(ctx)
	if err == nil {
		err = submit()
	}
	if err == nil {
		err = o.ComputeAfterComm(ctx)
	}
	return err
}

// HostAfterAll has the host wait for everything, communication first: that is
// the wait that ends when a peer has failed.
func (o *Order) HostAfterAll(ctx context.Context) error {
	if o.Streams != nil {
		if err := o.C.Sync(ctx); err != nil {
			return err
		}
	}
	return o.HostAfterCompute(ctx)
}

// HostAfterCompute has the host wait for the compute stream.
func (o *Order) HostAfterCompute(ctx context.Context) error {
	err := o.rt.Synchronize(ctx)
	if err != nil && ctx.Err() != nil {
		return comm.ContextError(ctx)
	}
	return err
}

// DrainToFree makes sure that memory which was communicated may be freed: it has the host wait for what the compute
// stream does not wait for, with streams too, because an event bounds no time. After an error the communicator may
// still read and write that memory; when it was closed or aborted before, it does not.
func (o *Order) DrainToFree() error {
	ctx, cancel := context.WithTimeout(context.Background(), DrainLimit)
	defer cancel()
	if err := o.Drain(ctx); err != nil {
		return fmt.Errorf("memory is not freed, because the communicator may still write it: %w", err)
	}
	return nil
}

// Drain has the host wait for what the compute stream does not wait for. A communicator that was closed or aborted has
// nothing in flight: a Sync that says so returns when [comm.Communicator].Abort has.
func (o *Order) Drain(ctx context.Context) error {
	if !o.pending {
		return nil
	}
	if err := o.C.Sync(ctx); err != nil && !errors.Is(err, comm.ErrClosed) && !errors.Is(err, comm.ErrBroken) {
		return err
	}
	o.pending = false
	return nil
}

// Submitted notes that somebody else has submitted communication which the compute stream may not wait for.
func (o *Order) Submitted() { o.pending = true }

// InFlight reports whether there may be communication that the compute stream does not wait for.
func (o *Order) InFlight() bool { return o.pending }
