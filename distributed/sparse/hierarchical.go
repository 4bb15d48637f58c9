package sparse

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// Hierarchical is a [Reducer] for ranks whose links differ, as those within a host and
// between hosts do (a hierarchical allreduce): along the inner dimensions of a
// [distributed.Mesh], the ranks of a host, gradients are reduced densely, and only along the
// outer one, between hosts, by a sparse pattern.
//
// A step is a reduce-scatter along each inner dimension, the last one first,
// which leaves each rank with a share of the average of its host; the pattern,
// between the ranks that have the same share on all hosts; and an allgather along
// each inner dimension. So with R ranks on a host, all of which use the links, a
// rank sends 1/R of what one on each host would. The residual is that of the
// share, and in its units, those of averages over a host: of each element, the
// sum over the hosts of average and old residual is the number of hosts times the
// result, plus the sum of the new residuals.
//
// Like a Reducer, it belongs to one goroutine at a time, and so do the calls of the
// mesh's communicators during a step.
type Hierarchical struct {
	rt     runtime.Runtime
	n      int
	inner  []*innerDim // the fastest dimension first
	sparse *Reducer    // between the hosts, of this rank's share

	inside struct { // of the last step, along the inner dimensions
		sent metered.Traffic
		time time.Duration
	}
	err    error
	closed bool
}

// innerDim is an inner dimension: what the level before it has is cut into as
// many equal parts as there are ranks along it, and a rest of fewer elements than
// that, which belongs to the last rank.
type innerDim struct {
	c          *metered.Communicator
	order      base.Order
	part, rest int
	from, n    int // this rank's share of what the level before has
	memory     uintptr
	calls      [2]comm.Call
	share      *runtime.Tensor // in the memory, of the type of the last gradient
}

// NewHierarchical prepares the reduction of a tensor of n elements in rt's memory. dims
// are names of dimensions of mesh, the outer one first; without names they are all
// of them in their order. It does not communicate. All ranks of mesh pass the same
// n, cfg and dims.
//
// K = Density * n is of a rank's share. Errors are those of [New], and
// [comm.ErrArgument] for a dimension that mesh does not have, or that is named
// twice; [comm.ErrUnsupported] for ClipNorm and for a NonFinite that is not
// [PassNonFinite], which take more than the ranks between hosts know. A step is no
// transaction ([Config].NoUndo).
func NewHierarchical(rt runtime.Runtime, mesh *distributed.Mesh, n int, cfg Config, dims ...string) (*Hierarchical, error) {
	const op = "hierarchical"
	if rt == nil || mesh == nil {
		return nil, base.OpError(op, fmt.Errorf("%w: runtime or mesh is nil", comm.ErrArgument))
	}
	if cfg.ClipNorm != 0 || cfg.NonFinite > PassNonFinite {
		return nil, base.OpError(op, fmt.Errorf("%w: ClipNorm and NonFinite need all ranks of a gradient", comm.ErrUnsupported))
	}
	if cfg.InPlace {
		return nil, base.ConfigError("InPlace with a hierarchical allreduce, whose tensors hold the average of a host")
	}
	cfg.NoUndo = true
	if n < 0 {
		return nil, base.OpError(op, fmt.Errorf("%w: %d elements", comm.ErrArgument, n))
	}
	if len(dims) == 0 {
		for _, d := range mesh.Dims() {
			dims = append(dims, d.Name)
		}
	}
	l := &Hierarchical{rt: rt, n: n}
	for i, name := range slices.Backward(dims) {
		c, err := mesh.Comm(name)
		switch {
		case err != nil:
		case slices.Contains(dims[:i], name):
			err = fmt.Errorf("%w: named twice", comm.ErrArgument)
		case i == 0:
			l.sparse, err = New(rt, c, n, cfg)
		default:
			n, err = l.add(c, n)
		}
		if err != nil {
			return nil, base.OpError(op, errors.Join(fmt.Errorf("dimension %q: %w", name, err), l.Close()))
		}
	}
	return l, nil
}

// add makes a level out of c, below which there are n elements, and returns how
// many of them are this rank's.
func (l *Hierarchical) add(c comm.Communicator, n int) (share int, err error) {
	if err := comm.CheckDevice(c, l.rt.Device()); err != nil {
		return 0, err
	}
	rank, size := c.Rank(), c.WorldSize()
	v := &innerDim{c: metered.New(c), part: n / size, rest: n % size}
	v.order = base.NewOrder(l.rt, v.c)
	v.from, v.n = rank*v.part, v.part
	if v.last() {
		v.n += v.rest
	}
	if v.memory, err = l.rt.Allocate(v.n * dtype.F32.Size()); err != nil {
		return 0, err
	}
	l.inner = append(l.inner, v)
	return v.n, nil
}

// last reports whether this is the last rank of a level.
func (v *innerDim) last() bool { return v.c.Rank() == v.c.WorldSize()-1 }

// AllReduce replaces t by (an approximation of) the average over all ranks of the
// dimensions, the same bits on each of them. What [Reducer.AllReduce] says of t, of
// results and of errors with [Config].NoUndo holds here too; before the host
// reads a result, it calls Sync of the last dimension's communicator.
func (l *Hierarchical) AllReduce(ctx context.Context, t *runtime.Tensor) error {
	const op = "hierarchical allreduce"
	if l.closed {
		return base.OpError(op, base.ClosedError("the Hierarchical"))
	}
	if l.err != nil {
		return base.OpError(op, l.err)
	}
	if _, err := checkGradient(op, l.rt, l.sparse.c, l.n, t); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return base.OpError(op, comm.ContextError(ctx))
	}
	l.err = l.reduce(ctx, t)
	return base.OpError(op, l.err)
}

