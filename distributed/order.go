package distributed

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

// order puts a communicator's work and a runtime's compute stream into an
// order. If both have streams, one stream waits for the other by events and
// the host goes on; otherwise the host waits.
type order struct {
	rt     runtime.Runtime
	c      comm.Communicator
	ops    comm.StreamSyncOps // nil: the host waits
	stream uintptr            // the runtime's compute stream
	event  uintptr            // reused: waiting takes the latest record
	// pending: communication may be under way that the compute stream does not
	// wait for.
	pending bool
}

// settleLimit is how long settle waits.
const settleLimit = 5 * time.Second

func newOrder(rt runtime.Runtime, c comm.Communicator) (order, error) {
	o := order{rt: rt, c: c, stream: rt.ComputeStream()}
	ops, ok := comm.AsStreamSync(c)
	if !ok || o.stream == 0 {
		return o, nil
	}
	event, err := ops.CreateEvent()
	if err != nil {
		return order{}, err
	}
	o.ops, o.event = ops, event
	return o, nil
}

// commAfterCompute lets communication submitted from now on see what the
// compute stream was given so far.
func (o *order) commAfterCompute(ctx context.Context) error {
	var err error
	if o.ops == nil {
		err = o.rt.Synchronize(ctx)
	} else if err = o.ops.RecordOnStream(o.event, o.stream); err == nil {
		err = o.ops.CommStreamWaitEvent(o.event)
	}
	o.pending = o.pending || err == nil
	return err
}

// computeAfterComm lets work submitted to the compute stream from now on see
// what the communicator was given so far.
func (o *order) computeAfterComm(ctx context.Context) error {
	var err error
	if o.ops == nil {
		err = o.c.Sync(ctx)
	} else if err = o.ops.RecordOnCommStream(o.event); err == nil {
		err = o.ops.StreamWaitEvent(o.stream, o.event)
	}
	o.pending = o.pending && err != nil
	return err
}

// settle makes sure that memory which was communicated may be given back: it
// has the host wait for what the compute stream does not wait for, with streams
// too, because an event bounds no time. After an error the communicator may
// still read and write that memory; when it was closed, it does not.
func (o *order) settle() error {
	if !o.pending {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), settleLimit)
	defer cancel()
	if err := o.c.Sync(ctx); err != nil && !errors.Is(err, comm.ErrClosed) {
		return fmt.Errorf("memory is not given back, because the communicator may still write it: %w", err)
	}
	o.pending = false
	return nil
}

// close frees the event. It may be called again.
func (o *order) close() error {
	if o.ops == nil || o.event == 0 {
		return nil
	}
	event := o.event
	o.event = 0
	return o.ops.DestroyEvent(event)
}

// reaches checks that c can read and write memory of d.
func reaches(c comm.Communicator, d runtime.Device) error {
	if r, ok := comm.As[comm.Reacher](c); ok {
		return r.CheckDevice(d)
	}
	return nil
}

// sameStream checks that other's memory may take part in work on rt's: an order
// knows the compute stream of one runtime only, and two runtimes of one GPU may
// have a stream each.
func sameStream(rt, other runtime.Runtime) error {
	if rt.Device() != other.Device() {
		return fmt.Errorf("%w: %v and %v", runtime.ErrDevice, rt.Device(), other.Device())
	}
	if rt.ComputeStream() != other.ComputeStream() {
		return fmt.Errorf("%w: two runtimes of %v, whose compute streams nothing puts into an order", runtime.ErrDevice, rt.Device())
	}
	return nil
}

// given checks that there is a communicator.
func given(c comm.Communicator) error {
	if c == nil {
		return fmt.Errorf("%w: communicator is nil", comm.ErrArgument)
	}
	return nil
}

// firstError returns the first error that is not nil.
func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
