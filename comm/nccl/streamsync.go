package nccl

import (
	"context"
	"sync"

	"github.com/tutti-go/tutti/runtime/cuda"
)

// Stream is the stream that this communicator submits to.
func (c *Comm) Stream() *cuda.Stream {
	return c.stream
}

// UseStream makes the communicator submit to an existing CUstream, such as a framework's compute stream; 0 returns to
// the communicator's own. The new stream waits for earlier submissions. It must belong to the device's primary context
// and stay open until the communicator is closed or uses another stream. Nobody else may call the communicator at the
// same time.
func (c *Comm) UseStream(stream uintptr) error {
	const op = "use stream"
	if err := c.life.Err(); err != nil {
		return c.check.Fail(op, err)
	}
	next := c.created
	if stream != 0 {
		if err := c.rt.CheckStream(stream); err != nil {
			return c.check.Fail(op, err)
		}
		next = c.rt.WrapStream(stream)
	}
	if err := c.mark.order(c.rt, c.stream.Handle(), next.Handle()); err != nil {
		return c.check.Fail(op, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streamMu.Lock()
	defer c.streamMu.Unlock()
	c.stream = next
	return nil
}

// mark is the event by which one stream waits for another.
//
// One event is enough for all goroutines and streams: a wait refers to the record before it, and the lock keeps other
// records from coming between the two. Later records do not change the wait. The same holds in captures. There a
// record stands for nodes of the graph, and the wait adds edges from them at once, so neither the event nor its last
// record is part of the graph. The next record, in a capture or not, replaces the meaning of the event before any wait
// sees it. (The driver refuses a wait outside a capture for an event that was last recorded in one, but no event is
// kept for later.)
type mark struct {
	mu    sync.Mutex  // held from a record to its wait
	event *cuda.Event // made with the communicator: a capture may come first
}

// order makes later work of the second stream wait for the work submitted to the first so far.
func (m *mark) order(rt *cuda.Runtime, first, second uintptr) error {
	if first == second {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := rt.RecordEvent(m.event.Handle(), first); err != nil {
		return err
	}
	return rt.StreamWaitEvent(second, m.event.Handle())
}

// CommStream implements [comm.StreamOrder]. It may run concurrently with UseStream, because a decorator can be asked
// for its progress at any time.
func (c *Comm) CommStream() uintptr {
	c.streamMu.RLock()
	defer c.streamMu.RUnlock()
	return c.stream.Handle()
}

// onStream calls do, which uses the streams of an open communicator. Close does not close them during the call.
func (c *Comm) onStream(op string, do func() error) error {
	c.streamMu.RLock()
	defer c.streamMu.RUnlock()
	err := c.life.Err()
	if err == nil {
		err = do()
	}
	return c.explain(op, err)
}

// CommAfter implements [comm.StreamOrder].
func (c *Comm) CommAfter(stream uintptr) error {
	return c.onStream("order after stream", func() error {
		return c.mark.order(c.rt, stream, c.stream.Handle())
	})
}

// AfterComm implements [comm.StreamOrder].
func (c *Comm) AfterComm(stream uintptr) error {
	return c.onStream("order stream", func() error {
		return c.mark.order(c.rt, c.stream.Handle(), stream)
	})
}

// CreateEvent implements [comm.StreamSyncOps].
func (c *Comm) CreateEvent() (uintptr, error) {
	e, err := c.rt.NewEvent()
	if err != nil {
		return 0, c.check.Fail("create event", err)
	}
	return e.Handle(), nil
}

// DestroyEvent implements [comm.StreamSyncOps].
func (c *Comm) DestroyEvent(event uintptr) error {
	return c.explain("destroy event", c.rt.WrapEvent(event).Close())
}

// RecordOnCommStream implements [comm.StreamSyncOps].
func (c *Comm) RecordOnCommStream(event uintptr) error {
	return c.onStream("record event", func() error {
		return c.rt.RecordEvent(event, c.stream.Handle())
	})
}

// RecordOnStream implements [comm.StreamSyncOps].
func (c *Comm) RecordOnStream(event, stream uintptr) error {
	return c.explain("record event", c.rt.RecordEvent(event, stream))
}

// CommStreamWaitEvent implements [comm.StreamSyncOps].
func (c *Comm) CommStreamWaitEvent(event uintptr) error {
	return c.onStream("wait for event", func() error {
		return c.rt.StreamWaitEvent(c.stream.Handle(), event)
	})
}

// StreamWaitEvent implements [comm.StreamSyncOps].
func (c *Comm) StreamWaitEvent(stream, event uintptr) error {
	return c.explain("wait for event", c.rt.StreamWaitEvent(stream, event))
}

// SyncCommStream implements [comm.StreamSyncOps].
func (c *Comm) SyncCommStream() error {
	return c.Sync(context.Background())
}
