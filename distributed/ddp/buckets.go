package ddp

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// arrange makes the buckets. patterns are what was chosen for them ([Stats].Patterns),
// nil to choose now.
func (g *Gradients) arrange(ctx context.Context, patterns []string) error {
	g.arrangement = g.fillBuckets()
	if err := g.configure(ctx, patterns); err != nil {
		return err
	}
	if patterns != nil && !slices.Equal(g.patterns, patterns) {
		return fmt.Errorf("%w: patterns are %v, want %v", comm.ErrMismatch, patterns, g.patterns)
	}
	if err := g.allocate(ctx); err != nil {
		return err
	}
	if g.transaction.rollsBack() && g.keepsHost() {
		g.async = newWorker(len(g.buckets), g.exchange)
	}
	return nil
}

// dismiss frees what arrange made. Memory of buckets that may still be written, or is not to be freed by this rank
// alone, stays.
func (g *Gradients) dismiss(ctx context.Context, a arrangement, stays bool) error {
	var errs []error
	if a.async != nil && !g.closed {
		a.async.close()
	}
	for _, b := range a.buckets {
		errs = append(errs, b.free(ctx, stays))
		if b.ready != 0 {
			errs = append(errs, g.side.ops.DestroyEvent(b.ready))
			b.ready = 0
		}
	}
	if a.transaction != nil {
		errs = append(errs, a.transaction.close())
	}
	return errors.Join(errs...)
}

// free closes the reducer and frees the memory, unless that stays.
func (b *bucket) free(ctx context.Context, stays bool) error {
	if b.reducer != nil {
		if err := b.reducer.Close(); err != nil {
			return err
		}
	}
	if b.memory == nil || stays {
		return nil
	}
	err := b.memory.Free(ctx)
	if errors.Is(err, comm.ErrClosed) { // by a communicator that has freed its memory
		return nil
	}
	return err
}

// fillBuckets puts the gradients into buckets, a filling one for each type, and one
// for vectors of it, in the order in which a backward pass is taken to complete them: the
// last one first. The buckets are reduced in the order in which they are complete then.
func (g *Gradients) fillBuckets() arrangement {
	type contents struct {
		dt      dtype.DType // type of the elements
		vectors bool        // small gradients of one dimension only
	}
	filling := make(map[contents]*bucket)
	a := arrangement{bucketOf: make([]int, len(g.gradients))}
	for i := range slices.Backward(g.gradients) {
		content := contents{g.gradients[i].dt, g.gradients[i].vector}
		b := filling[content]
		bytes := g.gradients[i].n * content.dt.Size()
		limit := g.cfg.BucketBytes
		if b != nil && b.first {
			limit = min(limit, firstBucketBytes)
		}
		if b == nil || b.bytes+bytes > limit {
			b = &bucket{
				dt:      content.dt,
				wire:    content.dt,
				first:   b == nil,
				vectors: content.vectors,
			}
			filling[content] = b
		}
		b.params = append(b.params, i)
		b.bytes += bytes
		// Which gets a gradient last is complete last.
		a.buckets = append(slices.DeleteFunc(a.buckets, func(o *bucket) bool { return o == b }), b)
	}
	for place, b := range a.buckets {
		for _, i := range b.params {
			a.bucketOf[i] = place
		}
	}
	return a
}

// configure decides how the buckets are reduced. All that a step means follows from the configuration,
// and is refused or resolved before the patterns that are left to [sparse.Auto] are chosen.
func (g *Gradients) configure(ctx context.Context, patterns []string) error {
	whole, transactional, err := g.resolve()
	if err != nil {
		return err
	}
	if err := g.checkTypes(transactional); err != nil {
		return err
	}
	if err := g.choose(ctx, whole, patterns); err != nil {
		return err
	}
	g.patterns = make([]string, len(g.buckets))
	for i, b := range g.buckets {
		g.patterns[i] = b.cfg.Pattern
	}
	if !transactional {
		for _, b := range g.buckets {
			b.reducer = &plain{g: g, b: b}
			if g.cfg.Shard {
				b.reducer = &sharded{plain{g: g, b: b}}
			}
		}
		g.transaction, err = newTransaction(g, nil, whole)
		return err
	}
	if _, err := kernel.Lookup(g.rt); err != nil {
		return err
	}
	if g.side == nil {
		if g.side, err = newSideStream(g.rt, g.meter); err != nil {
			return err
		}
	}
	kernels, err := kernel.Lookup(g.runtime())
	if err != nil {
		return err
	}
	g.transaction, err = newTransaction(g, kernels, whole)
	return err
}

