package local

import (
	"fmt"
	"strings"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// entry is one rank's call in a slot of the ring, without its lists. It is 32
// bytes, so that those of two ranks share a cache line.
type entry struct {
	send, recv uintptr
	count      int
	peer       int32
	op         comm.Op
	dt         dtype.DType
	reduce     comm.ReduceOp
}

func newEntry(c *comm.Call) entry {
	return entry{send: c.Send, recv: c.Recv, count: c.Count, peer: int32(c.Peer), op: c.Op, dt: c.DType, reduce: c.Reduce}
}

// agrees reports whether two ranks called the same collective.
func (e *entry) agrees(o *entry) bool {
	return e.count == o.count && e.peer == o.peer && e.op == o.op && e.dt == o.dt && e.reduce == o.reduce
}

// call returns what the entry was made of, but for its tag and its lists.
func (e *entry) call() comm.Call {
	return comm.Call{Op: e.op, DType: e.dt, Reduce: e.reduce, Peer: int(e.peer), Count: e.count, Send: e.send, Recv: e.recv}
}

// String describes the call as errors do.
func (e *entry) String() string { return e.call().String() }

// The lists of an extra. AllGatherV has the first two only.
const (
	recvCounts = iota
	recvDispls
	sendCounts
	sendDispls
)

// extra holds what only some calls have: a copy of the lists, one after the
// other. It keeps its memory when it is used again.
type extra struct {
	ints  []int
	split *splitCall
}

func (x *extra) set(c *comm.Call, split *splitCall) {
	x.ints = x.ints[:0]
	for _, list := range [...][]int{recvCounts: c.RecvCounts, recvDispls: c.RecvDispls, sendCounts: c.SendCounts, sendDispls: c.SendDispls} {
		x.ints = append(x.ints, list...)
	}
	x.split = split
}

// list returns one of the lists, of n entries each.
func (x *extra) list(which, n int) []int { return x.ints[which*n:][:n] }

// agree checks that all ranks called the same thing, before any of their
// memory is touched.
func (s *slot) agree() error {
	first := &s.calls[0]
	for r := range s.calls {
		if !first.agrees(&s.calls[r]) {
			return s.disagreement()
		}
	}
	switch first.op {
	case comm.OpAllGatherV:
		return s.agreeOnCounts()
	case comm.OpAllToAllV:
		return s.agreeOnMatrix()
	}
	return nil
}

// disagreement names the ranks behind each variant of the call.
func (s *slot) disagreement() error {
	var variants []string
	callers := map[string][]int{}
	for r := range s.calls {
		text := s.calls[r].String()
		if callers[text] == nil {
			variants = append(variants, text)
		}
		callers[text] = append(callers[text], r)
	}
	for i, text := range variants {
		variants[i] = fmt.Sprintf("%s called %s", ranksText(callers[text]), text)
	}
	return fmt.Errorf("%w: %s", comm.ErrMismatch, strings.Join(variants, ", "))
}

func (s *slot) agreeOnCounts() error {
	n := len(s.calls)
	want := s.extras[0].list(recvCounts, n)
	for r := range s.extras {
		for i, got := range s.extras[r].list(recvCounts, n) {
			if got != want[i] {
				return fmt.Errorf("%w: %v, where rank 0 passed counts[%d] = %d, rank %d passed %d",
					comm.ErrMismatch, &s.calls[0], i, want[i], r, got)
			}
		}
	}
	return nil
}

func (s *slot) agreeOnMatrix() error {
	n := len(s.calls)
	for from := range s.extras {
		for to, sent := range s.extras[from].list(sendCounts, n) {
			if want := s.extras[to].list(recvCounts, n)[from]; sent != want {
				return fmt.Errorf("%w: %v, where rank %d sends %d elements to rank %d, which receives %d",
					comm.ErrMismatch, &s.calls[0], from, sent, to, want)
			}
		}
	}
	return nil
}

// ranksText returns "rank 3" or "ranks 0, 2, 3".
func ranksText(ranks []int) string {
	var b strings.Builder
	b.WriteString("rank")
	if len(ranks) > 1 {
		b.WriteString("s")
	}
	for i, r := range ranks {
		if i > 0 {
			b.WriteString(",")
		}
		fmt.Fprintf(&b, " %d", r)
	}
	return b.String()
}
