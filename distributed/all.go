package distributed

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/runtime"
)

// AllReduceAll reduces every tensor as [AllReduce] does, in one group. That is cheaper than one call after the other,
// especially for small tensors. The types may differ. All ranks pass the same number of tensors, of the same lengths
// and types, in the same order. Two that share memory are [comm.ErrArgument], because that memory would be reduced
// twice.
//
// Use it for occasional reductions, such as the averages of batch normalization. For gradients, package ddp overlaps
// communication with the backward pass.
func AllReduceAll(ctx context.Context, c comm.Communicator, tensors []*runtime.Tensor, op comm.ReduceOp) error {
	return all(ctx, "allreduce all", c, tensors, func(t transfer) comm.Call {
		return comm.AllReduceCall(t.src, t.dst, t.count, t.dt, op)
	})
}

// BroadcastAll copies root's tensors to every rank's, in one group. Use it for a model's parameters and its optimizer's
// state, so that all ranks start from the same values. All ranks pass the same number of tensors, of the same lengths
// and types, in the same order. Two that share memory are [comm.ErrArgument].
func BroadcastAll(ctx context.Context, c comm.Communicator, tensors []*runtime.Tensor, root int) error {
	return all(ctx, "broadcast all", c, tensors, func(t transfer) comm.Call {
		return comm.BroadcastCall(t.dst, t.count, t.dt, root)
	})
}

// all makes a call for each tensor, together.
func all(ctx context.Context, op string, c comm.Communicator, tensors []*runtime.Tensor,
	call func(transfer) comm.Call) error {
	if err := base.CheckComm(c); err != nil {
		return base.OpError(op, err)
	}
	if len(tensors) == 0 {
		return nil
	}
	calls := make([]comm.Call, len(tensors))
	for i, t := range tensors {
		p, err := base.Address(op, fmt.Sprintf("tensor %d", i), c, t)
		if err != nil {
			return err
		}
		if err := base.SameStream(tensors[0].Runtime(), t.Runtime()); err != nil {
			return base.OpError(op, fmt.Errorf("tensors 0 and %d: %w", i, err))
		}
		calls[i] = call(transfer{
			src:   p,
			dst:   p,
			count: t.Len(),
			dt:    t.DType(),
		})
	}
	if err := base.Disjoint("tensor", tensors); err != nil {
		return base.OpError(op, err)
	}
	x := transfer{op: op, order: base.NewOrder(tensors[0].Runtime(), c)}
	if err := x.order.CommAfterCompute(ctx); err != nil {
		return base.OpError(op, err)
	}
	return x.finish(ctx, c.Group(calls...))
}
