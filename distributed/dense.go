package distributed

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// AllReduce reduces t element by element across the ranks of c, in place;
// every rank gets the result, with the same bits. All ranks pass a tensor of
// the same length and type.
//
// Like all functions of this file it returns an error before anything is sent if:
//   - c or a tensor is nil ([comm.ErrArgument]),
//   - a tensor is freed ([runtime.ErrFreed]), not contiguous ([runtime.ErrNotContiguous]) or in memory that c does not
//     reach ([comm.ErrDevice]),
//   - two tensors are not ordered by one compute stream ([runtime.ErrDevice]), because they are on two devices, or of
//     two runtimes with a stream each.
//
// When it returns, the result is ready for work submitted to the tensor's runtime afterwards. Before the host reads it,
// see "Completion" in the package documentation.
func AllReduce(ctx context.Context, c comm.Communicator, t *runtime.Tensor, op comm.ReduceOp) error {
	return move(ctx, "allreduce", c, t, t, func(x transfer) comm.Call {
		return comm.AllReduceCall(x.src, x.dst, x.count, x.dt, op)
	})
}

// Broadcast copies root's t to every rank's t.
func Broadcast(ctx context.Context, c comm.Communicator, t *runtime.Tensor, root int) error {
	return move(ctx, "broadcast", c, t, t, func(x transfer) comm.Call {
		return comm.BroadcastCall(x.dst, x.count, x.dt, root)
	})
}

// Reduce is like [AllReduce], but only root gets the result, in place. The other ranks' t stay as they are.
func Reduce(ctx context.Context, c comm.Communicator, t *runtime.Tensor, op comm.ReduceOp, root int) error {
	return move(ctx, "reduce", c, t, t, func(x transfer) comm.Call {
		if c.Rank() != root {
			x.dst = 0
		}
		return comm.ReduceCall(x.src, x.dst, x.count, x.dt, op, root)
	})
}

// AllGather collects every rank's src, in rank order, in every rank's dst, which has WorldSize times as many elements.
// If src is this rank's part of dst (a view), nothing is copied.
func AllGather(ctx context.Context, c comm.Communicator, dst, src *runtime.Tensor) error {
	return moveParts(ctx, "allgather", c, dst, src, src, dst, func(x transfer) comm.Call {
		return comm.AllGatherCall(x.src, x.dst, x.count, x.dt)
	})
}

// AllGatherV is [AllGather] with a length per rank: rank r contributes
// counts[r] elements. All ranks pass equal counts, which sum up to dst's
// length; src has counts[Rank] elements.
func AllGatherV(ctx context.Context, c comm.Communicator, dst, src *runtime.Tensor, counts []int) error {
	const op = "allgatherv"
	displs, err := checkCounts(op, c, "counts", counts, "dst", dst)
	if err != nil {
		return err
	}
	if src != nil && src.Len() != counts[c.Rank()] {
		return base.ShapeError(op, "src has %d elements, counts[%d] says %d", src.Len(), c.Rank(), counts[c.Rank()])
	}
	return move(ctx, op, c, dst, src, func(x transfer) comm.Call {
		return comm.AllGatherVCall(x.src, x.dst, counts, displs, x.dt)
	})
}

// ReduceScatter reduces src across the ranks and leaves part number Rank of
// the result in dst. src has WorldSize times as many elements as dst, which
// may be this rank's part of src (a view).
func ReduceScatter(ctx context.Context, c comm.Communicator, dst, src *runtime.Tensor, op comm.ReduceOp) error {
	return moveParts(ctx, "reducescatter", c, dst, src, dst, src, func(x transfer) comm.Call {
		return comm.ReduceScatterCall(x.src, x.dst, x.count, x.dt, op)
	})
}

// AllToAll cuts src into WorldSize equal parts, sends part r to rank r, and
// collects what the ranks sent here, in rank order, in dst.
func AllToAll(ctx context.Context, c comm.Communicator, dst, src *runtime.Tensor) error {
	const op = "alltoall"
	x, err := begin(ctx, op, c, dst, src)
	if err != nil {
		return err
	}
	p := c.WorldSize()
	if dst.Len() != src.Len() || src.Len()%p != 0 {
		return base.ShapeError(op, "src has %d elements and dst %d; want equal multiples of the %d ranks",
			src.Len(), dst.Len(), p)
	}
	return x.end(ctx, comm.AllToAllCall(x.src, x.dst, src.Len()/p, x.dt))
}

