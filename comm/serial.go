package comm

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// Worker is the simplest backend: one rank, which does one thing after the other,
// each from beginning to end. [NewSerial] makes a communicator of it. An error
// breaks the communicator.
type Worker interface {
	// Work does the calls of a group, whose arguments were checked. They may wait
	// for each other: messages are not ordered among the calls of a group.
	Work(calls []Call) error
	// Meet does a Barrier or a Split, which alone has a result. What was submitted
	// before is done.
	Meet(w Wait) (Communicator, error)
	// Leave is called once, as the last: ranks that need this one get
	// [ErrPeerFailed]. If cause is not nil, the rank gives up because of it, and
	// what it is in ends soon, with an error; so does a Work or Meet that begins after
	// that. Then nobody touches its buffers any more.
	Leave(cause error)
}

// serial is a communicator of a [Worker].
type serial struct {
	Calls
	check  Check
	worker Worker
	leave  sync.Once

	mu       sync.Mutex
	last     chan struct{} // closed when what was submitted last is done
	children []Communicator
	closed   bool
	broken   error
}

// NewSerial returns a communicator whose rank w is. What is submitted is done in
// that order, each submission on a goroutine of its own: this is simple, not fast.
// The communicator is an [Ender].
func NewSerial(check Check, w Worker) Communicator {
	s := &serial{check: check, worker: w, last: make(chan struct{})}
	close(s.last)
	s.Calls = NewCalls(&s.check, s)
	return s
}

// Usable implements [Backend].
func (s *serial) Usable() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.usable()
}

func (s *serial) usable() error { return Unusable(s.closed, s.broken) }

// cause returns what broke the communicator.
func (s *serial) cause() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.broken
}

// fail breaks the communicator; the first cause stays.
func (s *serial) fail(err error) {
	s.mu.Lock()
	s.broken = cmp.Or(s.broken, err)
	s.mu.Unlock()
	s.leave.Do(func() { s.worker.Leave(err) })
}

// Submit implements [Backend].
func (s *serial) Submit(c Call) error { return s.SubmitTogether([]Call{c}) }

// SubmitTogether implements [Backend].
func (s *serial) SubmitTogether(calls []Call) error {
	own := make([]Call, len(calls))
	for i := range calls {
		own[i] = calls[i].Clone()
	}
	_, err := s.submit(func() error { return s.worker.Work(own) })
	return err
}

// submit has work done after what was submitted before; nil is nothing to do.
func (s *serial) submit(work func() error) (done <-chan struct{}, err error) {
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
func (s *serial) Wait(ctx context.Context, w Wait) (Communicator, error) {
	var child Communicator
	var meet func() error
	if w.Op != OpSync {
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
			s.fail(ContextError(ctx))
			<-done
		}
	}
	if err := s.cause(); err != nil {
		if child != nil {
			_ = end(child, err) // its other ranks have theirs
		}
		return nil, err
	}
	if child != nil {
		s.mu.Lock()
		closed := func(c Communicator) bool { return errors.Is(c.Group(), ErrClosed) }
		s.children = append(slices.DeleteFunc(s.children, closed), child)
		s.mu.Unlock()
	}
	return child, nil
}

// serialPatience is how long Close waits for what is under way.
const serialPatience = 5 * time.Second

// Close implements [Communicator].
func (s *serial) Close() error {
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
		s.fail(ErrClosed)
		<-last
	}
	s.leave.Do(func() { s.worker.Leave(nil) })
	return nil
}

// End implements [Ender].
func (s *serial) End(cause error) error {
	s.mu.Lock()
	children := s.children
	s.mu.Unlock()
	var errs []error
	for _, c := range children {
		errs = append(errs, end(c, cause))
	}
	if cause != nil {
		s.mu.Lock()
		s.broken = cmp.Or(s.broken, unusable(false, cause)) // to who waits here
		s.mu.Unlock()
		s.fail(cause)
	}
	return errors.Join(append(errs, s.Close())...)
}
