package p2p

import (
	"context"
	"errors"
	"fmt"
	goruntime "runtime"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/internal/marks"
	"github.com/tutti-go/tutti/internal/leak"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Comm decorates a communicator of GPUs, and runs the operations that are faster through peer memory itself. Close
// also closes the base. Close graphs that hold its operations first.
//
// Lock order: streamUse, then the locks of the endpoint (see there). No lock is held while the base is called, except
// that streamUse is held while the stream is queried or marked.
type Comm struct {
	*backend.Base
	comm.Wrapped
	streams               // of the base, which both submit to
	check   backend.Check // of the arguments of calls
	life    backend.Life  // lifecycle; locks itself
	rt      *cuda.Runtime // of the rank's GPU
	end     *endpoint     // memory of this rank and its peers; locks itself
	offload offloadTable  // which calls run here; never changed

	stream    atomic.Pointer[cuda.Stream] // the base's stream at its last use; nil before the first
	streamUse sync.RWMutex                // read-locked to query or mark the stream, locked to free everything

	ledger        backend.Ledger    // calls in flight; locks itself
	entered, left atomic.Uint64     // calls of goroutines; equal when no goroutine is in a call
	marks         marks.Marks       // events of callers on the stream; locks itself
	leakAlarm     goruntime.Cleanup // logs that Close was never called
}

// streams are the base's operations on streams.
type streams interface {
	comm.StreamSyncOps
	comm.StreamOrder
}

var (
	_ comm.Communicator  = (*Comm)(nil)
	_ comm.StreamSyncOps = (*Comm)(nil)
	_ comm.StreamOrder   = (*Comm)(nil)
	_ backend.Progresser = (*Comm)(nil)
	_ backend.Rounder    = (*Comm)(nil)
	_ backend.ListSharer = (*Comm)(nil)
)

// newComm makes a communicator. If it fails, base is unchanged.
func newComm(ctx context.Context, base comm.Communicator, ops streams, rt *cuda.Runtime, o order) (*Comm, error) {
	end, table, err := connect(ctx, base, rt, worldSizes(base.WorldSize()), patience, o)
	if err != nil {
		return nil, err
	}
	c := &Comm{
		Wrapped: comm.Wrap(base),
		streams: ops,
		rt:      rt,
		end:     end,
		offload: table,
	}
	c.marks.Init(rt)
	c.check = backend.Check{
		Backend:   "p2p",
		Rank:      base.Rank(),
		WorldSize: base.WorldSize(),
	}
	c.life.Timeout = backend.DeviceTimeout
	c.Base = backend.New(&c.check, &c.life, adapter{c})
	// The memory of a lost communicator stays allocated on the GPU, because peers write to it. The base reports its
	// own resources.
	mark := leak.NewMark(c.check.Backend, fmt.Sprintf("rank %d of %d", c.check.Rank, c.check.WorldSize))
	c.leakAlarm = goruntime.AddCleanup(c, (*leak.Mark).Report, mark)
	return c, nil
}

// FixedOrder implements [comm.FixedOrder].
func (c *Comm) FixedOrder() bool {
	return c.offload.fixed()
}

// discard releases all resources of the communicator except its base.
func (c *Comm) discard() error {
	stream := c.Stream()
	c.streamUse.Lock() // nobody may query the stream, which the base closes
	defer c.streamUse.Unlock()
	err := c.end.discard(stream, c.life.Timeout)
	c.marks.Close(err != nil)
	return errors.Join(err, stream.Close())
}

// Stream returns the base's stream, to which both communicators submit. The base may change it (nccl.Comm.UseStream).
func (c *Comm) Stream() *cuda.Stream {
	handle := c.CommStream()
	s := c.stream.Load()
	if s != nil && s.Handle() == handle {
		return s
	}
	if s != nil {
		_ = s.Close() // closes only the event by which others waited for the stream
	}
	s = c.rt.WrapStream(handle)
	c.stream.Store(s)
	return s
}