// resolve returns the configuration with its defaults and whether it asks for more than plain allreduces, or the
// error of what excludes each other.
func (g *Gradients) resolve() (whole engine.Settings, transactional bool, err error) {
	whole, err = engine.Config(g.cfg.Config).Settings()
	if err != nil {
		return whole, false, err
	}
	if err := g.cfg.checkReproducible(&whole); err != nil || g.cfg.Reproducible > 0 {
		return whole, true, err
	}
	transactional = !whole.Plain() || g.cfg.Reducer != nil || g.cfg.Mesh != nil
	if transactional && (g.cfg.Sum || g.cfg.Wire != dtype.Invalid) {
		return whole, transactional, fmt.Errorf("%w: Sum or Wire, which are for plain dense buckets, with a mesh, "+
			"or some that are sparse, clipped or judged", comm.ErrArgument)
	}
	return whole, transactional, g.cfg.checkShard(transactional)
}

// bucketConfig returns how a bucket is reduced, where all of them are as whole says.
func bucketConfig(whole engine.Settings, b *bucket) engine.Settings {
	whole.ClipNorm = 0 // all of them are clipped by one factor
	if b.vectors {
		whole.Pattern = sparsity.Dense
		whole.Values = sparsity.F32
		whole.Schedule = engine.Schedule{}
		whole.Selector = nil
	}
	return whole
}

// bucketError is err, of bucket i, and says which gradients that has.
func (g *Gradients) bucketError(i int, err error) error {
	params := g.buckets[i].params
	if len(params) == 1 {
		return fmt.Errorf("bucket %d: %w", i, gradientError(params[0], err))
	}
	return fmt.Errorf("bucket %d: gradients %d to %d: %w", i, slices.Min(params), slices.Max(params), err)
}

// checkTypes refuses gradients of types that their buckets cannot reduce, and decides as what plain ones travel.
func (g *Gradients) checkTypes(transactional bool) error {
	for _, b := range g.buckets {
		var err error
		switch {
		case transactional:
			err = base.CheckGradientType(b.dt)
		default:
			if b.dt == dtype.F32 && g.cfg.Wire != dtype.Invalid {
				b.wire = g.cfg.Wire
			}
			if !g.op.Defined(b.wire) {
				err = fmt.Errorf("%w: no %v of %v", comm.ErrUnsupported, g.op, b.wire)
			}
		}
		if err != nil {
			return gradientError(slices.Min(b.params), err)
		}
	}
	return nil
}

// keepsHost reports whether an exchange of a bucket keeps the host.
func (g *Gradients) keepsHost() bool {
	if g.order.Streams == nil {
		return true
	}
	needsHost := func(b *bucket) bool {
		return sparsity.NeedsHost(b.cfg.Pattern)
	}
	return g.side != nil && slices.ContainsFunc(g.buckets, needsHost)
}

// choose chooses for the buckets that leave their pattern to [sparse.Auto], once for those
// that are alike, or takes what was chosen before.
func (g *Gradients) choose(ctx context.Context, whole engine.Settings, patterns []string) error {
	choices := make(engine.Choices)
	for i, b := range g.buckets {
		b.cfg = bucketConfig(whole, b)
		if b.cfg.Pattern != sparsity.Auto {
			continue
		}
		var pattern string
		if patterns != nil {
			pattern = patterns[i]
		} else {
			choice, err := choices.Of(ctx, g.rt, g.lines.outer, g.lines.share(b.len()), b.dt, b.cfg)
			if err != nil {
				if g.lines.mesh != nil {
					comm.AbortAll(g.meter, err) // ranks of other lines wait for this one below
				}
				return g.bucketError(i, err)
			}
			pattern = choice.Pattern
			if g.lines.mesh != nil {
				// Each line of ranks between hosts has measured for itself.
				name, err := distributed.BroadcastBytes(ctx, g.rt, g.meter, []byte(pattern), 0)
				if err != nil {
					return g.bucketError(i, err)
				}
				pattern = string(name)
			}
		}
		var err error
		b.cfg, err = b.cfg.Choose(pattern)
		if err != nil {
			return g.bucketError(i, err)
		}
	}
	return nil
}

