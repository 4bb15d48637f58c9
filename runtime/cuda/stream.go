package cuda

import (
	"context"
	"time"

	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/poll"
)

// streamNonBlocking is CU_STREAM_NON_BLOCKING: no implicit synchronisation with
// the legacy default stream.
const streamNonBlocking = 1

// Stream is an ordered queue of work on a device.
type Stream struct {
	rt     *Runtime
	handle uintptr
	owned  bool
}

// NewStream creates a stream. Priority 0 is normal; negative numbers come
// first, as far down as the device allows (see StreamPriorities).
func (r *Runtime) NewStream(priority int) (*Stream, error) {
	h, err := r.get("cuStreamCreateWithPriority", r.drv.sym.StreamCreate, streamNonBlocking, uintptr(priority))
	if err != nil {
		return nil, err
	}
	return &Stream{rt: r, handle: h, owned: true}, nil
}

// WrapStream makes a Stream of a native CUstream that somebody else owns; its
// Close does nothing.
func (r *Runtime) WrapStream(handle uintptr) *Stream { return &Stream{rt: r, handle: handle} }

// StreamPriorities returns the least and the greatest priority of streams; the
// greatest is the lowest number.
func (r *Runtime) StreamPriorities() (least, greatest int, err error) {
	out := r.drv.out()
	defer r.drv.release(out)
	if err := r.do("cuCtxGetStreamPriorityRange", r.drv.sym.CtxPriorityRange, out.addr(0), out.addr(1)); err != nil {
		return 0, 0, err
	}
	return int(int32(out[0])), int(int32(out[1])), nil
}

// Handle returns the native CUstream.
func (s *Stream) Handle() uintptr { return s.handle }

// Wait makes later work of the stream wait for the event.
func (s *Stream) Wait(e *Event) error {
	return s.rt.StreamWaitEvent(s.handle, e.handle)
}

// Record records the event after everything submitted to the stream so far.
func (s *Stream) Record(e *Event) error {
	return s.rt.RecordEvent(e.handle, s.handle)
}

// StreamWaitEvent is [Stream.Wait] on native handles.
func (r *Runtime) StreamWaitEvent(stream, event uintptr) error {
	return r.do("cuStreamWaitEvent", r.drv.sym.StreamWaitEvent, stream, event, 0)
}

// RecordEvent is [Stream.Record] on native handles.
func (r *Runtime) RecordEvent(event, stream uintptr) error {
	return r.do("cuEventRecord", r.drv.sym.EventRecord, event, stream)
}

// Done reports whether all work of the stream is finished.
func (s *Stream) Done() (bool, error) {
	return s.rt.query("cuStreamQuery", s.rt.drv.sym.StreamQuery, s.handle)
}

// Synchronize waits until all work of the stream is finished, or ctx is. A
// context that can end is watched by polling, which gives the thread back
// between looks.
func (s *Stream) Synchronize(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if ctx.Done() == nil {
		return s.rt.do("cuStreamSynchronize", s.rt.drv.sym.StreamSynchronize, s.handle)
	}
	return poll.Until(ctx, s.Done)
}

// Close destroys the stream; work already submitted is finished by the driver.
func (s *Stream) Close() error {
	if !s.owned || s.handle == 0 {
		return nil
	}
	err := s.rt.do("cuStreamDestroy", s.rt.drv.sym.StreamDestroy, s.handle)
	s.handle = 0
	return err
}

// query makes a call that answers "done" or "not ready".
func (r *Runtime) query(call string, fn dl.Func, handle uintptr) (bool, error) {
	if err := r.usable(); err != nil {
		return false, err
	}
	previous, err := r.enter()
	if err != nil {
		return false, err
	}
	status := Status(fn.Call(handle))
	r.leave(previous)
	switch status {
	case statusSuccess:
		return true, nil
	case statusNotReady:
		return false, nil
	}
	return false, r.fail(call, status)
}

// eventDisableTiming is CU_EVENT_DISABLE_TIMING.
const eventDisableTiming = 2

// Event is a point in a stream's work.
type Event struct {
	rt     *Runtime
	handle uintptr
}

// NewEvent creates an event for ordering only, the cheapest kind.
func (r *Runtime) NewEvent() (*Event, error) { return r.newEvent(eventDisableTiming) }

// NewTimingEvent creates an event that [Event.Since] can measure with.
func (r *Runtime) NewTimingEvent() (*Event, error) { return r.newEvent(0) }

func (r *Runtime) newEvent(flags uintptr) (*Event, error) {
	h, err := r.get("cuEventCreate", r.drv.sym.EventCreate, flags)
	if err != nil {
		return nil, err
	}
	return &Event{rt: r, handle: h}, nil
}

// WrapEvent makes an Event of a native CUevent.
func (r *Runtime) WrapEvent(handle uintptr) *Event { return &Event{rt: r, handle: handle} }

// Handle returns the native CUevent.
func (e *Event) Handle() uintptr { return e.handle }

// Done reports whether the work before the last record is finished.
func (e *Event) Done() (bool, error) {
	return e.rt.query("cuEventQuery", e.rt.drv.sym.EventQuery, e.handle)
}

// Synchronize waits until Done, or until ctx is.
func (e *Event) Synchronize(ctx context.Context) error {
	if ctx.Done() == nil {
		return e.rt.do("cuEventSynchronize", e.rt.drv.sym.EventSynchronize, e.handle)
	}
	return poll.Until(ctx, e.Done)
}

// Since returns the device time between two recorded and finished timing
// events, with a resolution of about half a microsecond.
func (e *Event) Since(start *Event) (time.Duration, error) {
	bits, err := e.rt.get("cuEventElapsedTime", e.rt.drv.sym.EventElapsedTime, start.handle, e.handle)
	if err != nil {
		return 0, err
	}
	return milliseconds(uint32(bits)), nil
}

// Close destroys the event.
func (e *Event) Close() error {
	if e.handle == 0 {
		return nil
	}
	err := e.rt.do("cuEventDestroy", e.rt.drv.sym.EventDestroy, e.handle)
	e.handle = 0
	return err
}
