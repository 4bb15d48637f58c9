package backend

import (
	"context"
	"sync"

	"github.com/tutti-go/tutti/comm"
)

// Worker is the simplest backend: one rank, which does one thing after the other,
// each from beginning to end. [NewSerial] makes a communicator of it. An error
// aborts the communicator.
type Worker interface {
	// Work does the calls of a group, whose arguments were checked. They may wait
	// for each other: messages are not ordered among the calls of a group.
	Work(calls []comm.Call) error
	// Meet does a Barrier or a Split, which alone has a result. What was submitted
	// before is done.
	Meet(w comm.Wait) (comm.Communicator, error)
	// Leave is called once, as the last: ranks that need this one get
	// [comm.ErrPeerFailed]. If cause is not nil, the rank aborts because of it: a Work
	// or Meet in progress, and any later one, returns an error promptly. Then nobody
	// touches the rank's buffers any more.
	Leave(cause error)
}

// serial is the [Backend] of a [Worker].
type serial struct {
	check  Check
	life   Life
	ledger Ledger
	worker Worker
	leave  sync.Once

	mu   sync.Mutex
	last chan struct{} // closed when what was submitted last is done
}

// NewSerial returns a communicator whose rank w is. What is submitted is done in
// that order, each submission on a goroutine of its own: this is simple, not fast.
func NewSerial(check Check, w Worker) comm.Communicator {
	s := &serial{check: check, worker: w, last: make(chan struct{})}
	close(s.last)
	return New(&s.check, &s.life, s)
}

// Submit implements [Backend].
func (s *serial) Submit(c comm.Call) error { return s.SubmitTogether([]comm.Call{c}) }

// SubmitTogether implements [Backend].
func (s *serial) SubmitTogether(calls []comm.Call) error {
	own := make([]comm.Call, len(calls))
	for i := range calls {
		own[i] = Clone(calls[i])
	}
	_, err := s.submit(own, func() error { return s.worker.Work(own) })
	return err
}

// submit has work done after what was submitted before.
func (s *serial) submit(calls []comm.Call, work func() error) (done <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.life.Err(); err != nil {
		return nil, err
	}
	for i := range calls {
		s.ledger.Begin(&calls[i])
	}
	until := s.ledger.Begun()
	before, ended := s.last, make(chan struct{})
	s.last = ended
	go func() {
		defer close(ended)
		<-before
		if s.life.Cause() != nil {
			return
		}
		if err := work(); err != nil {
			s.fail(err)
			return
		}
		s.ledger.Done(until)
	}()
	return ended, nil
}

// fail aborts the communicator.
func (s *serial) fail(err error) (first bool) {
	first = s.life.Fail(err)
	s.leave.Do(func() { s.worker.Leave(err) })
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
			child, err = s.worker.Meet(w)
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
		case <-done: // there was nothing to wait for
		default:
			err := s.ledger.InFlight().Error(ctx)
			first := s.fail(err)
			<-done
			if first {
				return nil, err
			}
		}
	}
	if err := s.life.Broken(); err != nil && !s.ledger.Idle() {
		return nil, err
	}
	return child, nil
}

// Abort implements [Backend].
func (s *serial) Abort(_ context.Context, cause error) { s.fail(cause) }

// Release implements [Backend].
func (s *serial) Release(context.Context) error {
	s.mu.Lock()
	last := s.last
	s.mu.Unlock()
	<-last
	s.leave.Do(func() { s.worker.Leave(nil) })
	return nil
}
