// Package comm lets the ranks of a job communicate: collectives, messages and barriers, over any backend.
//
// A [Communicator] is one rank's handle on a group of ranks. Backends are the packages below this one: comm/noop,
// comm/local, comm/mpi, comm/tcp, comm/nccl, and comm/p2p on top of another one. They take calls as values ([Call],
// [Wait]; package comm/backend is for their authors), and decorators forward these ([Methods], [Waits]). All pass the
// suite in comm/commtest.
//
// # Buffers
//
// A buffer is an address (uintptr), an element count and a [dtype.DType]. Host backends take host addresses that the
// garbage collector does not move (runtime/cpu), GPU backends device addresses. Package distributed is a safe layer on
// tensors.
//
// # Order and completion
//
// Operations of one communicator behave as if executed in the order in which the rank submitted them: an operation may
// use the result of an earlier one. A method returns when its operation is submitted; from then until the next Sync or
// Barrier returns, its buffers belong to the communicator. All ranks submit the same collectives in the same order.
//
// Send and Recv match by source, destination and tag (any uint32), in submission order. A send may wait for its
// receive: put an exchange between two ranks into one [Communicator.Group]. Messages with different tags may be
// received in any order, except over NCCL, which ignores tags: portable code receives from a rank in the order in
// which that rank sends.
//
// # Errors
//
// Arguments are checked before anything is sent. Errors are [*OpError] wrapping a sentinel, for errors.Is. After an
// error that leaves ranks out of step (a timeout, a dead peer, a mismatch) the communicator is aborted: every later
// call fails with [ErrBroken] and the first cause.
package comm

import (
	"context"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
)

// ReduceOp is the element-wise reduction of AllReduce, Reduce and ReduceScatter. All of them are commutative; host
// backends of this module combine the ranks in rank order, so their results are reproducible.
//
// All reductions are defined on floats and integers, except Avg on integers, which would have to round. The method
// Defined reports this. On Bool, an element counts as true when its byte is not zero, results are 0 or 1, Sum and Max
// are "or", Prod and Min are "and".
//
// Host backends add 16-bit and 8-bit floats up in F32 and round once. A result beyond the range of F16 or BF16 is
// infinite, and a result beyond the range of an FP8 type is its largest number.
// Avg of F16 divides before it rounds, so it stays within the range of its inputs.
type ReduceOp = reductions.Op

// The reductions. Avg is the sum divided once by the number of ranks, for floating-point types only.
const (
	Sum  = reductions.Sum
	Prod = reductions.Prod
	Min  = reductions.Min
	Max  = reductions.Max
	Avg  = reductions.Avg
)

