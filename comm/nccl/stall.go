package nccl

import (
	"fmt"
	"sync"

	"github.com/tutti-go/tutti/comm"
)

// submissions are what a communicator has submitted, to tell what a wait that ended
// in vain was for. Calls run in order, so it is for one of those that no wait has
// seen done, and normally for the first.
type submissions struct {
	group      string // the communicator's name, the same on all its ranks
	rank, size int

	mu      sync.Mutex
	calls   uint64    // submitted so far
	settled uint64    // done, as far as waits have told
	waiters int       // goroutines that wait
	ended   string    // how it broke
	numbers [2]uint64 // how many of them are collectives, and messages
	recent  [remembered]submission
	told    string // what the other ranks were told last
}

// submission is a call without its addresses and lists, and its number among those of
// its kind.
type submission struct {
	comm.Call
	number uint64
}

// String describes the call as errors of other backends and `tutti diagnose` do.
func (s *submission) String() string {
	kind := "collective"
	if s.Op.Message() {
		kind = "message"
	}
	return fmt.Sprintf("%v (%s #%d)", s.Call, kind, s.number)
}

// remembered is how many calls a timeout can name.
const remembered = 64

// add records a call.
func (s *submissions) add(op comm.Op, x *comm.Call) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := &s.recent[s.calls%remembered]
	k.Op, k.DType, k.Reduce, k.Tag, k.Peer, k.Count = op, x.DType, x.Reduce, x.Tag, x.Peer, x.Count
	number := &s.numbers[0]
	if op.Message() {
		number = &s.numbers[1]
	}
	*number++
	k.number = *number
	s.calls++
}

// forget begins anew: what came before was not the user's.
func (s *submissions) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls, s.settled, s.numbers = 0, 0, [2]uint64{}
}

// waitsFor describes what has not been seen done.
func (s *submissions) waitsFor() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open()
}

// open is waitsFor with the lock held.
func (s *submissions) open() string {
	open := s.calls - s.settled
	if open == 0 {
		return "nothing"
	}
	first := s.settled
	text := ""
	if open > remembered {
		first = s.calls - remembered
		text = fmt.Sprintf("one of %d operations before, or ", first-s.settled)
	}
	text += s.recent[first%remembered].String()
	if behind := s.calls - first - 1; behind > 0 {
		text += fmt.Sprintf("; %d operations behind that", behind)
	}
	return text
}

// tell reports what the communicator does, if that is new.
func (s *submissions) tell(to comm.Reports) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var text string
	switch last := s.calls - 1; {
	case s.ended != "":
		text = "gave up: " + s.ended
	case s.waiters > 0:
		text = "waits for " + s.open()
	case s.calls == 0:
		text = "has called nothing"
	default:
		text = fmt.Sprintf("called %v last", &s.recent[last%remembered])
		if s.settled == s.calls {
			text += ", which is done"
		}
	}
	if text != s.told {
		s.told = text
		to.Report(s.group, s.rank, text)
	}
}

// begin returns how many calls a wait is for that begins.
func (s *submissions) begin() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiters++
	return s.calls
}

// next returns how many calls are done when the last of so many is, which does not
// tell of those before it.
func (s *submissions) next(calls uint64) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if calls == s.settled+1 {
		return calls
	}
	return 0
}

// end notes that a wait has ended, which has seen that many calls done.
func (s *submissions) end(done uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiters--
	s.settled = max(s.settled, done)
}

// broke notes how the communicator broke.
func (s *submissions) broke(cause error) {
	const longest = 200
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = cause.Error()
	s.ended = s.ended[:min(len(s.ended), longest)]
}

// stalled is the error of a wait that ended with cause.
func (c *Comm) stalled(cause error) error {
	return c.withOthers(fmt.Errorf("%w, waiting for %s", cause, c.submitted.waitsFor()))
}

// withOthers adds what the other ranks have reported.
func (c *Comm) withOthers(err error) error {
	if c.reporter == nil || c.WorldSize() == 1 {
		return err
	}
	return fmt.Errorf("%w; %s", err, c.reporter.others(c.submitted))
}