// AllToAllV is [AllToAll] with a length per peer: sendCounts[r] elements of
// src go to rank r, recvCounts[r] elements of dst come from it. The parts lie
// one after the other and fill the tensors.
func AllToAllV(ctx context.Context, c comm.Communicator, dst *runtime.Tensor, recvCounts []int,
	src *runtime.Tensor, sendCounts []int) error {
	const op = "alltoallv"
	sendDispls, err := checkCounts(op, c, "sendCounts", sendCounts, "src", src)
	if err != nil {
		return err
	}
	recvDispls, err := checkCounts(op, c, "recvCounts", recvCounts, "dst", dst)
	if err != nil {
		return err
	}
	return move(ctx, op, c, dst, src, func(x transfer) comm.Call {
		return comm.AllToAllVCall(x.src, sendCounts, sendDispls, x.dst, recvCounts, recvDispls, x.dt)
	})
}

// Gather collects every rank's src, in rank order, in root's dst, which has
// WorldSize times as many elements. The others' dst may be nil.
func Gather(ctx context.Context, c comm.Communicator, dst, src *runtime.Tensor, root int) error {
	const op = "gather"
	if err := base.CheckComm(c); err != nil {
		return base.OpError(op, err)
	}
	if c.Rank() != root {
		return move(ctx, op, c, src, src, func(x transfer) comm.Call {
			x.dst = 0
			return comm.GatherCall(x.src, x.dst, x.count, x.dt, root)
		})
	}
	return moveParts(ctx, op, c, dst, src, src, dst, func(x transfer) comm.Call {
		return comm.GatherCall(x.src, x.dst, x.count, x.dt, root)
	})
}

// Scatter sends part r of root's src to rank r's dst. src has WorldSize times
// as many elements as dst; the others' src may be nil.
func Scatter(ctx context.Context, c comm.Communicator, dst, src *runtime.Tensor, root int) error {
	const op = "scatter"
	if err := base.CheckComm(c); err != nil {
		return base.OpError(op, err)
	}
	if c.Rank() != root {
		return move(ctx, op, c, dst, dst, func(x transfer) comm.Call {
			x.src = 0
			return comm.ScatterCall(x.src, x.dst, x.count, x.dt, root)
		})
	}
	return moveParts(ctx, op, c, dst, src, dst, src, func(x transfer) comm.Call {
		return comm.ScatterCall(x.src, x.dst, x.count, x.dt, root)
	})
}

// Send sends t to rank dest and may wait for the matching [Recv]. Ranks that
// exchange data use [SendRecv] instead: two ranks that both send first would
// wait for each other.
func Send(ctx context.Context, c comm.Communicator, t *runtime.Tensor, dest int, tag uint32) error {
	return move(ctx, "send", c, t, t, func(x transfer) comm.Call {
		return comm.SendCall(x.src, x.count, x.dt, dest, tag)
	})
}

// Recv receives t from rank src.
func Recv(ctx context.Context, c comm.Communicator, t *runtime.Tensor, src int, tag uint32) error {
	return move(ctx, "recv", c, t, t, func(x transfer) comm.Call {
		return comm.RecvCall(x.dst, x.count, x.dt, src, tag)
	})
}

// SendRecv sends src to rank dest while it receives dst from rank source.
// The tensors must not overlap; their lengths may differ.
func SendRecv(ctx context.Context, c comm.Communicator, dst *runtime.Tensor, source int, src *runtime.Tensor,
	dest int, tag uint32) error {
	x, err := begin(ctx, "sendrecv", c, dst, src)
	if err != nil {
		return err
	}
	return x.finish(ctx, c.Group(
		comm.SendCall(x.src, src.Len(), x.dt, dest, tag),
		comm.RecvCall(x.dst, dst.Len(), x.dt, source, tag)))
}

