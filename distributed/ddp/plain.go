package ddp

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/runtime"
)

// plain is an allreduce of the gradients where they are, which cannot be rolled back.
type plain struct {
	g     *Gradients  // whose communicator reduces
	b     *bucket     // the bucket
	calls []comm.Call // reused
}

// Select implements reducer. The result is in the bucket or in the gradients.
func (p *plain) Select(context.Context, engine.Input) error {
	p.calls = p.calls[:0]
	add := func(t *runtime.Tensor) error {
		ptr, err := t.Ptr()
		p.calls = append(p.calls, comm.AllReduceCall(ptr, ptr, t.Len(), p.b.wire, p.g.reduction()))
		return err
	}
	if p.b.flat != nil {
		if err := add(p.b.flat); err != nil {
			return err
		}
	}
	for _, i := range p.b.separate {
		if err := add(p.g.step.tensors[i]); err != nil {
			return gradientError(i, err)
		}
	}
	return nil
}

func (p *plain) Exchange(ctx context.Context) error {
	if err := p.g.order.CommAfterCompute(ctx); err != nil {
		return err
	}
	if len(p.calls) == 1 {
		return p.calls[0].Make(p.g.meter)
	}
	return p.g.meter.Group(p.calls...)
}

// Complete implements reducer, for all buckets that share the order.
func (p *plain) Complete(ctx context.Context) (hostWaited bool, err error) {
	if p.g.order.InFlight() {
		err = p.g.order.ComputeAfterComm(ctx)
	}
	return false, err
}

// Skipped implements reducer. Nothing is skipped.
func (p *plain) Skipped(context.Context) (bool, error) { return false, nil }

func (p *plain) PrepareRestore(context.Context, ...[]byte) (restore func(context.Context) error, err error) {
	return func(context.Context) error { return nil }, nil
}

// The others do nothing, as there is no state.

func (p *plain) Drain(context.Context) error         { return nil }
func (p *plain) InFlight() bool                      { return true }
func (p *plain) Commit(engine.Verdict) error         { return nil }
func (p *plain) RollBack() error                     { return nil }
func (p *plain) JoinTransaction(flags, skip uintptr) {}
func (p *plain) Terms() string                       { return "" }
func (p *plain) State(context.Context) ([]byte, error) {
	return nil, nil
}
func (p *plain) SharedState(context.Context) ([]byte, error) {
	return nil, nil
}
func (p *plain) ScaleResidual(float64) error    { return nil }
func (p *plain) Rebind(comm.Communicator) error { return nil }
func (p *plain) Close() error                   { return nil }
