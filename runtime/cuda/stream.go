package cuda

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/runtime"
)

// streamNonBlocking is CU_STREAM_NON_BLOCKING: no implicit synchronization with the legacy default stream.
const streamNonBlocking = 1

// Handles of streams that every context has.
const (
	streamLegacy    = 1 // CU_STREAM_LEGACY, equivalent to handle 0
	streamPerThread = 2 // CU_STREAM_PER_THREAD
)

// Stream is an ordered queue of work on a device.
type Stream struct {
	object
	// For WaitFor: the last event on this stream.
	mark struct {
		sync.Mutex
		event *Event // nil before the first; guarded by the mutex
	}
}

func newStream(r *Runtime, handle uintptr, kept bool) *Stream {
	return &Stream{object: object{
		rt:     r,
		handle: handle,
		kept:   kept,
	}}
}

// NewStream creates a stream. Priority 0 is normal; lower numbers have higher priority, down to the device's limit
// (see StreamPriorities).
func (r *Runtime) NewStream(priority int) (*Stream, error) {
	return r.newStream(priority, false)
}

func (r *Runtime) newStream(priority int, kept bool) (*Stream, error) {
	destroy := destructor{fn: r.drv.sym.StreamDestroy}
	h, err := r.create(r.drv.sym.StreamCreate, destroy, streamNonBlocking, uintptr(priority))
	if err != nil {
		return nil, err
	}
	return newStream(r, h, kept), nil
}

// WrapStream makes a Stream of a native CUstream that other code owns, such as a framework; its Close does nothing. It
// must be one that CheckStream accepts. The handle 0 means the legacy default stream, as everywhere in CUDA.
func (r *Runtime) WrapStream(handle uintptr) *Stream {
	if handle == 0 {
		handle = streamLegacy // equivalent, and distinct from "no stream"
	}
	return newStream(r, handle, true)
}

// CheckStream returns an error unless an open stream belongs to the runtime's context: a stream of another context is
// [runtime.ErrDevice]. The per-thread default stream is [runtime.ErrArgument], because a goroutine has no thread.
func (r *Runtime) CheckStream(handle uintptr) error {
	if handle == streamPerThread {
		return r.argument("the per-thread default stream is another one on every thread")
	}
	out := r.drv.out()
	defer r.drv.release(out)
	if err := r.manage(r.drv.sym.StreamGetCtx, handle, out.addr(0)); err != nil {
		return err
	}
	if ctx := uintptr(out[0]); ctx != r.ctx {
		return fmt.Errorf("cuda:%d: %w: stream %#x belongs to context %#x, not to %#x, the runtime's: "+
			"the device's primary context, unless it was opened with another",
			r.index, runtime.ErrDevice, handle, ctx, r.ctx)
	}
	return nil
}

// StreamPriorities returns the lowest and the highest priority of streams; the highest is the lowest number.
func (r *Runtime) StreamPriorities() (lowest, greatest int, err error) {
	out := r.drv.out()
	defer r.drv.release(out)
	if err := r.manage(r.drv.sym.CtxPriorityRange, out.addr(0), out.addr(1)); err != nil {
		return 0, 0, err
	}
	return int(int32(out[0])), int(int32(out[1])), nil
}

// Handle returns the native CUstream.
func (s *Stream) Handle() uintptr { return s.handle }

// Wait makes later work of the stream wait for the event, which may belong to another GPU.
func (s *Stream) Wait(e *Event) error {
	stream, err := s.use("stream")
	if err != nil {
		return err
	}
	event, err := e.use("event")
	if err != nil {
		return err
	}
	return s.rt.StreamWaitEvent(stream, event)
}

// WaitFor makes later work of the stream wait for everything submitted to source so far. The streams may belong to
// different GPUs.
func (s *Stream) WaitFor(source *Stream) error {
	if _, err := s.use("stream"); err != nil {
		return err
	}
	// A wait refers to the latest record before it, so one event serves all waits if no other record comes between.
	source.mark.Lock()
	defer source.mark.Unlock()
	if source.mark.event == nil {
		e, err := source.rt.NewEvent()
		if err != nil {
			return err
		}
		source.mark.event = e
	}
	if err := source.Record(source.mark.event); err != nil {
		return err
	}
	return s.Wait(source.mark.event)
}

// Record records the event after everything submitted to the stream so far.
func (s *Stream) Record(e *Event) error {
	stream, err := s.use("stream")
	if err != nil {
		return err
	}
	event, err := e.use("event")
	if err != nil {
		return err
	}
	return s.rt.RecordEvent(event, stream)
}

// StreamWaitEvent is [Stream.Wait] on native handles.
func (r *Runtime) StreamWaitEvent(stream, event uintptr) error {
	return r.do(r.drv.sym.StreamWaitEvent, stream, event, 0)
}

// RecordEvent is [Stream.Record] on native handles.
func (r *Runtime) RecordEvent(event, stream uintptr) error {
	return r.do(r.drv.sym.EventRecord, event, stream)
}

// Done reports whether all work of the stream is complete.
func (s *Stream) Done() (bool, error) {
	stream, err := s.use("stream")
	if err != nil {
		return false, err
	}
	done, err := s.rt.query(s.rt.drv.sym.StreamQuery, stream)
	if done {
		s.rt.sweepCopies()
	}
	return done, err
}

