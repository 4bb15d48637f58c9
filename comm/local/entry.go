package local

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// entryBytes is the size of an entry: those of two ranks share a cache line.
const entryBytes = 32

// sliceBytes is the size of a slice without its elements.
const sliceBytes = 24

// lineBytes is how much travels between processors at once.
const lineBytes = 64

// entry is one rank's call in a slot of the ring, without its lists.
type entry struct {
	send, recv uintptr       // addresses; 0 without such memory
	count      int           // elements, as in comm.Call
	peer       int32         // root or peer; unused by other calls
	op         comm.Op       // which call it is
	dt         dtype.DType   // of the elements
	reduce     comm.ReduceOp // how elements are combined
	listed     bool          // the call has lists, which an extra holds
}

func newEntry(c *comm.Call) entry {
	return entry{
		send:   c.Send,
		recv:   c.Recv,
		count:  c.Count,
		peer:   int32(c.Peer),
		op:     c.Op,
		dt:     c.DType,
		reduce: c.Reduce,
		listed: c.RecvCounts != nil,
	}
}

// agrees reports whether two ranks called the same collective.
func (e *entry) agrees(o *entry) bool {
	return e.count == o.count && e.peer == o.peer && e.op == o.op && e.dt == o.dt && e.reduce == o.reduce
}

// call returns what the entry was made of, but for its tag and its lists.
func (e *entry) call() comm.Call {
	return comm.Call{
		Op:     e.op,
		DType:  e.dt,
		Reduce: e.reduce,
		Peer:   int(e.peer),
		Count:  e.count,
		Send:   e.send,
		Recv:   e.recv,
	}
}

// String describes the call as errors do.
func (e *entry) String() string { return e.call().String() }

// The lists of a call. AllGatherV has the first two only.
const (
	recvCounts = iota
	recvDispls
	sendCounts
	sendDispls
)

// lists is a copy of the lists of a call, one after the other. It keeps its memory
// when it is used again.
type lists struct{ ints []int }

func (l *lists) set(c *comm.Call) {
	l.ints = l.ints[:0]
	for _, list := range [...][]int{
		recvCounts: c.RecvCounts,
		recvDispls: c.RecvDispls,
		sendCounts: c.SendCounts,
		sendDispls: c.SendDispls,
	} {
		l.ints = append(l.ints, list...)
	}
}

// list returns one of the lists, of n entries each.
func (l *lists) list(which, n int) []int { return l.ints[which*n:][:n] }

// give gives a call the lists.
func (l *lists) give(c *comm.Call, n int) {
	switch len(l.ints) {
	case 4 * n:
		c.SendCounts = l.list(sendCounts, n)
		c.SendDispls = l.list(sendDispls, n)
		fallthrough
	case 2 * n:
		c.RecvCounts = l.list(recvCounts, n)
		c.RecvDispls = l.list(recvDispls, n)
	}
}