func (l *Hierarchical) reduce(ctx context.Context, t *runtime.Tensor) error {
	sent, started := l.traffic(), time.Now()
	whole := t
	for _, v := range l.inner {
		if err := v.reduceScatter(ctx, l.rt, whole); err != nil {
			return err
		}
		whole = v.share
	}
	reducing := time.Now()
	if err := l.sparse.AllReduce(ctx, whole); err != nil {
		return err
	}
	gathering := time.Now()
	for i, v := range slices.Backward(l.inner) {
		whole = t
		if i > 0 {
			whole = l.inner[i-1].share
		}
		if err := v.allgather(ctx, l.rt, whole); err != nil {
			return err
		}
	}
	l.inside.time = reducing.Sub(started) + time.Since(gathering)
	after := l.traffic()
	l.inside.sent = metered.Traffic{SentElements: after.SentElements - sent.SentElements, SentBytes: after.SentBytes - sent.SentBytes}
	return nil
}

// traffic is what went along the inner dimensions so far.
func (l *Hierarchical) traffic() (sum metered.Traffic) {
	for _, v := range l.inner {
		t := v.c.Totals()
		sum.SentElements += t.SentElements
		sum.SentBytes += t.SentBytes
	}
	return sum
}

// reduceScatter leaves this rank's share of the average of whole in v.share.
func (v *innerDim) reduceScatter(ctx context.Context, rt runtime.Runtime, whole *runtime.Tensor) error {
	from, err := whole.Ptr()
	if err != nil {
		return err
	}
	dt := whole.DType()
	if v.share == nil || v.share.DType() != dt {
		if v.share, err = runtime.Wrap(rt, v.memory, dt, []int{v.n}, nil, nil); err != nil {
			return err
		}
	}
	rest := uintptr(0) // only the last rank receives it
	if v.last() {
		rest = elementAt(v.memory, v.part, dt)
	}
	v.calls[0] = comm.ReduceScatterCall(from, v.memory, v.part, dt, comm.Avg)
	v.calls[1] = comm.ReduceCall(v.restOf(from, dt), rest, v.rest, dt, comm.Avg, v.c.WorldSize()-1)
	return v.together(ctx)
}

// allgather puts the shares of all ranks back together.
func (v *innerDim) allgather(ctx context.Context, rt runtime.Runtime, whole *runtime.Tensor) error {
	to, err := whole.Ptr()
	if err != nil {
		return err
	}
	dt := whole.DType()
	if v.rest > 0 && v.last() {
		if err := rt.Copy(v.restOf(to, dt), elementAt(v.memory, v.part, dt), v.rest*dt.Size()); err != nil {
			return err
		}
	}
	v.calls[0] = comm.AllGatherCall(v.memory, to, v.part, dt)
	v.calls[1] = comm.BroadcastCall(v.restOf(to, dt), v.rest, dt, v.c.WorldSize()-1)
	return v.together(ctx)
}

// restOf is the address of what the last rank has beyond its part.
func (v *innerDim) restOf(whole uintptr, dt dtype.DType) uintptr {
	return elementAt(whole, v.part*v.c.WorldSize(), dt)
}

// elementAt is the address of element i.
func elementAt(p uintptr, i int, dt dtype.DType) uintptr { return p + uintptr(i*dt.Size()) }

// together makes the call for the parts and, where there is a rest, that for it.
func (v *innerDim) together(ctx context.Context) error {
	return v.order.Around(ctx, func() error {
		if v.rest > 0 {
			return v.c.Group(v.calls[:]...)
		}
		return v.calls[0].Make(v.c)
	})
}

// Stats returns what the last step did: as that of a [Reducer] of this rank's
// share, whose numbers are those between the hosts, with what went along the inner
// dimensions beside them.
func (l *Hierarchical) Stats(ctx context.Context) (Stats, error) {
	s, err := l.sparse.Stats(ctx)
	s.InnerElements, s.InnerBytes, s.InnerTime = l.inside.sent.SentElements, l.inside.sent.SentBytes, l.inside.time
	return s, err
}

// Share returns which elements of a tensor this rank's share is: [from, to).
func (l *Hierarchical) Share() (from, to int) {
	for _, v := range l.inner {
		from += v.from
	}
	return from, from + l.sparse.n
}

// Residual returns the residual of this rank's share, as [Reducer.Residual] does.
func (l *Hierarchical) Residual() (*runtime.Tensor, error) { return l.sparse.Residual() }

// State returns what a Hierarchical of the same mesh and configuration needs to go on
// from here, as [Reducer.State] does.
func (l *Hierarchical) State(ctx context.Context) ([]byte, error) { return l.sparse.State(ctx) }

// Restore makes l what it was when [Hierarchical.State] returned state, as
// [Reducer.Restore] does. Each rank restores its own: shares of equal length are
// not told apart.
func (l *Hierarchical) Restore(ctx context.Context, state []byte) error {
	return l.sparse.Restore(ctx, state)
}

// Close frees the memory. The mesh and tensors stay as they are. Closing twice is
// fine. After an error, see [Reducer.Close]; the communicators to close are those
// of the mesh.
func (l *Hierarchical) Close() error {
	l.closed = true
	var errs []error
	if l.sparse != nil {
		errs = append(errs, l.sparse.Close())
	}
	for _, v := range l.inner {
		err := v.order.DrainToFree()
		if err == nil {
			err = l.rt.Deallocate(v.memory)
			v.memory = 0
		}
		errs = append(errs, err)
	}
	return base.OpError("hierarchical close", errors.Join(errs...))
}
