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
	all      atomic.Uint64  // collectives, including the communicator's own
	seen     atomic.Uint64  // collectives that waits have seen complete, and none of a step in flight or after it
	trailing atomic.Bool    // messages were submitted after the last collective in the stream

	mu       sync.Mutex // guards the fields below
	splits   []uint64   // the user's collectives before each Split in flight, which is not in the stream; guarded by mu
	steps    []uint64   // numbers of the steps in flight among all collectives; guarded by mu
	complete uint64     // collectives that waits have seen complete, beside steps in flight; guarded by mu
	aborted  error      // the cause, nil before an abort; guarded by mu
}

// extent is a number of submissions: the user's calls, and all collectives.
type extent struct {
	backend.Extent
	all uint64 // collectives, including the communicator's own
}

// add records a call of the user. The caller holds Comm.mu.
func (s *submissions) add(x *comm.Call) {
	s.ledger.Begin(x)
	if x.Op.Message() {
		s.trailing.Store(true)
	} else {
		s.addOwn()
	}
}

// addOwn records a collective of the communicator's own. The caller holds Comm.mu.
func (s *submissions) addOwn() {
	s.all.Add(1)
	if s.trailing.Load() {
		s.trailing.Store(false)
	}
}

// addTogether records calls of the user that form one kernel, without an order. The caller holds Comm.mu.
func (s *submissions) addTogether(calls []comm.Call) {
	messages := false
	for i := range calls {
		s.add(&calls[i])
		messages = messages || calls[i].Op.Message()
	}
	s.trailing.Store(messages)
}

// addSplit records a Split of the user, which endSplit ends, and returns the calls up to it. It does not concern the
// stream.
func (s *submissions) addSplit() (through backend.Extent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	through = s.ledger.Begin(&comm.Call{Op: comm.OpSplit})
	s.splits = append(s.splits, through.Collectives-1)
	return through
}

// endSplit ends a Split. One that is done counts as complete if all calls before it do; otherwise a later wait shows
// that.
func (s *submissions) endSplit(through backend.Extent, done bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.splits, through.Collectives-1)
	s.splits = slices.Delete(s.splits, i, i+1)
	p := s.ledger.Progress()
	if done && through.Collectives+through.Messages == p.Collectives.Done+p.Messages.Done+1 {
		s.ledger.Done(through)
	}
}

// beginStep counts a step, which endStep ends, as a collective, and returns its number. A rank that aborts within a
// step has not seen it complete, nor what it has done since the step began.
func (s *submissions) beginStep() (number uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	number = s.all.Add(1)
	s.steps = append(s.steps, number)
	return number
}

// endStep ends a step.
func (s *submissions) endStep(number uint64, done bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.steps, number)
	s.steps = slices.Delete(s.steps, i, i+1)
	if done && s.complete == number-1 {
		s.complete = number
	}
	s.see()
}

// see sets seen. The caller holds mu.
func (s *submissions) see() {
	seen := s.complete
	for _, number := range s.steps {
		seen = min(seen, number-1)
	}
	s.seen.Store(seen)
}

// inFlight returns an upper bound of the calls in flight, including the communicator's own.
func (s *submissions) inFlight() uint64 {
	p := s.ledger.Progress()
	user := p.Collectives.Submitted - p.Collectives.Done + p.Messages.Submitted - p.Messages.Done
	return max(user, s.all.Load()-s.seen.Load())
}

// begin starts a wait. It returns the calls that the wait covers, and the number of collectives that another rank has
// completed once it has done its part of them. For messages after the last collective, one more collective shows that.
func (s *submissions) begin() (wait extent, collectives uint64) {
	wait.Extent = s.soFar() // read first: counting later collectives as well is harmless
	wait.all = s.all.Load()
	collectives = wait.all
	if s.trailing.Load() {
		if p := s.ledger.Progress().Messages; p.Submitted > p.Done {
			collectives++
		}
	}
	return wait, collectives
}

// end ends a wait that has seen calls complete.
func (s *submissions) end(done extent) {
	s.ledger.Done(done.Extent)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.complete = max(s.complete, done.all)
	s.see()
}

// soFar returns the submissions that are complete when the stream is idle: the user's calls before any Split in
// flight.
func (s *submissions) soFar() backend.Extent {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.ledger.Begun()
	for _, before := range s.splits {
		e.Collectives = min(e.Collectives, before)
	}
	return e
}

// status returns the rank's state, for the other ranks.
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

// abort records why the communicator aborts.
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
