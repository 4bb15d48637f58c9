package nccl

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/runtime/cuda"
)

// Stream is the stream that this communicator submits to.
func (c *Comm) Stream() *cuda.Stream { return c.stream }

// UseStream makes the communicator submit to an existing CUstream, such as the
// one that a framework computes on, instead of its own; 0 goes back to that. The
// new stream waits for what was submitted so far. It belongs to the device's
// primary context and lives until the communicator is closed or told to use
// another. Nobody else may call the communicator meanwhile.
func (c *Comm) UseStream(stream uintptr) error {
	const op = "use stream"
	if err := c.waitable(op); err != nil {
		return err
	}
	next := c.own
	if stream != 0 {
		if err := c.rt.CheckStream(stream); err != nil {
			return c.Fail(op, err)
		}
		next = c.rt.WrapStream(stream)
	}
	event, err := c.rt.NewEvent()
	if err != nil {
		return c.Fail(op, err)
	}
	// An event may be destroyed while a stream waits for it.
	err = errors.Join(c.stream.Record(event), next.Wait(event), event.Close())
	if err != nil {
		return c.Fail(op, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stream = next
	return nil
}

// CreateEvent implements [comm.StreamSyncOps].
func (c *Comm) CreateEvent() (uintptr, error) {
	e, err := c.rt.NewEvent()
	if err != nil {
		return 0, c.Fail("create event", err)
	}
	return e.Handle(), nil
}

// DestroyEvent implements [comm.StreamSyncOps].
func (c *Comm) DestroyEvent(event uintptr) error {
	return c.explain("destroy event", c.rt.WrapEvent(event).Close())
}

// RecordOnCommStream implements [comm.StreamSyncOps].
func (c *Comm) RecordOnCommStream(event uintptr) error {
	if err := c.usable("record event"); err != nil {
		return err
	}
	return c.explain("record event", c.rt.RecordEvent(event, c.stream.Handle()))
}

// RecordOnStream implements [comm.StreamSyncOps].
func (c *Comm) RecordOnStream(event, stream uintptr) error {
	return c.explain("record event", c.rt.RecordEvent(event, stream))
}

// CommStreamWaitEvent implements [comm.StreamSyncOps].
func (c *Comm) CommStreamWaitEvent(event uintptr) error {
	if err := c.usable("wait for event"); err != nil {
		return err
	}
	return c.explain("wait for event", c.rt.StreamWaitEvent(c.stream.Handle(), event))
}

// StreamWaitEvent implements [comm.StreamSyncOps].
func (c *Comm) StreamWaitEvent(stream, event uintptr) error {
	return c.explain("wait for event", c.rt.StreamWaitEvent(stream, event))
}

// SyncCommStream implements [comm.StreamSyncOps].
func (c *Comm) SyncCommStream() error {
	return c.sync(context.Background(), "sync comm stream")
}

// explain wraps the error of an operation, if there is one.
func (c *Comm) explain(op string, err error) error {
	if err == nil {
		return nil
	}
	return c.Fail(op, err)
}
