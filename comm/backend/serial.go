package backend

import (
	"context"
	"sync"

	"github.com/tutti-go/tutti/comm"
)

// Worker is the simplest backend: one rank that does one operation at a time, from beginning to end. [NewSerial]
// makes a communicator from it. An error aborts the communicator.
type Worker interface {
	// Work does one call, or the calls of a Group, which may mix collectives and messages, also messages to its own
	// rank. It starts all of them before it waits for one. Messages of equal peer and tag match in the order of calls.
	// Arguments were checked, and calls with their lists are valid until Work returns. Work and Collective never run
	// at once.
	Work(calls []comm.Call) error
	// Collective does a Barrier or a Split, when what was submitted before is done. A Split
	// alone has a result: another communicator, which outlives this one, or nil for a
	// negative color. If the caller's context ends, NewSerial calls Leave.
	Collective(w comm.Wait) (comm.Communicator, error)
	// Leave is the last call, made once. It tells the peers that this rank leaves: their calls that this rank has not
	// completed fail with [comm.ErrPeerFailed], even if all its data has arrived, and those that it has completed
	// still complete. A goodbye with the number of completed collectives tells the two apart.
	//
	// If cause is not nil, the rank aborts because of it. A Work or Collective may be in progress then; it returns
	// promptly, and so does a later one. Their results are ignored. No method of the communicator returns an error for
	// that reason before both have returned. The end of ctx bounds what Leave waits for.
	Leave(ctx context.Context, cause error)
}

// serial is the [Backend] of a [Worker].
type serial struct {
	life   Life      // lifecycle of the communicator
	ledger Ledger    // numbers the calls
	worker Worker    // runs the calls
	leave  sync.Once // makes the worker leave once

	mu   sync.Mutex    // guards last, and keeps submissions in order
	last chan struct{} // closed when the latest submission is complete
}

// NewSerial returns the communicator of the rank that w implements. Submissions run one after the other, each on a
// new goroutine: this is simple, not fast. A wait whose context ends names the calls in flight, but not the ranks
// that are missing.
func NewSerial(check *Check, w Worker) *Base {
	s := &serial{worker: w, last: make(chan struct{})}
	close(s.last)
	return New(check, &s.life, s)
}

// Submit implements [Backend].
func (s *serial) Submit(c comm.Call) error {
	return s.SubmitTogether([]comm.Call{c})
}

// SubmitTogether implements [Backend].
func (s *serial) SubmitTogether(calls []comm.Call) error {
	clones := make([]comm.Call, len(calls))
	for i := range calls {
		clones[i] = Clone(calls[i])
	}
	_, err := s.submit(clones, func() error { return s.worker.Work(clones) })
	return err
}

// submit runs work after everything submitted before.
func (s *serial) submit(calls []comm.Call, work func() error) (done <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.life.Err(); err != nil {
		return nil, err
	}
	for i := range calls {
		s.ledger.Begin(&calls[i])
	}
	begun := s.ledger.Begun()
	previous := s.last
	ended := make(chan struct{})
	s.last = ended
	go func() {
		defer close(ended)
		<-previous
		if s.life.Cause() != nil {
			return
		}
		if err := work(); err != nil {
			s.fail(err)
			return
		}
		s.ledger.Done(begun)
	}()
	return ended, nil
}

// fail aborts the communicator.
func (s *serial) fail(err error) (first bool) {
	first = s.life.Fail(err)
	ctx, cancel := context.WithTimeout(context.Background(), HostTimeout)
	defer cancel()
	s.leave.Do(func() { s.worker.Leave(ctx, err) })
	return first
}

// Wait implements [Backend].
func (s *serial) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	s.mu.Lock()
	var done <-chan struct{} = s.last
	s.mu.Unlock()
	var child comm.Communicator
	if w.Op != comm.OpSync {
		var err error
		done, err = s.submit([]comm.Call{{Op: w.Op}}, func() (err error) {
			child, err = s.worker.Collective(w)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	select {
	case <-done:
	case <-ctx.Done():
		select {
		case <-done: // nothing was in flight
		default:
			err := s.ledger.InFlight().Error(ctx)
			first := s.fail(err)
			<-done
			if first {
				return child, err
			}
		}
	}
	if err := s.life.Broken(); err != nil && !s.ledger.Idle() {
		return child, err
	}
	return child, nil
}

// Abort implements [Backend].
func (s *serial) Abort(ctx context.Context, cause error) {
	s.fail(cause)
	s.ended(ctx)
}

// ended waits for all submissions.
func (s *serial) ended(ctx context.Context) {
	s.mu.Lock()
	last := s.last
	s.mu.Unlock()
	select {
	case <-last:
	case <-ctx.Done():
	}
}

// Release implements [Backend].
func (s *serial) Release(ctx context.Context) error {
	s.ended(ctx)
	s.leave.Do(func() { s.worker.Leave(ctx, nil) })
	return nil
}
