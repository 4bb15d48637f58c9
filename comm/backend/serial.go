package backend

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// Worker is the simplest backend: one rank, which does one thing after the other,
// each from beginning to end. [NewSerial] makes a communicator of it. An error
// breaks the communicator.
type Worker interface {
	// Work does the calls of a group, whose arguments were checked. They may wait
	// for each other: messages are not ordered among the calls of a group.
	Work(calls []comm.Call) error
	// Meet does a Barrier or a Split, which alone has a result. What was submitted
	// before is done.
	Meet(w comm.Wait) (comm.Communicator, error)
	// Leave is called once, as the last: ranks that need this one get
	// [comm.ErrPeerFailed]. If cause is not nil, the rank gives up because of it, and
	// what it is in ends soon, with an error; so does a Work or Meet that begins after
	// that. Then nobody touches its buffers any more.
	Leave(cause error)
}

// Serial is a communicator of a [Worker].
type Serial struct {
	Calls
	check  Check
	worker Worker
	leave  sync.Once

	mu       sync.Mutex
	last     chan struct{} // closed when what was submitted last is done
	children []comm.Communicator
	closed   bool
	broken   error
}

// NewSerial returns a communicator whose rank w is. What is submitted is done in
// that order, each submission on a goroutine of its own: this is simple, not fast.
// The communicator is an [comm.Ender].
func NewSerial(check Check, w Worker) *Serial {
	s := &Serial{check: check, worker: w, last: make(chan struct{})}
	close(s.last)
	s.Calls = NewCalls(&s.check, s)
	return s
}

// Usable implements [Backend].
func (s *Serial) Usable() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.usable()
}

func (s *Serial) usable() error { return Unusable(s.closed, s.broken) }

// cause returns what broke the communicator.
func (s *Serial) cause() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.broken
}

// fail breaks the communicator; the first cause stays.
func (s *Serial) fail(err error) {
	s.mu.Lock()
	s.broken = cmp.Or(s.broken, err)
	s.mu.Unlock()
	s.leave.Do(func() { s.worker.Leave(err) })
}

// Submit implements [Backend].
func (s *Serial) Submit(c comm.Call) error { return s.SubmitTogether([]comm.Call{c}) }

// SubmitTogether implements [Backend].
func (s *Serial) SubmitTogether(calls []comm.Call) error {
	own := make([]comm.Call, len(calls))
	for i := range calls {
		own[i] = Clone(calls[i])
	}
	_, err := s.submit(func() error { return s.worker.Work(own) })
	return err
}

// submit has work done after what was submitted before; nil is nothing to do.
func (s *Serial) submit(work func() error) (done <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil {
		return nil, err
	}
	if work == nil {
		return s.last, nil
	}
	before, ended := s.last, make(chan struct{})
	s.last = ended
	go func() {
		defer close(ended)
		<-before
		if s.cause() == nil {
			if err := work(); err != nil {
				s.fail(err)
			}
		}
	}()
	return ended, nil
}

// Wait implements [Backend].
func (s *Serial) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	var child comm.Communicator
	var meet func() error
	if w.Op != comm.OpSync {
		meet = func() (err error) {
			child, err = s.worker.Meet(w)
			return err
		}
	}
	done, err := s.submit(meet)
	if err != nil {
		return nil, err
	}
	select {
	case <-done:
	case <-ctx.Done():
		select {
		case <-done: // there was nothing to wait for
		default:
			s.fail(comm.ContextError(ctx))
			<-done
		}
	}
	if err := s.cause(); err != nil {
		if child != nil {
			_ = comm.CloseAll(child, err) // its other ranks have theirs
		}
		return nil, err
	}
	if child != nil {
		s.mu.Lock()
		closed := func(c comm.Communicator) bool { return errors.Is(c.Group(), comm.ErrClosed) }
		s.children = append(slices.DeleteFunc(s.children, closed), child)
		s.mu.Unlock()
	}
	return child, nil
}

// serialPatience is how long Close waits for what is under way.
const serialPatience = 5 * time.Second

// Close implements [comm.Communicator].
func (s *Serial) Close() error {
	s.mu.Lock()
	closed, last := s.closed, s.last
	s.closed = true
	s.mu.Unlock()
	if closed {
		return nil
	}
	select {
	case <-last:
	case <-time.After(serialPatience):
		slog.Warn("communicator closed with operations under way", "backend", s.check.Backend, "rank", s.Rank())
		s.fail(comm.ErrClosed)
		<-last
	}
	s.leave.Do(func() { s.worker.Leave(nil) })
	return nil
}

// End implements [comm.Ender].
func (s *Serial) End(cause error) error {
	s.mu.Lock()
	children := s.children
	s.mu.Unlock()
	var errs []error
	for _, c := range children {
		errs = append(errs, comm.CloseAll(c, cause))
	}
	if cause != nil {
		s.mu.Lock()
		s.broken = cmp.Or(s.broken, unusable(false, cause)) // to who waits here
		s.mu.Unlock()
		s.fail(cause)
	}
	return errors.Join(append(errs, s.Close())...)
}
