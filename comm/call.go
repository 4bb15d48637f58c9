package comm

import (
	"fmt"
	"strings"

	"github.com/tutti-go/tutti/dtype"
)

// Op is what a [Call] does.
type Op uint8

// The operations: the twelve that a [Call] can be, and those that wait. Decorators and records tell methods apart by
// them.
const (
	OpAllReduce Op = iota
	OpBroadcast
	OpReduce
	OpAllGather
	OpAllGatherV
	OpReduceScatter
	OpAllToAll
	OpAllToAllV
	OpGather
	OpScatter
	OpSend
	OpRecv
	OpSync
	OpBarrier
	OpSplit
	numOps
)

// opInfo is what the package knows of an operation.
type opInfo struct {
	name             string // as String has it
	reduces, hasRoot bool   // it has a ReduceOp; it has a root
	lists            bool   // lengths are in the lists
}

var ops = [numOps]opInfo{
	OpAllReduce:     {name: "allreduce", reduces: true},
	OpBroadcast:     {name: "broadcast", hasRoot: true},
	OpReduce:        {name: "reduce", reduces: true, hasRoot: true},
	OpAllGather:     {name: "allgather"},
	OpAllGatherV:    {name: "allgatherv", lists: true},
	OpReduceScatter: {name: "reducescatter", reduces: true},
	OpAllToAll:      {name: "alltoall"},
	OpAllToAllV:     {name: "alltoallv", lists: true},
	OpGather:        {name: "gather", hasRoot: true},
	OpScatter:       {name: "scatter", hasRoot: true},
	OpSend:          {name: "send"},
	OpRecv:          {name: "recv"},
	OpSync:          {name: "sync"},
	OpBarrier:       {name: "barrier"},
	OpSplit:         {name: "split"},
}

// String returns the name that [OpError.Op] holds. It accepts any number, such as one received over the network.
func (o Op) String() string {
	if o >= numOps {
		return "unknown operation"
	}
	return ops[o].name
}

// MovesData reports whether the operation is one of the twelve of a [Call].
func (o Op) MovesData() bool { return o <= OpRecv }

// Message reports whether the operation is a Send or a Recv.
func (o Op) Message() bool { return o == OpSend || o == OpRecv }

// Reduces reports whether the operation has a reduction.
func (o Op) Reduces() bool { return o < numOps && ops[o].reduces }

// HasRoot reports whether the operation has a root.
func (o Op) HasRoot() bool { return o < numOps && ops[o].hasRoot }

// Call is an operation that moves data, as a value: one of the methods of a
// [Communicator] with its arguments. Calls are checked, compared between ranks,
// recorded and printed. Decorators forward a call as a value ([Call.Make]) to the backend
// (package comm/backend). Functions such as [SendCall] make one.
//
// A field that the operation does not have is zero.
type Call struct {
	Op     Op          // the operation
	DType  dtype.DType // type of the elements
	Reduce ReduceOp    // operation of a reduction
	Tag    uint32      // of a message
	Peer   int         // the root; the rank that a message goes to or comes from
	Count  int         // elements, of all operations but V-collectives
	// Send is the address that is read, and Recv the one that is written. They are the same for Broadcast.
	Send, Recv uintptr
	// The lengths and displacements of a V-collective, in elements, by rank. AllGatherV uses the Recv lists. A call
	// does not own its lists: copy them to keep the call after the method that took it returns.
	SendCounts, SendDispls []int
	RecvCounts, RecvDispls []int
}

// AllReduceCall is [Communicator.AllReduce] as a value.
func AllReduceCall(send, recv uintptr, count int, dt dtype.DType, op ReduceOp) Call {
	return Call{
		Op:     OpAllReduce,
		DType:  dt,
		Reduce: op,
		Count:  count,
		Send:   send,
		Recv:   recv,
	}
}

// BroadcastCall is [Communicator.Broadcast] as a value.
func BroadcastCall(buf uintptr, count int, dt dtype.DType, root int) Call {
	return Call{
		Op:    OpBroadcast,
		DType: dt,
		Peer:  root,
		Count: count,
		Send:  buf,
		Recv:  buf,
	}
}

// ReduceCall is [Communicator.Reduce] as a value.
func ReduceCall(send, recv uintptr, count int, dt dtype.DType, op ReduceOp, root int) Call {
	return Call{
		Op:     OpReduce,
		DType:  dt,
		Reduce: op,
		Peer:   root,
		Count:  count,
		Send:   send,
		Recv:   recv,
	}
}

// AllGatherCall is [Communicator.AllGather] as a value.
func AllGatherCall(send, recv uintptr, count int, dt dtype.DType) Call {
	return Call{
		Op:    OpAllGather,
		DType: dt,
		Count: count,
		Send:  send,
		Recv:  recv,
	}
}

// AllGatherVCall is [Communicator.AllGatherV] as a value.
func AllGatherVCall(send, recv uintptr, counts, displs []int, dt dtype.DType) Call {
	return Call{
		Op:         OpAllGatherV,
		DType:      dt,
		Send:       send,
		Recv:       recv,
		RecvCounts: counts,
		RecvDispls: displs,
	}
}

// ReduceScatterCall is [Communicator.ReduceScatter] as a value.
func ReduceScatterCall(send, recv uintptr, count int, dt dtype.DType, op ReduceOp) Call {
	return Call{
		Op:     OpReduceScatter,
		DType:  dt,
		Reduce: op,
		Count:  count,
		Send:   send,
		Recv:   recv,
	}
}

