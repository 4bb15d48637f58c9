package comm

import (
	"github.com/tutti-go/tutti/dtype"
)

// Methods implements the methods of a [Communicator] that move data by two functions. A decorator embeds it together
// with [Waits], and with [Wrapped] for the other methods. Do forwards a call with [Call.Make], which does not unpack
// it if the next communicator embeds Methods as well. So a type that embeds Methods must not override its methods:
// calls made as values would bypass the override. The methods are not inlined, so that a recorder (comm/record) sees
// the line of the call.
type Methods struct {
	Do       func(c Call) error       // one call
	Together func(calls []Call) error // the calls of a Group
}

// submit is how [Call.Make] passes a call on without unpacking it. It returns the function instead of
// calling it, as each function between copies the call.
func (m Methods) submit() func(c Call) error {
	return m.Do
}

// AllReduce implements [Communicator].
//
//go:noinline
func (m Methods) AllReduce(send, recv uintptr, count int, dt dtype.DType, op ReduceOp) error {
	return m.Do(AllReduceCall(send, recv, count, dt, op))
}

// Broadcast implements [Communicator].
//
//go:noinline
func (m Methods) Broadcast(buf uintptr, count int, dt dtype.DType, root int) error {
	return m.Do(BroadcastCall(buf, count, dt, root))
}

// Reduce implements [Communicator].
//
//go:noinline
func (m Methods) Reduce(send, recv uintptr, count int, dt dtype.DType, op ReduceOp, root int) error {
	return m.Do(ReduceCall(send, recv, count, dt, op, root))
}

// AllGather implements [Communicator].
//
//go:noinline
func (m Methods) AllGather(send, recv uintptr, count int, dt dtype.DType) error {
	return m.Do(AllGatherCall(send, recv, count, dt))
}

// AllGatherV implements [Communicator].
//
//go:noinline
func (m Methods) AllGatherV(send, recv uintptr, counts, displs []int, dt dtype.DType) error {
	return m.Do(AllGatherVCall(send, recv, counts, displs, dt))
}

// ReduceScatter implements [Communicator].
//
//go:noinline
func (m Methods) ReduceScatter(send, recv uintptr, count int, dt dtype.DType, op ReduceOp) error {
	return m.Do(ReduceScatterCall(send, recv, count, dt, op))
}

// AllToAll implements [Communicator].
//
//go:noinline
func (m Methods) AllToAll(send, recv uintptr, count int, dt dtype.DType) error {
	return m.Do(AllToAllCall(send, recv, count, dt))
}

// AllToAllV implements [Communicator].
//
//go:noinline
func (m Methods) AllToAllV(
	send uintptr, sendCounts, sendDispls []int,
	recv uintptr, recvCounts, recvDispls []int,
	dt dtype.DType,
) error {
	return m.Do(AllToAllVCall(send, sendCounts, sendDispls, recv, recvCounts, recvDispls, dt))
}

// Gather implements [Communicator].
//
//go:noinline
func (m Methods) Gather(send, recv uintptr, count int, dt dtype.DType, root int) error {
	return m.Do(GatherCall(send, recv, count, dt, root))
}

// Scatter implements [Communicator].
//
//go:noinline
func (m Methods) Scatter(send, recv uintptr, count int, dt dtype.DType, root int) error {
	return m.Do(ScatterCall(send, recv, count, dt, root))
}

// Send implements [Communicator].
//
//go:noinline
func (m Methods) Send(buf uintptr, count int, dt dtype.DType, dest int, tag uint32) error {
	return m.Do(SendCall(buf, count, dt, dest, tag))
}

// Recv implements [Communicator].
//
//go:noinline
func (m Methods) Recv(buf uintptr, count int, dt dtype.DType, src int, tag uint32) error {
	return m.Do(RecvCall(buf, count, dt, src, tag))
}

// Group implements [Communicator].
//
//go:noinline
func (m Methods) Group(calls ...Call) error {
	return m.Together(calls)
}

// Wrapped is the communicator that a decorator wraps. It supplies the methods that the decorator does not replace.
// Methods and [Waits], embedded beside it, take precedence.
type Wrapped struct{ wrapped }

// wrapped puts the methods one level deeper than those.
type wrapped struct{ Communicator }

// Wrap returns the Wrapped that a decorator of c embeds.
func Wrap(c Communicator) Wrapped { return Wrapped{wrapped{c}} }

// Unwrap returns the wrapped communicator; see [As].
func (w Wrapped) Unwrap() Communicator { return w.Communicator }