// allocate allocates what the buckets need. The sparse ones, of which nobody reads
// the gradient any more when they have started, share memory to put it together.
func (g *Gradients) allocate(ctx context.Context) error {
	shared := g.turnMemory()
	for i, b := range g.buckets {
		n := g.join(b)
		alone := !g.joins() || len(b.joined) < 2 && b.wire == b.dt
		switch {
		case g.cfg.BucketViews || g.cfg.Shard:
		case alone:
			b.joined = nil
			b.separate = b.params
			continue
		case b.shares():
			shared = max(shared, b.bytes)
			continue
		}
		if err := g.allocateBucket(ctx, b, g.padded(n)); err != nil {
			return g.bucketError(i, err)
		}
	}
	if err := g.transaction.buffers.Allocate(g.transaction.rt, &g.transaction.shared, shared); err != nil {
		return err
	}
	for i, b := range g.buckets {
		if err := g.equip(i, b); err != nil {
			return g.bucketError(i, err)
		}
		t := g.transaction // for whose verdict the bucket counts its non-finite entries
		b.reducer.JoinTransaction(base.At(t.flags, i*t.c.WorldSize()), t.skip)
	}
	return g.cut()
}

// join decides which gradients of a bucket are put together, and returns how many elements these have.
func (g *Gradients) join(b *bucket) int {
	whole := g.cfg.BucketViews || g.cfg.Shard || !g.transaction.plain || g.order.Streams != nil || b.wire != b.dt
	n := 0
	for _, p := range b.params {
		small := g.gradients[p].n*b.dt.Size() <= smallBytes
		if !whole && !small {
			b.separate = append(b.separate, p)
			continue
		}
		b.joined = append(b.joined, p)
		n += g.gradients[p].n
	}
	return n
}

// allocateBucket allocates memory for n elements of gradients that are put together, or live there.
func (g *Gradients) allocateBucket(ctx context.Context, b *bucket, n int) error {
	ptr, err := g.bucketMemory(ctx, b, n)
	if err != nil {
		return err
	}
	b.flat, err = runtime.Wrap(g.rt, ptr, b.wire, []int{n}, nil, nil)
	if err != nil {
		return err
	}
	if !g.joins() {
		b.joined = nil
	}
	if g.cfg.BucketViews {
		return g.view(b, ptr)
	}
	return nil
}

// bucketMemory allocates memory of the communicator, or for views of a transaction, which survive it, of the runtime.
func (g *Gradients) bucketMemory(ctx context.Context, b *bucket, n int) (uintptr, error) {
	if g.cfg.BucketViews && !g.transaction.plain {
		err := g.transaction.buffers.Allocate(g.transaction.rt, &b.views, b.bytes)
		return b.views.Ptr, err
	}
	memory, err := comm.Allocate(ctx, g.meter, g.rt, n*b.wire.Size())
	if err != nil {
		return 0, err
	}
	b.memory = memory
	return memory.Ptr, nil
}

// equip makes what a bucket has not had yet: the tensor in memory that it shares, its reducer and its event.
func (g *Gradients) equip(i int, b *bucket) error {
	var err error
	if b.flat == nil && b.joined != nil {
		b.flat, err = runtime.Wrap(g.rt, g.transaction.shared.Ptr, b.dt, []int{b.len()}, nil, nil)
		if err != nil {
			return err
		}
	}
	if b.reducer == nil {
		b.reducer, err = g.newReducer(i, b)
		if err != nil {
			return err
		}
	}
	if g.side != nil && !g.transaction.plain && b.ready == 0 {
		b.ready, err = g.side.ops.CreateEvent()
	}
	return err
}

