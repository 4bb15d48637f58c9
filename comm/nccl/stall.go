package nccl

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
)

// submissions are what a communicator has submitted, to tell what a wait that ended
// in vain was for. Calls run in order, so it is for one of those that no wait has
// seen done, and normally for the first.
type submissions struct {
	calls   uint64                // submitted so far
	settled uint64                // done, as far as waits have told
	recent  [remembered]comm.Call // the last ones, without addresses and lists
}

// remembered is how many calls a timeout can name.
const remembered = 64

// add records a call. The caller holds the communicator's lock, as for the others.
func (s *submissions) add(op comm.Op, x *comm.Call) {
	k := &s.recent[s.calls%remembered]
	k.Op, k.DType, k.Reduce, k.Tag, k.Peer, k.Count = op, x.DType, x.Reduce, x.Tag, x.Peer, x.Count
	s.calls++
}

// waitsFor describes what has not been seen done.
func (s *submissions) waitsFor() string {
	open := s.calls - s.settled
	if open == 0 {
		return "nothing"
	}
	first := s.settled
	text := ""
	if open > remembered {
		first = s.calls - remembered
		text = fmt.Sprintf("one of operations %d to %d, or ", s.settled, first-1)
	}
	text += fmt.Sprintf("%v (operation %d)", s.recent[first%remembered], first)
	if behind := s.calls - first - 1; behind > 0 {
		text += fmt.Sprintf("; %d operations behind that", behind)
	}
	return text
}

// began returns how many calls a wait is for.
func (c *Comm) began() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.submitted.calls
}

// settle notes that a wait has seen that many calls done.
func (c *Comm) settle(calls uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.submitted.settled = max(c.submitted.settled, calls)
}

// stalled is the error of a wait that ended with cause.
func (c *Comm) stalled(cause error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return fmt.Errorf("%w, waiting for %s", cause, c.submitted.waitsFor())
}
