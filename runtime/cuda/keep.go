package cuda

import (
	"slices"
	"sync"
	"sync/atomic"
)

// A copy in flight uses an address that the garbage collector does not see. Memory of AllocatePinned lives until the
// program frees it. Other memory, which may be on the Go heap, is referenced here until an event after the copy shows
// that the copy is complete. (The garbage collector does not move heap objects.)

// keptCopy is a copy that may be in flight or, without memory, the remaining work of a closed stream.
type keptCopy struct {
	done *Event // recorded after the copy
	host []byte // memory that the copy reads; nil if there is none
}

// keptCopies are the kept copies of a runtime.
type keptCopies struct {
	mu     sync.Mutex  // acquired before owned.mu
	exist  atomic.Bool // list is not empty
	list   []keptCopy  // guarded by mu
	spare  []*Event    // guarded by mu
	calls  int         // copies being submitted; guarded by mu
	enough int         // length of list at which the next copy sweeps it; guarded by mu
}

// fewCopies is the number of copies below which a sweep is not worthwhile.
const fewCopies = 16

// pendingCopies keeps runtimes with kept memory alive until their copies are complete, also runtimes that were dropped
// or whose Close timed out. It also holds copies whose completion cannot be observed.
var pendingCopies sync.Map

// copyAsync submits a copy between host and device memory to a stream, and keeps the host memory alive until the copy
// is complete.
func (r *Runtime) copyAsync(s *Stream, host []byte, submit func() error) error {
	switch captured, err := s.Capturing(); {
	case err != nil:
		return err
	case captured:
		return r.argument("a captured copy, which may run again at any time, takes host memory of AllocatePinned only")
	}
	k := &r.copies
	k.mu.Lock()
	if len(k.list) >= max(k.enough, fewCopies) {
		r.sweepLocked()
		k.enough = 2 * len(k.list)
	}
	var done *Event
	if n := len(k.spare); n > 0 {
		done = k.spare[n-1]
		k.spare = k.spare[:n-1]
	}
	k.calls++
	k.mu.Unlock()

	// The driver may block until the copy is complete, which may need other copies; so no lock is held.
	done, err := r.submitCopy(s, host, done, submit)

	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls--
	if err != nil {
		if done != nil {
			k.spare = append(k.spare, done)
		}
		return err
	}
	k.list = append(k.list, keptCopy{done, host})
	k.exist.Store(true)
	pendingCopies.Store(r, nil)
	return nil
}

// submitCopy submits a copy and records the event after it, or a new event if it is nil. It returns the event also
// with an error, unless there is none.
func (r *Runtime) submitCopy(s *Stream, host []byte, done *Event, submit func() error) (*Event, error) {
	if done == nil {
		var err error
		done, err = r.NewEvent()
		if err != nil {
			return nil, err
		}
	}
	if err := submit(); err != nil {
		return done, err
	}
	if err := s.Record(done); err != nil {
		pendingCopies.Store(&keptCopy{host: host}, nil) // the completion of this copy cannot be observed
		return done, err
	}
	return done, nil
}

// sweepCopies releases the memory of completed copies.
func (r *Runtime) sweepCopies() {
	if r.copies.exist.Load() {
		r.copies.mu.Lock()
		defer r.copies.mu.Unlock()
		r.sweepLocked()
	}
}

// sweepLocked is sweepCopies for callers that hold the lock. Nothing runs on a broken device, and nothing is known of
// a closed one.
func (r *Runtime) sweepLocked() {
	k := &r.copies
	k.list = slices.DeleteFunc(k.list, func(c keptCopy) bool {
		done, err := r.query(r.drv.sym.EventQuery, c.done.handle)
		if !done && (err == nil || r.sound() == nil) {
			return false
		}
		k.spare = append(k.spare, c.done)
		return true
	})
	if len(k.list) == 0 {
		r.dropCopies()
	}
}

// dropCopies is called with the lock held when no copy is in flight.
func (r *Runtime) dropCopies() {
	r.copies.list = nil
	r.copies.exist.Store(false)
	pendingCopies.Delete(r)
}
