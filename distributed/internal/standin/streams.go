package standin

import (
	"context"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// onStream is a runtime with a compute stream, like a GPU's. Its work is complete when a method returns.
type onStream struct{ *cpu.Runtime }

func (onStream) ComputeStream() uintptr { return ComputeStream }

// forking is a runtime with side streams.
type forking struct{ onStream }

func (b forking) ForkStream() (runtime.Runtime, error) {
	return sideStream{onStream{cpu.New()}}, nil
}

type sideStream struct{ onStream }

func (sideStream) ComputeStream() uintptr { return ComputeStream + 2 }

// NewOnStream returns rt with a compute stream.
func NewOnStream(rt *cpu.Runtime) onStream { return onStream{rt} }

// NewForking returns rt with a compute stream and side streams.
func NewForking(rt *cpu.Runtime) forking {
	return forking{onStream{rt}}
}

// NewOrdered returns c with a stream.
func NewOrdered(ctx context.Context, c comm.Communicator) Ordered {
	return Ordered{c, ctx}
}

// NewByEvents returns c with a stream and events.
func NewByEvents(ctx context.Context, c comm.Communicator) ByEvents {
	return ByEvents{Ordered{c, ctx}}
}

// Ordered is a communicator with a stream: later work waits for it.
type Ordered struct {
	comm.Communicator
	ctx context.Context
}

// Unwrap implements [comm.Unwrapper].
func (o Ordered) Unwrap() comm.Communicator { return o.Communicator }

// Split implements [comm.Communicator].
func (o Ordered) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	c, err := o.Communicator.Split(ctx, color, key)
	return NewOrdered(o.ctx, c), err
}

// CommStream implements [comm.StreamOrder].
func (Ordered) CommStream() uintptr { return ComputeStream + 1 }

// CommAfter implements [comm.StreamOrder].
func (Ordered) CommAfter(uintptr) error { return nil }

// AfterComm implements [comm.StreamOrder].
func (o Ordered) AfterComm(uintptr) error {
	return o.Communicator.Sync(o.ctx)
}

// ByEvents is one with events, which are all complete when they are recorded.
type ByEvents struct{ Ordered }

// Split implements [comm.Communicator].
func (b ByEvents) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	c, err := b.Communicator.Split(ctx, color, key)
	return NewByEvents(b.ctx, c), err
}

// CreateEvent implements [comm.StreamSyncOps].
func (ByEvents) CreateEvent() (uintptr, error) {
	return 7, nil
}

// DestroyEvent implements [comm.StreamSyncOps].
func (ByEvents) DestroyEvent(uintptr) error { return nil }

// RecordOnCommStream implements [comm.StreamSyncOps].
func (ByEvents) RecordOnCommStream(uintptr) error { return nil }

// RecordOnStream implements [comm.StreamSyncOps].
func (ByEvents) RecordOnStream(_, _ uintptr) error { return nil }

// CommStreamWaitEvent implements [comm.StreamSyncOps].
func (ByEvents) CommStreamWaitEvent(uintptr) error { return nil }

// StreamWaitEvent implements [comm.StreamSyncOps].
func (ByEvents) StreamWaitEvent(_, _ uintptr) error { return nil }

// SyncCommStream implements [comm.StreamSyncOps].
func (b ByEvents) SyncCommStream() error {
	return b.Sync(b.ctx)
}

// Waits counts waits of the host for the device, and sizes that depend on numbers that it waited for.
type Waits struct{ Comm, Copies, Sized atomic.Int32 }

// waitedFor is a rank's runtime with streams that counts waits.
type waitedFor struct {
	onStream
	W *Waits
}

func (r waitedFor) CopyOut(dst []byte, src uintptr) error {
	r.W.Copies.Add(1)
	return r.onStream.CopyOut(dst, src)
}

func (r waitedFor) CopyIn(dst uintptr, src []byte) error {
	r.W.Copies.Add(1)
	return r.onStream.CopyIn(dst, src)
}

// NewWaitedFor returns rt with a stream, and counts its waits.
func NewWaitedFor(rt *cpu.Runtime, w *Waits) waitedFor {
	return waitedFor{onStream{rt}, w}
}