// newReducer makes what reduces a bucket that is not plain.
func (g *Gradients) newReducer(i int, b *bucket) (reducer, error) {
	if g.cfg.Reproducible > 0 {
		return g.newReproducible(i, b)
	}
	if g.lines.mesh != nil {
		return g.newMeshed(i, b)
	}
	var parts []Part
	offset := 0
	for _, p := range b.params {
		parts = append(parts, Part{p, g.gradients[p].shape, offset})
		offset += g.gradients[p].n
	}
	return g.compress(i, b, b.cfg, g.meter, b.len(), parts)
}

// compress makes what reduces n elements of a bucket along a communicator.
func (g *Gradients) compress(i int, b *bucket, cfg engine.Settings, to comm.Communicator, n int,
	parts []Part) (reducer, error) {
	if g.cfg.Reducer != nil {
		r, err := g.newCustom(i, b.dt, to, n, parts)
		if r != nil || err != nil {
			return r, err
		}
	}
	s, err := engine.NewReducer(g.runtime(), to, n, cfg)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// view makes the tensors of the gradients that live in a bucket, at ptr, unless they survived. They are zero.
func (g *Gradients) view(b *bucket, ptr uintptr) error {
	if g.views == nil {
		g.views = make([]*runtime.Tensor, len(g.gradients))
	}
	for _, i := range b.params {
		if t := g.views[i]; t != nil {
			ptr += uintptr(t.Bytes())
			continue
		}
		t, err := runtime.Wrap(g.rt, ptr, b.dt, g.gradients[i].shape, nil, nil)
		if err != nil {
			return gradientError(i, err)
		}
		if err := t.Fill(0); err != nil {
			return gradientError(i, err)
		}
		g.views[i] = t
		ptr += uintptr(t.Bytes())
	}
	return nil
}

// joins reports whether buckets are put together. Where results are reproducible, gradients are read, and results
// written, where they are.
func (g *Gradients) joins() bool { return g.cfg.Reproducible == 0 }

// copyParts puts gradients of a bucket together, or copies them back.
func (g *Gradients) copyParts(b *bucket, back bool) error {
	if b.flat == nil {
		return nil
	}
	flat, err := b.flat.Ptr()
	if err != nil {
		return err
	}
	for _, i := range b.joined {
		t := g.step.tensors[i]
		param, err := t.Ptr()
		if err != nil {
			return gradientError(i, err)
		}
		if param != flat { // otherwise it lives there
			if err := g.convert(b, flat, param, t.Len(), back); err != nil {
				return err
			}
		}
		flat += uintptr(t.Len() * b.wire.Size())
	}
	return nil
}

// gather puts the gradients of a bucket together. Gradients of weight 0 are zeros.
func (g *Gradients) gather(b *bucket) error {
	if !g.empty() || b.flat == nil {
		return g.copyParts(b, false)
	}
	flat, err := b.flat.Ptr()
	if err != nil {
		return err
	}
	return g.runtime().Fill(flat, b.flat.Len(), b.wire, 0)
}

// copyOnStream copies a tensor on the stream of buckets.
func (g *Gradients) copyOnStream(dst, src *runtime.Tensor) error {
	to, err := dst.Ptr()
	if err != nil {
		return err
	}
	from, err := src.Ptr()
	if err != nil || from == to || src.Bytes() == 0 {
		return err
	}
	return g.runtime().Copy(to, from, src.Bytes())
}

// convert copies n elements of a gradient to its place in a bucket, or back, and
// converts between the gradient's type and that which travels.
func (g *Gradients) convert(b *bucket, flat, gradient uintptr, n int, back bool) error {
	switch {
	case b.wire == b.dt && back:
		return g.runtime().Copy(gradient, flat, n*b.dt.Size())
	case b.wire == b.dt:
		return g.runtime().Copy(flat, gradient, n*b.dt.Size())
	case n == 0:
		return nil
	}
	kernels, err := kernel.Lookup(g.runtime())
	if err != nil {
		return err
	}
	if !back {
		scale := float32(1)
		if g.step.shares == unequalShares {
			scale = float32(g.step.share)
		}
		return kernels.Store(flat, b.wire, gradient, n, scale, 0)
	}
	if err := g.runtime().Fill(gradient, n, b.dt, 0); err != nil {
		return err
	}
	return kernels.Accumulate(kernel.Source{X: gradient, N: n, Grad: flat, DType: b.wire})
}
