package nccl

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
)

// submissions are the calls of a communicator. The zero value has none.
type submissions struct {
	ledger   backend.Ledger // the user's calls
	all      atomic.Uint64  // collectives, the communicator's own among them
	seen     atomic.Uint64  // of these, done as far as waits have seen
	trailing atomic.Bool    // messages were submitted that no collective comes after in the stream

	mu      sync.Mutex // guards splits and aborted
	splits  []uint64   // collectives before each Split in flight, which is not in the stream; guarded by mu
	aborted error      // the cause, nil before; guarded by mu
}

// extent is how far submissions go: the user's, and all collectives.
type extent struct {
	backend.Extent
	all uint64 // collectives, the communicator's own among them
}

// add notes a call of the user. Comm.mu is held.
func (s *submissions) add(x *comm.Call) {
	s.ledger.Begin(x)
	if x.Op.Message() {
		s.trailing.Store(true)
	} else {
		s.addOwn()
	}
}

// addOwn notes a collective. Comm.mu is held.
func (s *submissions) addOwn() {
	s.all.Add(1)
	if s.trailing.Load() {
		s.trailing.Store(false)
	}
}

// addTogether notes calls of the user that are one kernel, in no order. Comm.mu is held.
func (s *submissions) addTogether(calls []comm.Call) {
	messages := false
	for i := range calls {
		s.add(&calls[i])
		messages = messages || calls[i].Op.Message()
	}
	s.trailing.Store(messages)
}

// addSplit notes a Split, which endSplit ends with the number that it returns. It says nothing
// of the stream.
func (s *submissions) addSplit() (before uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before = s.ledger.Begun().Collectives
	s.ledger.Begin(&comm.Call{Op: comm.OpSplit})
	s.all.Add(1)
	s.splits = append(s.splits, before)
	return before
}

func (s *submissions) endSplit(before uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.splits, before)
	s.splits = slices.Delete(s.splits, i, i+1)
}

// inFlight is how many calls may be in flight, the communicator's own among them.
func (s *submissions) inFlight() uint64 {
	p := s.ledger.Progress()
	user := p.Collectives.Submitted - p.Collectives.Done + p.Messages.Submitted - p.Messages.Done
	return max(user, s.all.Load()-s.seen.Load())
}

// begin starts a wait. It returns the calls that it waits for, and how many collectives
// another rank has completed when it has done its part of these. For messages behind the last
// collective, a further one shows that.
func (s *submissions) begin() (wait extent, collectives uint64) {
	wait.Extent = s.ledger.Begun() // first: more collectives do no harm
	wait.all = s.all.Load()
	collectives = wait.all
	if s.trailing.Load() {
		if p := s.ledger.Progress().Messages; p.Submitted > p.Done {
			collectives++
		}
	}
	return wait, collectives
}

// end ends a wait that has seen calls done.
func (s *submissions) end(done extent) {
	s.ledger.Done(done.Extent)
	for seen := s.seen.Load(); seen < done.all && !s.seen.CompareAndSwap(seen, done.all); {
		seen = s.seen.Load()
	}
}

// last returns what is done when the last call of a wait is, which says nothing of those before
// it.
func (s *submissions) last(wait extent) extent {
	p := s.ledger.Progress()
	if wait.Collectives+wait.Messages == p.Collectives.Done+p.Messages.Done+1 {
		return wait
	}
	return extent{}
}

// soFar returns what is done when the stream is: what the user has submitted before any
// Split in flight.
func (s *submissions) soFar() backend.Extent {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.ledger.Begun()
	for _, before := range s.splits {
		e.Collectives = min(e.Collectives, before)
	}
	return e
}

// status says what the rank is doing, for the others.
func (s *submissions) status() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := s.ledger.Last()
	switch {
	case s.aborted != nil:
		return fmt.Sprintf("aborted: %v", s.aborted)
	case last == "":
		return "no call yet"
	case s.ledger.Idle():
		return "idle after " + last
	}
	return "in flight: " + s.ledger.InFlight().String()
}

// abort notes why the communicator aborts.
func (s *submissions) abort(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.aborted = cause
}

// cause returns why the communicator aborts, nil if it does not.
func (s *submissions) cause() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.aborted
}
