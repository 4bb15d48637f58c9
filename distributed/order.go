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
// order. If both have streams, one stream waits for the other and the host goes
// on; otherwise the host waits.
type order struct {
	rt      runtime.Runtime
	c       comm.Communicator
	streams comm.StreamOrder // nil: the host waits
	compute uintptr          // the runtime's stream
	// pending: communication may be under way that the compute stream does not
	// wait for.
	pending bool
}

// settleLimit is how long settle waits.
const settleLimit = 5 * time.Second

func newOrder(rt runtime.Runtime, c comm.Communicator) order {
	o := order{rt: rt, c: c, compute: rt.ComputeStream()}
	if o.compute != 0 {
		o.streams, _ = comm.As[comm.StreamOrder](c)
	}
	return o
}

// commAfterCompute lets communication submitted from now on see what the
// compute stream was given so far.
func (o *order) commAfterCompute(ctx context.Context) error {
	var err error
	if o.streams == nil {
		err = o.hostAfterCompute(ctx)
	} else {
		err = o.streams.CommAfter(o.compute)
	}
	o.pending = o.pending || err == nil
	return err
}

// computeAfterComm lets work submitted to the compute stream from now on see
// what the communicator was given so far.
func (o *order) computeAfterComm(ctx context.Context) error {
	var err error
	if o.streams == nil {
		err = o.c.Sync(ctx)
	} else {
		err = o.streams.AfterComm(o.compute)
	}
	o.pending = o.pending && err != nil
	return err
}

// hostAfterAll has the host wait for everything, communication first: that is
// the wait that ends when a peer has failed.
func (o *order) hostAfterAll(ctx context.Context) error {
	if o.streams != nil {
		if err := o.c.Sync(ctx); err != nil {
			return err
		}
	}
	return o.hostAfterCompute(ctx)
}

// hostAfterCompute has the host wait for the compute stream.
func (o *order) hostAfterCompute(ctx context.Context) error {
	err := o.rt.Synchronize(ctx)
	if err != nil && ctx.Err() != nil {
		return comm.ContextError(ctx)
	}
	return err
}

// settle makes sure that memory which was communicated may be given back: it
// has the host wait for what the compute stream does not wait for, with streams
// too, because an event bounds no time. After an error the communicator may
// still read and write that memory; when it was closed, it does not.
func (o *order) settle() error {
	ctx, cancel := context.WithTimeout(context.Background(), settleLimit)
	defer cancel()
	if err := o.drain(ctx); err != nil {
		return fmt.Errorf("memory is not given back, because the communicator may still write it: %w", err)
	}
	return nil
}

// drain has the host wait for what the compute stream does not wait for.
func (o *order) drain(ctx context.Context) error {
	if !o.pending {
		return nil
	}
	if err := o.c.Sync(ctx); err != nil && !errors.Is(err, comm.ErrClosed) {
		return err
	}
	o.pending = false
	return nil
}
