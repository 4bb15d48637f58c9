package ddp

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// New prepares the reduction of gradients that have the lengths and
// the types of params, in the order of the forward pass: the parameters
// themselves, for example, contiguous and in memory of rt's device and compute
// stream ([runtime.ErrDevice]). Params are neither written nor kept. Two that share memory
// are [comm.ErrArgument]: a tied parameter is registered once, and its gradient is the sum over its uses.
//
// All ranks call New together, with the same lengths, types and configuration. It allocates symmetric memory if the
// communicator has it, and makes the choices of [sparse.Auto]. Before the first step with a communicator, the ranks
// compare lengths, types, configuration and the version of this module. A difference is [comm.ErrMismatch] on all of
// them, and the error names it as far as there is room. That step waits for the device and allocates memory, so it must
// come before the runtime is frozen.
func New(ctx context.Context, rt runtime.Runtime, c comm.Communicator, params []*runtime.Tensor,
	cfg Config) (*Gradients, error) {
	const op = "gradient sync"
	if err := base.Reaches(rt, c); err != nil {
		return nil, base.OpError(op, err)
	}
	n := len(params)
	g := &Gradients{
		rt:        rt,
		meter:     metered.New(c),
		op:        comm.Avg,
		gradients: make([]gradient, n),
		results:   make([]*runtime.Tensor, n),
		spans:     base.NewSpans(n),
	}
	g.step.tensors = make([]*runtime.Tensor, n)
	g.step.absent = make([]bool, n)
	g.step.folded = make([]bool, n)
	if cfg.Sum {
		g.op = comm.Sum
	}
	g.order = base.NewOrder(rt, g.meter)
	vectorsMeant := cfg.DenseUpTo != 0
	cfg, err := cfg.withDefaults(g.order.Streams != nil)
	if err != nil {
		return nil, err
	}
	g.cfg = cfg
	if _, err := kernel.Lookup(rt); cfg.Weighted && err != nil {
		return nil, base.OpError(op, err)
	}
	for i, t := range params {
		if err := g.reachable(t); err != nil {
			return nil, base.OpError(op, gradientError(i, err))
		}
		compressed := cfg.Pattern != "" && cfg.Pattern != sparsity.Dense
		if cfg.Weighted {
			if err := base.CheckGradientType(t.DType()); err != nil {
				return nil, base.OpError(op, gradientError(i, fmt.Errorf("with Weighted: %w", err)))
			}
		}
		small := len(t.Shape()) <= 1 && t.Len() <= cfg.DenseUpTo
		g.gradients[i] = gradient{
			n:      t.Len(),
			dt:     t.DType(),
			shape:  t.Shape(),
			vector: compressed && small,
		}
	}
	if err := base.Disjoint("parameter", params); err != nil {
		return nil, base.OpError(op, err)
	}
	if !vectorsMeant && g.vectorsAlone() {
		return nil, base.OpError(op, fmt.Errorf("%w: all gradients are vectors, which stay dense beside pattern %s: make "+
			"their tensors with shapes, as by cpu.Wrap(rt, data, rows, cols), or set DenseUpTo, to -1 to compress vectors "+
			"too", comm.ErrArgument, cfg.Pattern))
	}
	g.err = g.prepare(ctx)
	if g.err != nil {
		return nil, base.OpError(op, errors.Join(g.err, g.Close()))
	}
	g.newStep()
	return g, nil
}

// prepare makes what new Gradients need. After an error, Close frees what there is of it.
func (g *Gradients) prepare(ctx context.Context) error {
	var err error
	g.lines, err = g.newLines(ctx)
	if err != nil {
		return err
	}
	if err := g.arrange(ctx, nil); err != nil {
		return err
	}
	return g.newRoster()
}

// vectorsAlone reports whether a sparse pattern has nothing to reduce.
func (g *Gradients) vectorsAlone() bool {
	matrix := func(p gradient) bool { return !p.vector }
	return len(g.gradients) > 0 && !slices.ContainsFunc(g.gradients, matrix)
}

// Close frees the buckets. Gradients and communicator stay as they are.
// Closing twice is fine. Where the communicator has symmetric memory, all ranks
// close together; after an error that memory is left to the communicator's Close,
// because the peers may be calling something else.
//
// In the middle of a step, Close waits for the buckets that were launched, because the communicator still reads and
// writes them. If the peers do not reduce theirs within 5 seconds, Close returns [comm.ErrTimeout] and aborts the
// communicator. After any error of that wait, the buckets' memory is not freed, because the communicator may still
// write it. Then close the communicator, and the Gradients again before the gradients are freed: they may be buckets
// themselves.
func (g *Gradients) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), base.DrainLimit)
	defer cancel()
	if g.async != nil {
		_ = g.async.wait(ctx, g.lines.all) // what it leaves in flight, DrainToFree finds
	}
	drained := g.order.DrainToFree()
	if drained == nil && g.undecided && !g.closed {
		_ = g.reportNote(ctx) // all is freed, whether or not the device can be asked
	}
	_, symmetric := comm.As[comm.SymmetricAllocator](g.meter)
	errs := []error{drained, g.dismiss(ctx, g.arrangement, drained != nil || symmetric && g.err != nil)}
	g.closed = true
	tensors := []*runtime.Tensor{g.roster.memory}
	for _, p := range g.gradients {
		tensors = append(tensors, p.spare, p.sum.tensor)
		tensors = append(tensors, p.held.tensors...)
	}
	for _, t := range tensors {
		if t != nil && drained == nil {
			errs = append(errs, t.Free())
		}
	}
	if errors.Join(errs...) == nil { // otherwise the communicator may still write its memory
		errs = append(errs, g.side.close())
		g.side = nil
	}
	errs = append(errs, g.lines.close())
	return base.OpError("gradient sync close", errors.Join(errs...))
}