// transfer is what moves a tensor, or two: it passed the checks, and its buffers
// are ordered against the device.
type transfer struct {
	op       string      // errors begin with it
	src, dst uintptr     // addresses that are read and written
	count    int         // elements of src
	dt       dtype.DType // type of the elements
	order    base.Order  // has the communicator's work and the compute stream wait for each other
}

// begin checks the tensors of a collective and makes communication wait for
// what computes them.
func begin(ctx context.Context, op string, c comm.Communicator, dst, src *runtime.Tensor) (transfer, error) {
	x := transfer{op: op}
	err := base.CheckComm(c)
	if err != nil {
		return x, base.OpError(op, err)
	}
	if x.src, err = base.Address(op, "source", c, src); err != nil {
		return x, err
	}
	if x.dst, err = base.Address(op, "destination", c, dst); err != nil {
		return x, err
	}
	if dst.DType() != src.DType() {
		return x, base.OpError(op, fmt.Errorf("%w: source is %v, destination %v", runtime.ErrDType, src.DType(), dst.DType()))
	}
	if err := base.SameStream(dst.Runtime(), src.Runtime()); err != nil {
		return x, base.OpError(op, fmt.Errorf("destination and source: %w", err))
	}
	x.count = src.Len()
	x.dt = src.DType()
	x.order = base.NewOrder(dst.Runtime(), c)
	return x, base.OpError(op, x.order.CommAfterCompute(ctx))
}

// move is begin and end around a call.
func move(ctx context.Context, op string, c comm.Communicator, dst, src *runtime.Tensor,
	call func(x transfer) comm.Call) error {
	x, err := begin(ctx, op, c, dst, src)
	if err != nil {
		return err
	}
	return x.end(ctx, call(x))
}

// moveParts is move for collectives between a part and a whole of WorldSize
// parts; the transfer's count is the part's.
func moveParts(ctx context.Context, op string, c comm.Communicator, dst, src, part, whole *runtime.Tensor,
	call func(x transfer) comm.Call) error {
	if err := base.CheckComm(c); err != nil {
		return base.OpError(op, err)
	}
	if part != nil && whole != nil && part.Len()*c.WorldSize() != whole.Len() {
		return base.ShapeError(op, "world size %d and %d elements a rank need %d, the tensor has %d",
			c.WorldSize(), part.Len(), part.Len()*c.WorldSize(), whole.Len())
	}
	return move(ctx, op, c, dst, src, func(x transfer) comm.Call {
		x.count = part.Len()
		return call(x)
	})
}

// end makes a call, and the device wait for it.
func (x *transfer) end(ctx context.Context, call comm.Call) error {
	return x.finish(ctx, call.Make(x.order.C))
}

// finish takes the error of what was submitted, and makes the device wait for
// it.
func (x *transfer) finish(ctx context.Context, err error) error {
	if err != nil {
		return base.OpError(x.op, err)
	}
	return base.OpError(x.op, x.order.ComputeAfterComm(ctx))
}

// checkCounts checks the counts of a V-collective against a tensor that they fill
// and returns the displacements.
func checkCounts(op string, c comm.Communicator, countsRole string, counts []int, role string,
	t *runtime.Tensor) ([]int, error) {
	if err := base.CheckComm(c); err != nil {
		return nil, base.OpError(op, err)
	}
	if len(counts) != c.WorldSize() {
		return nil, base.OpError(op, fmt.Errorf("%w: %s has length %d, want %d",
			comm.ErrArgument, countsRole, len(counts), c.WorldSize()))
	}
	for r, n := range counts {
		if n < 0 {
			return nil, base.OpError(op, fmt.Errorf("%w: %s[%d] = %d is negative", comm.ErrArgument, countsRole, r, n))
		}
	}
	displs := make([]int, len(counts))
	sum := base.Displacements(counts, displs)
	if t != nil && t.Len() != sum {
		return nil, base.ShapeError(op, "%s sum up to %d, %s has %d elements", countsRole, sum, role, t.Len())
	}
	return displs, nil
}