// AllToAllCall is [Communicator.AllToAll] as a value.
func AllToAllCall(send, recv uintptr, count int, dt dtype.DType) Call {
	return Call{
		Op:    OpAllToAll,
		DType: dt,
		Count: count,
		Send:  send,
		Recv:  recv,
	}
}

// AllToAllVCall is [Communicator.AllToAllV] as a value.
func AllToAllVCall(
	send uintptr, sendCounts, sendDispls []int,
	recv uintptr, recvCounts, recvDispls []int,
	dt dtype.DType,
) Call {
	return Call{
		Op: OpAllToAllV, DType: dt,
		Send: send, SendCounts: sendCounts, SendDispls: sendDispls,
		Recv: recv, RecvCounts: recvCounts, RecvDispls: recvDispls,
	}
}

// GatherCall is [Communicator.Gather] as a value.
func GatherCall(send, recv uintptr, count int, dt dtype.DType, root int) Call {
	return Call{
		Op:    OpGather,
		DType: dt,
		Peer:  root,
		Count: count,
		Send:  send,
		Recv:  recv,
	}
}

// ScatterCall is [Communicator.Scatter] as a value.
func ScatterCall(send, recv uintptr, count int, dt dtype.DType, root int) Call {
	return Call{
		Op:    OpScatter,
		DType: dt,
		Peer:  root,
		Count: count,
		Send:  send,
		Recv:  recv,
	}
}

// SendCall is [Communicator.Send] as a value.
func SendCall(buf uintptr, count int, dt dtype.DType, dest int, tag uint32) Call {
	return Call{
		Op:    OpSend,
		DType: dt,
		Tag:   tag,
		Peer:  dest,
		Count: count,
		Send:  buf,
	}
}

// RecvCall is [Communicator.Recv] as a value.
func RecvCall(buf uintptr, count int, dt dtype.DType, src int, tag uint32) Call {
	return Call{
		Op:    OpRecv,
		DType: dt,
		Tag:   tag,
		Peer:  src,
		Count: count,
		Recv:  buf,
	}
}

// submitter is implemented by communicators that take calls as values: all that embed [Methods].
type submitter interface {
	submit() func(c Call) error
}

// Make calls the communicator's method for the call. A communicator that embeds [Methods] gets the call as a value. A
// method of Methods that it overrides is not called, so it sets Do instead.
func (c Call) Make(on Communicator) error {
	if !c.Op.MovesData() {
		return noCall(c.Op)
	}
	if s, ok := on.(submitter); ok {
		return s.submit()(c)
	}
	switch c.Op {
	case OpAllReduce:
		return on.AllReduce(c.Send, c.Recv, c.Count, c.DType, c.Reduce)
	case OpBroadcast:
		return on.Broadcast(c.Recv, c.Count, c.DType, c.Peer)
	case OpReduce:
		return on.Reduce(c.Send, c.Recv, c.Count, c.DType, c.Reduce, c.Peer)
	case OpAllGather:
		return on.AllGather(c.Send, c.Recv, c.Count, c.DType)
	case OpAllGatherV:
		return on.AllGatherV(c.Send, c.Recv, c.RecvCounts, c.RecvDispls, c.DType)
	case OpReduceScatter:
		return on.ReduceScatter(c.Send, c.Recv, c.Count, c.DType, c.Reduce)
	case OpAllToAll:
		return on.AllToAll(c.Send, c.Recv, c.Count, c.DType)
	case OpAllToAllV:
		return on.AllToAllV(c.Send, c.SendCounts, c.SendDispls, c.Recv, c.RecvCounts, c.RecvDispls, c.DType)
	case OpGather:
		return on.Gather(c.Send, c.Recv, c.Count, c.DType, c.Peer)
	case OpScatter:
		return on.Scatter(c.Send, c.Recv, c.Count, c.DType, c.Peer)
	case OpSend:
		return on.Send(c.Send, c.Count, c.DType, c.Peer, c.Tag)
	}
	return on.Recv(c.Recv, c.Count, c.DType, c.Peer, c.Tag)
}

func noCall(op Op) error {
	return fmt.Errorf("%w: %v does not move data", ErrArgument, op)
}

// Bytes is the length of Count elements.
func (c Call) Bytes() int { return c.Count * c.DType.Size() }

// String describes the call as errors do, such as "allreduce of 4 f32, sum". Addresses and the lists of a
// V-collective are left out, so ranks that make the same call describe it alike.
func (c Call) String() string {
	var b strings.Builder
	b.WriteString(c.Op.String())
	if !c.Op.MovesData() {
		return b.String()
	}
	if ops[c.Op].lists {
		fmt.Fprintf(&b, " of %v", c.DType)
	} else {
		fmt.Fprintf(&b, " of %d %v", c.Count, c.DType)
	}
	switch {
	case c.Op == OpSend:
		fmt.Fprintf(&b, " to rank %d, tag %d", c.Peer, c.Tag)
	case c.Op == OpRecv:
		fmt.Fprintf(&b, " from rank %d, tag %d", c.Peer, c.Tag)
	}
	if c.Op.Reduces() {
		fmt.Fprintf(&b, ", %v", c.Reduce)
	}
	if c.Op.HasRoot() {
		fmt.Fprintf(&b, ", root %d", c.Peer)
	}
	return b.String()
}