// Communicator is one rank's handle on a group of ranks.
//
// Counts are in elements and may be zero. send == recv means in place where a method has both and they have the same
// size; for AllGather in place means send == recv + rank*count elements, for ReduceScatter recv == send + rank*count
// elements (the conventions of NCCL), and the rest of send keeps its content. Any other overlap is [ErrArgument],
// even between the parts that a V-collective receives from two ranks. Where only the root uses a buffer, the others
// may pass 0.
//
// # Order contract
//
// Each element of a reduction's result depends only on the ranks' values of that element, the number of ranks, the
// type and the operation. It is ((x0 op x1) op x2) op … in the order of the ranks, computed in float32 for f16, bf16
// and fp8 and in the type itself for all others, divided once by the number of ranks for Avg, and rounded to the type
// once, at the end. It does not depend on the count, the place of the element, the alignment of buffers, in place or
// not, groups, the backend, the processor, the time at which ranks call, or the run. The contract does not cover the
// bits of a NaN that Sum, Prod or Avg gives. A backend that adds in another order, such as NCCL, says so
// ([FixedOrder]) and guarantees only the same bits on every rank.
//
// A Bool is true if its byte is not zero, and a reduction gives 0 or 1, even in a world of one rank. Such a world
// copies all other types bit by bit. Collectives and messages that only move data keep the byte.
//
// # Goroutines
//
// All methods may be called from any goroutine; the program orders the calls of different goroutines. A wait includes
// the operations that other goroutines of the rank have submitted. Goroutines that exchange messages independently
// can therefore deadlock on one communicator, each waiting for a message whose sender waits for the other. They need
// a communicator each:
//
//	mine, err := c.Split(ctx, 0, c.Rank()) // on all ranks, once per goroutine
type Communicator interface {
	// Rank is this participant's number, 0 <= Rank < WorldSize.
	Rank() int
	// WorldSize is the number of ranks.
	WorldSize() int

	// AllReduce reduces count elements across ranks; all get the result.
	AllReduce(send, recv uintptr, count int, dt dtype.DType, op ReduceOp) error
	// Broadcast copies root's count elements to every rank's buf.
	Broadcast(buf uintptr, count int, dt dtype.DType, root int) error
	// Reduce reduces count elements across ranks into root's recv.
	Reduce(send, recv uintptr, count int, dt dtype.DType, op ReduceOp, root int) error
	// AllGather collects count elements of every rank, in rank order, into
	// every rank's recv of WorldSize*count elements.
	AllGather(send, recv uintptr, count int, dt dtype.DType) error
	// AllGatherV is AllGather with a length per rank: rank r contributes
	// counts[r] elements (so send holds counts[Rank] of them), which land at
	// element displs[r] of every rank's recv. All ranks pass equal counts.
	AllGatherV(send, recv uintptr, counts, displs []int, dt dtype.DType) error
	// ReduceScatter reduces WorldSize*count elements across ranks; rank r gets
	// elements [r*count, (r+1)*count) of the result in its recv.
	ReduceScatter(send, recv uintptr, count int, dt dtype.DType, op ReduceOp) error
	// AllToAll sends elements [r*count, (r+1)*count) of send to rank r, and
	// receives rank r's share for this rank at the same place of recv. It has
	// no in-place form.
	AllToAll(send, recv uintptr, count int, dt dtype.DType) error
	// AllToAllV is AllToAll with a length and a displacement per peer, in
	// elements. sendCounts[r] here equals recvCounts[Rank] on rank r.
	AllToAllV(send uintptr, sendCounts, sendDispls []int, recv uintptr, recvCounts, recvDispls []int, dt dtype.DType) error
	// Gather collects count elements of every rank, in rank order, in root's
	// recv of WorldSize*count elements. In place at the root: send == recv +
	// root*count elements.
	Gather(send, recv uintptr, count int, dt dtype.DType, root int) error
	// Scatter sends elements [r*count, (r+1)*count) of root's send to rank r's
	// recv. In place at the root: recv == send + root*count elements.
	Scatter(send, recv uintptr, count int, dt dtype.DType, root int) error

	// Send sends count elements to rank dest, itself included.
	Send(buf uintptr, count int, dt dtype.DType, dest int, tag uint32) error
	// Recv receives count elements from rank src. A message of another length
	// or type is [ErrMismatch].
	//
	// The cost of a message does not depend on how many others wait, except when an MPI library searches them.
	Recv(buf uintptr, count int, dt dtype.DType, src int, tag uint32) error
	// Group starts calls together, so that they may wait for each other. They are not ordered among themselves, so
	// none may use another's result. All of them are submitted or, after an error, none. Group fails if an argument of
	// any call is wrong, or if messages touch the same memory, unless all of them send it. The calls' slice and lists
	// belong to the caller again when Group returns.
	//
	//	err := c.Group(
	//		comm.SendCall(mine, n, dtype.F32, right, tag),
	//		comm.RecvCall(theirs, n, dtype.F32, left, tag),
	//	)
	Group(calls ...Call) error

	// Sync waits until all operations that this rank submitted, from any goroutine, are done, or ctx is. If ctx ends
	// first, the communicator is aborted ([ErrTimeout] for a deadline, [ErrCanceled] for a cancellation). When the
	// deadlines of several ranks are near each other, the first to pass aborts its rank, and the others may get
	// [ErrPeerFailed] with its text instead: a program that goes on without a missing rank expects both. Sync ends
	// when a peer has failed, so the host calls it before it reads a result. A wait for a device's streams alone (a
	// copy to the host) watches neither a context nor peers.
	Sync(ctx context.Context) error
	// Barrier returns after every rank has called it. It implies Sync.
	Barrier(ctx context.Context) error

	// Split makes smaller communicators, and is collective: ranks that pass
	// the same color form a group, ordered by key, then by rank. A rank with a
	// negative color gets (nil, nil). Colors and keys are any int. After
	// [ErrExhausted], which all ranks get, the communicator goes on.
	Split(ctx context.Context, color, key int) (Communicator, error)

	// Err returns nil while calls are accepted, otherwise the error with which they are refused: [ErrClosed], or
	// [ErrBroken] with the first cause.
	Err() error

	// Abort ends operations in flight, with cause as the reason ([ErrCanceled] for nil). Waits in progress and later
	// calls fail with [ErrBroken] and the first cause, and peers that need this rank get [ErrPeerFailed] with its
	// text. When Abort returns, buffers belong to the caller again. The communicator must still be closed.
	// Sub-communicators stay usable; [AbortAll] includes them.
	Abort(cause error)

	// Close releases the communicator's resources. Operations in flight get a bounded
	// time to finish. Unfinished ones are logged with log/slog, and are an error unless that
	// error was returned before. Close never panics and may be called
	// twice. Peers that still need this rank get [ErrPeerFailed]. Sub-communicators
	// stay open.
	Close() error
}
