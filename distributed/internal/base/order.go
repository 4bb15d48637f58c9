package base

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

// Order orders a communicator's work and a runtime's compute stream. If both have streams, one stream waits for the
// other and the host continues; otherwise the host waits.
type Order struct {
	rt      runtime.Runtime   // of the compute stream
	C       comm.Communicator // its work is ordered
	Streams comm.StreamOrder  // nil: the host waits
	compute uintptr           // the runtime's stream
	// pending means that communication may be in flight that the compute stream does not wait for.
	pending bool
}

// DrainLimit bounds a drain in Close and Rebind, whose caller may have no time left: a call in flight ends within
// milliseconds unless it waits for a rank, and then its memory is not freed.
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

// CommAfterCompute makes later communication wait for everything submitted to the compute stream so far.
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

// ComputeAfterComm makes later work of the compute stream wait for everything submitted to the communicator so far.
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

// Around submits communication between earlier and later work of the compute stream.
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

// HostAfterAll makes the host wait for everything, communication first, because that wait ends when a peer has failed.
func (o *Order) HostAfterAll(ctx context.Context) error {
	if o.Streams != nil {
		if err := o.C.Sync(ctx); err != nil {
			return err
		}
	}
	return o.HostAfterCompute(ctx)
}

// HostAfterCompute makes the host wait for the compute stream.
func (o *Order) HostAfterCompute(ctx context.Context) error {
	err := o.rt.Synchronize(ctx)
	if err != nil && ctx.Err() != nil {
		return comm.ContextError(ctx)
	}
	return err
}

// DrainToFree makes sure that memory that was communicated may be freed: the host waits for communication that the
// compute stream does not wait for. It does so with streams too, because an event has no time limit. After an error
// the communicator may still access that memory, unless it was closed or aborted before.
func (o *Order) DrainToFree() error {
	ctx, cancel := context.WithTimeout(context.Background(), DrainLimit)
	defer cancel()
	if err := o.Drain(ctx); err != nil {
		return fmt.Errorf("memory is not freed, because the communicator may still write it: %w", err)
	}
	return nil
}

// Drain makes the host wait for communication that the compute stream does not wait for. A communicator that was
// closed or aborted has nothing in flight: a Sync that says so returns after [comm.Communicator].Abort.
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

// Submitted records that communication was submitted elsewhere which the compute stream may not wait for.
func (o *Order) Submitted() { o.pending = true }

// InFlight reports whether communication may be in flight that the compute stream does not wait for.
func (o *Order) InFlight() bool { return o.pending }
