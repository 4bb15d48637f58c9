package local

import (
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

// lists gives a call what there is of the lists.
func (x *extra) lists(c *comm.Call, n int) {
	switch len(x.ints) {
	case 4 * n:
		c.SendCounts, c.SendDispls = x.list(sendCounts, n), x.list(sendDispls, n)
		fallthrough
	case 2 * n:
		c.RecvCounts, c.RecvDispls = x.list(recvCounts, n), x.list(recvDispls, n)
	}
}

// agree checks that all ranks called the same thing, before any of their
// memory is touched. Calls without lists take a look at each.
func (w *world) agree(s *slot) error {
	same := true
	for r := range s.calls {
		same = same && s.calls[0].agrees(&s.calls[r]) && len(s.extras[r].ints) == 0
	}
	if same {
		return nil
	}
	for r := range s.calls {
		c := s.calls[r].call()
		s.extras[r].lists(&c, w.size)
		w.agreeing[r] = c
	}
	return comm.Agree(w.agreeing)
}
