package nccl

import (
	"fmt"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/marks"
	"github.com/tutti-go/tutti/comm/rendezvous"
)

// submissions are what a communicator has submitted, to tell what a wait that ended
// in vain was for. Calls run in order, so it is for one of those that no wait has
// seen done, and normally for the first.
type submissions struct {
	group      string // the communicator's name, the same on all its ranks
	rank, size int

	mu      sync.Mutex
	begun   extent   // submitted so far
	settled extent   // done, as far as waits have told
	waiters int      // goroutines that wait
	splits  []uint64 // collectives before each Split under way, which the stream knows nothing of
	ended   string   // how it broke
	behind  bool     // messages were submitted that no collective comes after
	recent  [remembered]submission
	told    string // what the other ranks were told last
	left    bool   // they are told nothing more
}

// extent is how far submissions go: the user's, and all collectives, those of the
// communicator's own among them.
type extent struct {
	marks.Extent
	all uint64
}

func (e extent) calls() uint64 { return e.Collectives + e.Messages }

// max returns the further of two.
func (e extent) max(other extent) extent { return extent{e.Max(other.Extent), max(e.all, other.all)} }

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
	s.record(op, x)
}

// record is add with the lock held.
func (s *submissions) record(op comm.Op, x *comm.Call) {
	k := &s.recent[s.begun.calls()%remembered]
	k.Op, k.DType, k.Reduce, k.Tag, k.Peer, k.Count = op, x.DType, x.Reduce, x.Tag, x.Peer, x.Count
	if op != comm.OpSplit { // which says nothing of what is in the stream
		s.behind = op.Message()
	}
	if op.Message() {
		s.begun.Messages++
		k.number = s.begun.Messages
		return
	}
	s.begun.Collectives++
	s.begun.all++
	k.number = s.begun.Collectives
}

// addTogether records calls that are one kernel, in no order.
func (s *submissions) addTogether(calls []comm.Call) {
	messages := false
	for i := range calls {
		s.add(calls[i].Op, &calls[i])
		messages = messages || calls[i].Op.Message()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.behind = s.behind || messages
}

// addSplit records a Split, which ends by endSplit with the number that it returns.
func (s *submissions) addSplit() (before uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before = s.begun.Collectives
	s.record(comm.OpSplit, &comm.Call{})
	s.splits = append(s.splits, before)
	return before
}

func (s *submissions) endSplit(before uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.splits, before)
	s.splits = slices.Delete(s.splits, i, i+1)
}

// addOwn counts a collective that is not the user's.
func (s *submissions) addOwn() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begun.all++
	s.behind = false
}

// forget begins anew: what came before was not the user's.
func (s *submissions) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begun, s.settled = extent{all: s.begun.all}, extent{all: s.settled.all}
}

// waitsFor describes what has not been seen done.
func (s *submissions) waitsFor() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open()
}

// open is waitsFor with the lock held.
func (s *submissions) open() string {
	calls := s.begun.calls()
	open := calls - s.settled.calls()
	if open == 0 {
		return "nothing"
	}
	first := s.settled.calls()
	text := ""
	if open > remembered {
		first = calls - remembered
		text = fmt.Sprintf("one of %d operations before, or ", first-s.settled.calls())
	}
	text += s.recent[first%remembered].String()
	if behind := calls - first - 1; behind > 0 {
		text += fmt.Sprintf("; %d operations behind that", behind)
	}
	return text
}

// leave tells the other ranks something for the last time.
func (s *submissions) leave(to rendezvous.Reports, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left = true
	to.Leave(s.group, s.rank, why)
}

func (s *submissions) hasLeft() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.left
}

// tell reports what the communicator does, if that is new.
func (s *submissions) tell(to rendezvous.Reports) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left {
		return
	}
	var text string
	switch last := s.begun.calls() - 1; {
	case s.ended != "":
		text = "gave up: " + s.ended
	case s.waiters > 0:
		text = "waits for " + s.open()
	case s.begun.calls() == 0:
		text = "has called nothing"
	default:
		text = fmt.Sprintf("called %v last", &s.recent[last%remembered])
		if s.settled.calls() == s.begun.calls() {
			text += ", which is done"
		}
	}
	if text != s.told {
		s.told = text
		to.Report(s.group, s.rank, text)
	}
}

// begin returns what a wait is for that begins, and how many collectives another rank
// has done when it has done its part in all of that. Of messages behind the last one it
// is known when there is a further one.
func (s *submissions) begin() (wait extent, collectives uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiters++
	wait, collectives = s.begun, s.begun.all
	if s.behind && s.begun.Messages > s.settled.Messages {
		collectives++
	}
	return wait, collectives
}

// next returns what is done when the last call of a wait is, which does not tell of
// those before it.
func (s *submissions) next(wait extent) extent {
	s.mu.Lock()
	defer s.mu.Unlock()
	if wait.calls() == s.settled.calls()+1 {
		return wait
	}
	return extent{}
}

// end notes that a wait has ended, which has seen that much done.
func (s *submissions) end(done extent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiters--
	s.settled = s.settled.max(done)
}

// seenDone returns how many collectives waits have seen done.
func (s *submissions) seenDone() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.settled.all
}

// extents returns what the user has submitted, and what waits have seen done of it.
func (s *submissions) extents() (begun, settled marks.Extent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.begun.Extent, s.settled.Extent
}

// soFar returns what is done when the stream is: what the user has submitted before any
// Split that is under way.
func (s *submissions) soFar() marks.Extent {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.begun.Extent
	for _, before := range s.splits {
		e.Collectives = min(e.Collectives, before)
	}
	return e
}

// how returns how the communicator broke.
func (s *submissions) how() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
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
