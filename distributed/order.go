package distributed

import (
	"context"

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
}

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
	if o.ops == nil {
		return o.rt.Synchronize(ctx)
	}
	if err := o.ops.RecordOnStream(o.event, o.stream); err != nil {
		return err
	}
	return o.ops.CommStreamWaitEvent(o.event)
}

// computeAfterComm lets work submitted to the compute stream from now on see
// what the communicator was given so far.
func (o *order) computeAfterComm(ctx context.Context) error {
	if o.ops == nil {
		return o.c.Sync(ctx)
	}
	if err := o.ops.RecordOnCommStream(o.event); err != nil {
		return err
	}
	return o.ops.StreamWaitEvent(o.stream, o.event)
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

// firstError returns the first error that is not nil.
func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