// Capturing reports whether work submitted to the stream becomes part of a graph. It may be called at any time.
func (s *Stream) Capturing() (bool, error) {
	stream, err := s.use("stream")
	if err != nil {
		return false, err
	}
	out := s.rt.drv.out()
	defer s.rt.drv.release(out)
	err = s.rt.do(s.rt.drv.sym.StreamIsCapturing, stream, out.addr(0))
	return uint32(out[0]) != 0, err
}

// Idle reports whether all work of the stream is complete. It may be called at any time, and is false while a runtime
// of the context captures ([Stream.Capture]). A program must not begin to capture this stream by other means during
// the call, which would end the capture.
func (s *Stream) Idle() bool {
	captures := &s.rt.order.captures
	if !captures.TryLock() {
		return false
	}
	defer captures.Unlock()
	if capturing, err := s.Capturing(); err != nil || capturing {
		return false
	}
	done, err := s.Done()
	return err == nil && done
}

// Synchronize waits until all work of the stream is complete, or until ctx ends. With a context that can end, it
// polls, and yields the thread between polls.
func (s *Stream) Synchronize(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if ctx.Done() != nil {
		return poll.Until(ctx, s.Done)
	}
	stream, err := s.use("stream")
	if err != nil {
		return err
	}
	_, err = s.rt.query(s.rt.drv.sym.StreamSynchronize, stream)
	s.rt.sweepCopies()
	return err
}

// Close destroys the stream. The driver finishes submitted work, for which the runtime's Close waits. A stream whose
// work cannot be tracked is not destroyed, nor are wrapped streams and those that the runtime itself uses. Closing
// twice, or after the runtime, which destroys its streams, does nothing.
func (s *Stream) Close() error {
	s.mark.Lock()
	defer s.mark.Unlock()
	if !s.kept {
		if done, err := s.Done(); err == nil && !done {
			if err := s.rt.copyAsync(s, nil, func() error { return nil }); err != nil {
				return err
			}
		}
	}
	if s.mark.event != nil {
		_ = s.mark.event.Close() // fails if the stream's does
		s.mark.event = nil
	}
	return s.close()
}

// query makes a call that answers "done" or "not ready", or that waits.
func (r *Runtime) query(fn dl.Func, handle uintptr) (bool, error) {
	previous, err := r.enter()
	if err != nil {
		return false, err
	}
	status := r.drv.manage(fn, handle)
	r.leave(previous)
	switch status {
	case statusSuccess:
		return true, nil
	case statusNotReady:
		return false, nil
	}
	return false, r.fail(fn, status)
}

// eventDisableTiming is CU_EVENT_DISABLE_TIMING.
const eventDisableTiming = 2

// Event is a point in a stream's work.
type Event struct{ object }

// NewEvent creates an event for ordering only, the cheapest kind.
func (r *Runtime) NewEvent() (*Event, error) {
	return r.newEvent(eventDisableTiming)
}

// NewTimingEvent creates an event for measurements by [Event.Since].
func (r *Runtime) NewTimingEvent() (*Event, error) {
	return r.newEvent(0)
}

func (r *Runtime) newEvent(flags uintptr) (*Event, error) {
	h, err := r.create(r.drv.sym.EventCreate, destructor{fn: r.drv.sym.EventDestroy}, flags)
	if err != nil {
		return nil, err
	}
	return r.WrapEvent(h), nil
}

// WrapEvent makes an Event of a native CUevent. Its Close destroys the event only if this runtime made it.
func (r *Runtime) WrapEvent(handle uintptr) *Event {
	return &Event{object{rt: r, handle: handle}}
}

// Handle returns the native CUevent.
func (e *Event) Handle() uintptr { return e.handle }

// Done reports whether the work before the last record is complete.
func (e *Event) Done() (bool, error) {
	event, err := e.use("event")
	if err != nil {
		return false, err
	}
	done, err := e.rt.query(e.rt.drv.sym.EventQuery, event)
	if done {
		e.rt.sweepCopies()
	}
	return done, err
}

// Synchronize waits until Done, or until ctx ends.
func (e *Event) Synchronize(ctx context.Context) error {
	if ctx.Done() != nil {
		return poll.Until(ctx, e.Done)
	}
	event, err := e.use("event")
	if err != nil {
		return err
	}
	_, err = e.rt.query(e.rt.drv.sym.EventSynchronize, event)
	e.rt.sweepCopies()
	return err
}

// Since returns the device time between two recorded and completed timing events, with a resolution of about half a
// microsecond.
func (e *Event) Since(start *Event) (time.Duration, error) {
	from, err := start.use("event")
	if err != nil {
		return 0, err
	}
	to, err := e.use("event")
	if err != nil {
		return 0, err
	}
	bits, err := e.rt.get(e.rt.drv.sym.EventElapsedTime, from, to)
	if err != nil {
		return 0, err
	}
	return milliseconds(uint32(bits)), nil
}

// Close destroys the event, if its runtime made it. Closing twice, or after the runtime, which destroys its events,
// does nothing.
func (e *Event) Close() error {
	return e.close()
}
