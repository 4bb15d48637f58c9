package cuda

import (
	"slices"
	"sync"
	"sync/atomic"
)

// A copy that is submitted but not done uses an address that the garbage
// collector does not see. Memory of AllocatePinned lives until the program gives
// it back; any other, which may be of the Go heap, is referred to here until an
// event behind the copy says that it is done. (The heap does not move things.)

// keptCopy is a copy that may be pending, or, without memory, what a stream that was
// closed had to do.
type keptCopy struct {
	done *Event // recorded behind it
	host []byte // the memory that it reads; nil without any
}

// keptCopies are the kept copies of a runtime.
type keptCopies struct {
	mu     sync.Mutex  // before owned.mu
	exist  atomic.Bool // whether list has any
	list   []keptCopy  // guarded by mu
	spare  []*Event    // guarded by mu
	calls  int         // copies that are being submitted; guarded by mu
	enough int         // copies in list that have the next one sweep it; guarded by mu
}

// fewCopies is how many are not worth a look.
const fewCopies = 16

// pendingCopies has the runtimes that keep memory, so that they live as long as
// their copies: also one that was dropped, or whose Close timed out. And it has the
// copies of which nothing tells when they are done.
var pendingCopies sync.Map

// copyAsync submits a copy between memory of the host and the device to a
// stream, and keeps the former alive until it is done.
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

	// The driver may return when the copy is done, for which it may take others.
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

// submitCopy submits a copy and records the event behind it, or a new one if it is nil. It
// returns the event, also with an error, unless there is none.
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
		pendingCopies.Store(&keptCopy{host: host}, nil) // nothing will tell when the copy is done
		return done, err
	}
	return done, nil
}

// sweepCopies lets the memory of finished copies go.
func (r *Runtime) sweepCopies() {
	if r.copies.exist.Load() {
		r.copies.mu.Lock()
		defer r.copies.mu.Unlock()
		r.sweepLocked()
	}
}

// sweepLocked is sweepCopies, called with the lock held. Nothing runs any more
// on a broken device; of a closed one nothing is known.
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

// dropCopies is called when no copy is pending, with the lock held.
func (r *Runtime) dropCopies() {
	r.copies.list = nil
	r.copies.exist.Store(false)
	pendingCopies.Delete(r)
}
