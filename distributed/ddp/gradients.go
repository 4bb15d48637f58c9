package ddp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// The size of a gradient bucket unless set. With streams it is that of PyTorch's
// DistributedDataParallel: a bucket is one call, which has to be large to be fast.
// Without, the calls of a bucket are one group, which gains nothing by being
// large, and a small one begins earlier.
const (
	bucketBytes      = 25 << 20
	hostBucketBytes  = 1 << 20
	firstBucketBytes = 1 << 20 // as PyTorch's
	denseUpTo        = 1 << 16 // elements of a gradient of one dimension that is reduced densely
)

// smallBytes is the size up to which a gradient is put together with others on the
// host as well: copying it takes less than a call of its own, some microseconds
// over MPI.
const smallBytes = 16 << 10

// Config says how a [Gradients] works. All ranks use the same.
type Config struct {
	// BucketBytes is how many bytes of gradients are reduced together,
	// 25 MiB unless set, or 1 MiB where the communicator has no streams. A larger tensor
	// is a bucket of its own.
	BucketBytes int
	// Sum adds gradients up instead of averaging them, for programs that divide
	// the loss by the world size: a backend may add faster than it averages. Valid only
	// for dense buckets without clipping or detection of non-finite gradients.
	Sum bool
	// Config is how a bucket is reduced, dense unless set. ClipNorm bounds the norm
	// of the whole gradient, which is known when the last one is ready: so all
	// communication is in Wait then. NonFinite is one for all buckets.
	sparse.Config
	// DenseUpTo: where Config is sparse, gradients of one dimension with at most so
	// many elements, such as biases and the parameters of norms, have separate dense
	// buckets: 65536 unless set, a negative number for none. A tensor of a slice without a shape is one as well: New
	// warns where there are no others.
	DenseUpTo int
	// PerBucket, if set, replaces Config for each bucket: bucket 0 is reduced
	// first and holds gradients registered last. There is no DenseUpTo then. A
	// ClipNorm is 0 or that of Config.
	PerBucket func(bucket, elements int) sparse.Config
	// FirstBucketBytes is the size of the first bucket of each type,
	// 1 MiB unless set, at most BucketBytes: its reduction is to
	// begin early.
	FirstBucketBytes int
	// Rebuild fills the buckets anew after the first step, in the order in which rank
	// 0's gradients became ready. It is for dense buckets: the residual of a
	// sparse one belongs to its gradients.
	Rebuild bool
	// Wire is the type as which dense F32 gradients travel, BF16 or F16: half the
	// bytes. They are rounded before the reduction, which adds up in F32 where the
	// backend does, and once after it. Beyond 65504 an F16 is infinite; BF16 has the
	// range of F32. Unset, they travel as they are.
	Wire dtype.DType
	// BucketViews has the gradients live in the buckets: a backward pass computes them
	// in the tensors that [Gradients.Views] hands out, and nothing is copied
	// (gradient_as_bucket_view in PyTorch). Any other tensor passed to Ready is
	// copied as usual. It excludes Wire and Rebuild.
	BucketViews bool
	// Reducer, if set, returns what reduces a bucket in the place of Config: a compression of the
	// program. nil leaves a bucket to Config.
	Reducer func(b Bucket) (Reducer, error)
	// Shard leaves each rank a shard of each bucket's averages ([Gradients.Shards]), by a
	// reduce-scatter: a rank updates its part of the parameters, and keeps the optimizer's state for that
	// part alone (ZeRO-1, Rajbhandari et al., SC 2020). Then [Gradients.Gather] puts the parameters
	// together. The gradients that Ready was given are not written. It is for plain dense buckets, without
	// Rebuild and Wire.
	Shard bool
	// Mesh, if set, arranges the ranks of a communicator: along the inner dimensions, those within a host,
	// buckets are reduced densely, by a reduce-scatter and an allgather, and along the first one, between
	// hosts, this rank's share of them is reduced as Config, PerBucket and Reducer say. A step is one
	// transaction of all ranks. After an error that not all ranks have, [comm.CloseAll] of the communicator
	// ends the waits of the others, also those along the mesh. New calls Mesh, and [Gradients.Rebind] does,
	// which needs the same share: hosts may be lost or added as a whole. The mesh is closed with the
	// Gradients. Restore takes the states of ranks with that share, in their order along the first dimension.
	Mesh func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error)
	// Uneven has ranks that run out of data sooner than others call
	// [Gradients.Join]. It costs an allreduce of one number in each step.
	Uneven bool
}

// Stats tells what the last step of a [Gradients] did on this rank.
type Stats struct {
	Step    int // number of the step, from 0
	Buckets int
	// Skipped: a gradient was not finite, and by [sparse.SkipNonFinite] the step was rolled back
	// in all buckets, on all ranks.
	Skipped bool
	// SentElements and SentBytes count as in [sparse.Stats], with a Mesh along its first dimension.
	SentElements, SentBytes int64
	// LaunchTime is the host's time in Ready, WaitTime that in Wait: the
	// communication that the backward pass did not hide.
	LaunchTime, WaitTime time.Duration
	// ExchangeTime is what the exchanges of the buckets took on the communication worker, and HiddenTime the part of it in
	// which the backward pass went on: 0 where there is no worker, as with plain buckets.
	ExchangeTime, HiddenTime time.Duration
}

// Gradients averages the gradients of a model over the ranks, or adds them
// up, while the backward pass goes on.
//
// Gradients are put into buckets of one type each, in reverse order of
// registration, because a backward pass computes the last layer's gradient first.
// A bucket is reduced as soon as all its gradients, and all buckets before it,
// are ready: so all ranks reduce the same buckets in the same order, whatever the
// order in which their gradients become ready.
//
// A dense bucket is submitted in Ready and completed in Wait; meanwhile the
// communicator works on it if it has a stream of its own (then buckets and
// compute are ordered by events and the host never waits) or makes progress by
// itself. With streams its gradients are put together, in symmetric memory if
// there is such ([comm.Allocate]); otherwise all but the small ones are reduced
// where they are, as one group.
//
// What a sparse bucket sends is selected in Ready. Without streams the exchange is
// asynchronous: a communication worker, a goroutine of the Gradients, makes it while the
// backward pass goes on (with [sparse.Config].NoUndo, Ready does). With streams, a side
// stream selects, exchanges and merges each bucket after an event of the compute stream, if the
// runtime has such streams ([runtime.StreamForker]); otherwise the compute stream does. If an exchange
// has the host wait ([sparse.NeedsHost]), the worker does it all, or with NoUndo, Ready.
//
// If any bucket is sparse, has a [Reducer], or clipping or detection of non-finite gradients is
// on, all buckets commit or roll back together, unless [sparse.Config].NoUndo is set: results are
// written in Wait, if all buckets have one and all gradients are finite. An error of Ready
// stays until Wait, which returns it too and ends the step: gradients and residuals
// are as before it then, bit for bit, on this rank, and the step can be repeated, or
// left out, with the same communicator or another one ([Gradients.Rebind]). An
// error while results are written stays for good.
//
//	for step := range steps {
//		// backward pass: after the gradient of parameter i is complete
//		err := sync.Ready(ctx, i, gradient)
//		...
//		err = sync.Wait(ctx) // all gradients are averages now
//	}
//
// or, without overlap, [Gradients.ReduceAll].
//
// A Gradients belongs to one goroutine at a time, and so does its
// communicator between the first Ready and the end of Wait.
type Gradients struct {
	rt        runtime.Runtime
	meter     *metered.Communicator
	lines     lines
	order     base.Order
	cfg       Config
	op        comm.ReduceOp // of dense buckets
	gradients []gradient
	active    *runtime.Tensor // with Uneven: whether this rank has data, and how many do

	arrangement
	side   *sideStream // nil: sparse buckets are worked on where gradients are computed
	agreed bool        // the ranks have compared what they reduce

	step    step
	joining []*runtime.Tensor // in the place of what is left out, in Join
	steps   int               // complete ones
	results []*runtime.Tensor // what was given in the last of them
	stats   Stats             // of it
	open    bool              // the device knows whether it was skipped
	err     error             // for good
	closed  bool

	onStage func(bucket int, s sparse.Stage)
	onStep  func(Stats)
	confirm func(context.Context) error // see BeforeCommit
}

// gradient is what outlives steps of one gradient.
type gradient struct {
	n      int
	dt     dtype.DType
	shape  []int
	vector bool            // it goes to a dense bucket of such
	spare  *runtime.Tensor // zeros in its place; nil: never yet
	sum    sum
}

// New prepares the reduction of gradients that have the lengths and
// the types of params, in the order of the forward pass: the parameters
// themselves, for example, contiguous and in memory of rt's device and compute
// stream ([runtime.ErrDevice]). Params are neither written nor kept.
//
// All ranks call it together, with the same lengths, types and configuration: it
// allocates symmetric memory where the communicator has such, and chooses what is
// left to [sparse.Auto]. Before the first step with a communicator they compare them, and
// the version of this module: what differs is [comm.ErrMismatch] on all of them, and
// named as far as there is room. That step waits for the device, and allocates: it
// comes before the runtime is frozen.
func New(ctx context.Context, rt runtime.Runtime, c comm.Communicator, params []*runtime.Tensor, cfg Config) (*Gradients, error) {
	const op = "gradient sync"
	if rt == nil || c == nil {
		return nil, base.OpError(op, fmt.Errorf("%w: runtime or communicator is nil", comm.ErrArgument))
	}
	if cfg.BucketBytes < 0 {
		return nil, base.ConfigError("BucketBytes is %d, want at least 1", cfg.BucketBytes)
	}
	if cfg.FirstBucketBytes < 0 {
		return nil, base.ConfigError("FirstBucketBytes is %d, want at least 1", cfg.FirstBucketBytes)
	}
	if err := cfg.checkWire(); err != nil {
		return nil, err
	}
	if cfg.BucketViews && (cfg.Wire != dtype.Invalid || cfg.Rebuild) {
		return nil, base.ConfigError("BucketViews with Wire %v and Rebuild %v, which move gradients", cfg.Wire, cfg.Rebuild)
	}
	n := len(params)
	g := &Gradients{rt: rt, meter: metered.New(c), op: comm.Avg, gradients: make([]gradient, n), results: make([]*runtime.Tensor, n),
		step: step{given: make([]*runtime.Tensor, n), absent: make([]bool, n), folded: make([]bool, n)}}
	if cfg.Sum {
		g.op = comm.Sum
	}
	g.order = base.NewOrder(rt, g.meter)
	if cfg.BucketBytes == 0 {
		cfg.BucketBytes = bucketBytes
		if g.order.Streams == nil {
			cfg.BucketBytes = hostBucketBytes
		}
	}
	if cfg.FirstBucketBytes == 0 {
		cfg.FirstBucketBytes = firstBucketBytes
	}
	if cfg.DenseUpTo == 0 {
		cfg.DenseUpTo = denseUpTo
	}
	g.cfg = cfg
	for i, t := range params {
		if _, err := g.address(t); err != nil {
			return nil, base.OpError(op, fmt.Errorf("gradient %d: %w", i, err))
		}
		compressed := cfg.PerBucket == nil && cfg.Pattern != "" && cfg.Pattern != sparse.Dense
		g.gradients[i] = gradient{n: t.Len(), dt: t.DType(), shape: t.Shape(), vector: compressed && len(t.Shape()) <= 1 && t.Len() <= cfg.DenseUpTo}
	}
	if n > 0 && !slices.ContainsFunc(g.gradients, func(p gradient) bool { return !p.vector }) && c.Rank() == 0 {
		slog.Warn("ddp: all gradients are vectors, which are reduced densely; make their tensors with shapes, or set DenseUpTo to -1", "pattern", cfg.Pattern)
	}
	if g.lines, g.err = g.newLines(ctx); g.err == nil {
		g.err = g.arrange(ctx, backward(n), nil)
	}
	if g.err == nil {
		g.err = g.prepareJoin()
	}
	if g.err != nil {
		return nil, base.OpError(op, errors.Join(g.err, g.Close()))
	}
	g.newStep()
	return g, nil
}

// address checks a tensor and returns its address.
func (g *Gradients) address(t *runtime.Tensor) (uintptr, error) {
	p, err := base.Address("gradient", "source", g.meter, t)
	if err == nil {
		err = base.SameStream(g.rt, t.Runtime())
	}
	return p, err
}

// Views returns with [Config].BucketViews the tensors in which a backward
// pass computes the gradients, in the order of registration, and nil otherwise. They
// have the shapes and types of the parameters, are aligned to their elements, start as
// zeros, and are valid until Close. After a Restore that makes other buckets, and after
// a [Gradients.Rebind] where steps are plain allreduces, ask again: there are others,
// and what these held is lost.
func (g *Gradients) Views() []*runtime.Tensor { return slices.Clone(g.views) }

// Buckets returns for each bucket, in the order of reduction, the numbers of
// its gradients.
func (g *Gradients) Buckets() [][]int {
	all := make([][]int, len(g.buckets))
	for i, b := range g.buckets {
		all[i] = slices.Clone(b.params)
	}
	return all
}

// Patterns returns for each bucket, in the order of reduction, its pattern: that of
// its configuration, or what was chosen for [sparse.Auto], as in "oktopk", or "oktopk i8" where
// as what values travel was chosen too.
func (g *Gradients) Patterns() []string {
	all := make([]string, len(g.buckets))
	for i, b := range g.buckets {
		all[i] = b.pattern
	}
	return all
}

// Ready says that t, this step's gradient i, is complete (or that the work that
// completes it has been submitted to the runtime's compute stream). It must be
// neither written nor freed before Wait returned, which leaves the average in it.
// In another step it may be another tensor.
//
// A number that is out of range, a gradient that is ready already, or a tensor
// that is not as the one registered, is an error and changes nothing. An error of
// the communication stays: later calls return it too, until Wait has ended the step
// where it is a transaction.
func (g *Gradients) Ready(ctx context.Context, i int, t *runtime.Tensor) error {
	const op = "gradient ready"
	if err := g.usable(op); err != nil {
		return err
	}
	if err := g.check(op, i, t); err != nil {
		return err
	}
	started := time.Now()
	g.accept(ctx, i, t)
	g.step.launch += time.Since(started)
	return base.OpError(op, errors.Join(g.err, g.step.fault))
}

// check checks this step's gradient i.
func (g *Gradients) check(op string, i int, t *runtime.Tensor) error {
	if i < 0 || i >= len(g.step.given) {
		return base.OpError(op, fmt.Errorf("%w: gradient %d is not in [0, %d)", comm.ErrArgument, i, len(g.step.given)))
	}
	if g.step.given[i] != nil {
		return base.OpError(op, fmt.Errorf("%w: gradient %d is ready already in this step", comm.ErrArgument, i))
	}
	if _, err := g.address(t); err != nil {
		return base.OpError(op, fmt.Errorf("gradient %d: %w", i, err))
	}
	if dt := g.buckets[g.where[i]].dt; t.DType() != dt {
		return base.OpError(op, fmt.Errorf("%w: gradient %d is %v, registered was %v", runtime.ErrDType, i, t.DType(), dt))
	}
	if t.Len() != g.gradients[i].n {
		return base.ShapeError(op, "gradient %d has %d elements, registered were %d", i, t.Len(), g.gradients[i].n)
	}
	return nil
}

// begin begins a step, if it has not begun.
func (g *Gradients) begin(ctx context.Context) {
	if !g.step.begun && g.sound() {
		g.step.begun = true
		err := g.drain(ctx)
		if err == nil {
			err = g.announce(ctx, 1)
		}
		g.fail(err)
	}
}

// drain waits for what a step that failed has left in flight, before anything that
// buckets share is written. Then, before anything else is communicated, the ranks
// compare what they reduce, if they have not yet.
func (g *Gradients) drain(ctx context.Context) error {
	if err := g.transaction.order.Drain(ctx); err != nil {
		return err
	}
	for _, b := range g.buckets {
		if err := b.reducer.Drain(ctx); err != nil {
			return err
		}
	}
	return g.agree(ctx)
}

// fail notes an error, if it is one. Where a step is a transaction, Wait rolls it back.
func (g *Gradients) fail(err error) {
	switch {
	case err == nil:
	case g.transaction.rollsBack():
		g.step.fault = err
	default:
		g.err = err
	}
}

// accept takes a gradient and reduces the buckets that it completes.
func (g *Gradients) accept(ctx context.Context, i int, t *runtime.Tensor) {
	if g.begin(ctx); g.sound() {
		g.fail(g.fold(i, t))
	}
	g.step.given[i] = t
	if g.cfg.Rebuild && g.steps == 0 {
		g.step.arrived = append(g.step.arrived, i)
	}
	g.buckets[g.where[i]].step.missing--
	if g.transaction.cfg.ClipNorm == 0 {
		g.launchComplete(ctx)
	}
}

// launchComplete reduces the buckets whose turn it is and which are complete.
func (g *Gradients) launchComplete(ctx context.Context) {
	if g.async != nil && g.step.fault == nil {
		g.step.fault = g.async.look()
	}
	for g.step.next < len(g.buckets) && g.buckets[g.step.next].step.missing == 0 && g.sound() {
		b := g.buckets[g.step.next]
		g.step.next++
		g.fail(g.start(ctx, b))
	}
}

// start starts the step of a bucket, and may also end it.
func (g *Gradients) start(ctx context.Context, b *bucket) error {
	if err := g.side.mark(b.ready); err != nil {
		return err
	}
	if g.async != nil && g.side != nil { // it also submits the work, in the order of the side stream
		g.async.add(b)
		return nil
	}
	if err := g.selectEntries(ctx, b); err != nil {
		return err
	}
	if g.async != nil {
		g.async.add(b)
		return nil
	}
	err := b.reducer.Exchange(ctx)
	g.passed(b, sparse.Exchanged)
	// What is not in flight, and will not be rolled back, ends here: the result may be in
	// memory that the next bucket uses.
	if err == nil && g.transaction.cfg.NoUndo && !b.reducer.InFlight() {
		err = g.commit(b, sparse.Passes)
	}
	return err
}

// commit ends the step of a bucket.
func (g *Gradients) commit(b *bucket, v sparse.Verdict) error {
	err := b.reducer.Commit(v)
	if err == nil && !g.cfg.Shard {
		err = g.copyParts(b, true)
	}
	b.step.result = committed
	g.passed(b, sparse.Finished)
	return err
}

// selectEntries selects from a bucket, whose gradients are there at its mark.
func (g *Gradients) selectEntries(ctx context.Context, b *bucket) error {
	t := b.flat
	if t == nil {
		t = g.step.given[b.params[0]]
	}
	err := g.side.follow(b.ready)
	if err == nil {
		err = g.copyParts(b, false)
	}
	ptr, wrong := t.Ptr()
	if err = cmp.Or(err, wrong); err != nil {
		return err
	}
	err = b.reducer.Select(ctx, sparse.Input{Ptr: ptr, DType: b.dt, Factor: g.step.factor, Lent: g.order.Streams == nil && b.flat != nil && b.shares()})
	g.passed(b, sparse.Selected)
	return err
}

// exchange is what the worker does, until Wait's context ends it.
func (g *Gradients) exchange(b *bucket) error {
	ctx := context.Background()
	if g.side != nil {
		if err := g.selectEntries(ctx, b); err != nil {
			return err
		}
	}
	started := time.Now()
	defer func() { b.step.took = time.Since(started) }()
	err := b.reducer.Exchange(ctx)
	g.passed(b, sparse.Exchanged)
	if err == nil && g.order.Streams == nil && len(g.async.given) == 0 { // nothing else to exchange yet
		_, err = g.arrive(ctx, g.buckets[:slices.Index(g.buckets, b)+1])
	}
	return err
}

// arrive completes the steps of buckets, as far as that was not done, and returns whether the host has
// waited for the device.
func (g *Gradients) arrive(ctx context.Context, buckets []*bucket) (waited bool, err error) {
	for _, b := range buckets {
		if b.step.result == pending {
			hostWaited, err := b.reducer.Complete(ctx)
			if err != nil {
				return waited, err
			}
			b.step.result, waited = complete, waited || hostWaited
		}
	}
	return waited, nil
}

// BeforeCommit is [sparse.Reducer.BeforeCommit] for all buckets: f is called in Wait. Plain buckets are not rolled back.
func (g *Gradients) BeforeCommit(f func(ctx context.Context) error) { g.confirm = f }

// RollsBack reports whether gradients of a step that fails are as before: not with plain dense
// buckets alone (F32, not clipped, [sparse.PassNonFinite]), or with Config.NoUndo.
func (g *Gradients) RollsBack() bool { return g.transaction.rollsBack() }

// OnStage has f called when the work of a stage of a bucket that is more than a plain
// allreduce has been submitted: Selected and Finished to the stream that
// [Gradients.Stream] returns, Exchanged to the communicator's. f may run on another
// goroutine, one call at a time. nil ends that; it is called between steps.
func (g *Gradients) OnStage(f func(bucket int, s sparse.Stage)) { g.onStage = f }

// OnStep has f called at the end of each step that completes, in Wait and Join, for metrics: with the [Stats] that the host
// has. Whether a step was skipped that the device judges is known to [Gradients.Stats] alone, which waits for it.
// nil ends that; it is called between steps.
func (g *Gradients) OnStep(f func(Stats)) { g.onStep = f }

func (g *Gradients) passed(b *bucket, s sparse.Stage) {
	if g.onStage != nil && !g.transaction.plain {
		g.onStage(slices.Index(g.buckets, b), s)
	}
}

// Stream returns the stream on which sparse buckets are selected from and merged: one
// beside the compute stream where there is such ([runtime.StreamForker]).
func (g *Gradients) Stream() uintptr { return g.runtime().ComputeStream() }

// Wait completes the step: when it returns, all gradients are averages (for
// work submitted to the compute stream from then on), and the next step may
// begin. On a device with streams the host has not waited: before it reads a
// gradient, or anything computed from one, it calls the communicator's Sync, as
// "Completion" in the package's documentation explains.
//
// A gradient that was left out, because this rank did not use the parameter,
// counts as zero. The average over the ranks need not be zero; [Gradients.Result]
// has it, for ranks are to change their parameters alike.
//
// After an error of a step that is a transaction, nothing has happened: all is as
// before its first Ready, which the next step begins with.
func (g *Gradients) Wait(ctx context.Context) error {
	const op = "gradient wait"
	if err := g.usable(op); err != nil && (g.closed || g.err != nil) {
		return err
	}
	started := time.Now()
	g.begin(ctx)
	for i, t := range slices.Backward(g.step.given) {
		if t == nil && g.sound() {
			t, err := g.zero(i)
			if g.fail(err); err == nil {
				g.accept(ctx, i, t)
			}
		}
	}
	g.conclude(ctx)
	if g.step.fault != nil {
		return base.OpError(op, g.rollBack())
	}
	if g.err != nil {
		return base.OpError(op, g.err)
	}
	after := g.lines.outer.Totals()
	g.stats.Step, g.stats.Buckets, g.stats.LaunchTime, g.stats.WaitTime = g.steps, len(g.buckets), g.step.launch, time.Since(started)
	g.stats.SentElements, g.stats.SentBytes = after.SentElements-g.step.before.SentElements, after.SentBytes-g.step.before.SentBytes
	g.step.given, g.results = g.results, g.step.given
	if g.cfg.Rebuild && g.steps == 0 {
		g.err = g.rebuild(ctx)
	}
	g.steps++
	g.newStep()
	if g.err != nil {
		return base.OpError(op, g.err)
	}
	if g.onStep != nil {
		g.onStep(g.stats)
	}
	return nil
}

// sound reports whether nothing has failed in the step.
func (g *Gradients) sound() bool { return g.step.fault == nil && g.err == nil }

// conclude completes what was launched, and commits it.
func (g *Gradients) conclude(ctx context.Context) {
	if g.sound() && g.transaction.cfg.ClipNorm > 0 {
		g.fail(g.clip(ctx))
		g.launchComplete(ctx)
	}
	if g.async != nil { // also after an error: it reads gradients
		started := time.Now()
		if err := g.async.wait(ctx, g.lines.all); g.step.fault == nil {
			g.fail(err)
		}
		g.stats.ExchangeTime = 0
		for _, b := range g.buckets {
			g.stats.ExchangeTime += b.step.took
		}
		g.stats.HiddenTime = max(0, g.stats.ExchangeTime-time.Since(started))
	}
	fail := g.fail
	if g.sound() {
		v, err := g.complete(ctx)
		if err == nil && g.confirm != nil {
			err = g.confirm(ctx)
		}
		if g.fail(err); err == nil {
			fail = func(err error) { g.err = cmp.Or(g.err, err) } // what fails while results are written stays
			fail(g.commitAll(v))
		}
	}
	fail(g.side.join())
}

// clip computes what scales the gradients, which are all there, before their buckets are launched.
func (g *Gradients) clip(ctx context.Context) (err error) {
	if err = g.side.catchUp(); err == nil {
		g.step.factor, err = g.transaction.clip(ctx, g.step.given, len(g.buckets))
	}
	return err
}

// complete completes the steps of all buckets, and judges them.
func (g *Gradients) complete(ctx context.Context) (sparse.Verdict, error) {
	if g.cfg.Uneven {
		if err := g.order.ComputeAfterComm(ctx); err != nil {
			return sparse.Passes, err
		}
	}
	waited, err := g.arrive(ctx, g.buckets)
	if err != nil {
		return sparse.Passes, err
	}
	return g.transaction.judge(ctx, len(g.buckets), waited)
}

// commitAll commits the steps of all buckets that have not ended.
func (g *Gradients) commitAll(v sparse.Verdict) error {
	for _, b := range g.buckets {
		if b.step.result == committed {
			continue
		}
		if err := g.commit(b, v); err != nil {
			return err
		}
	}
	g.stats.Skipped, g.open = v == sparse.Skips, v == sparse.Deferred
	return nil
}

// rollBack rolls back the steps of all buckets that were started, and returns why it did.
// What fails now stays.
func (g *Gradients) rollBack() error {
	cause := g.step.fault
	for _, b := range g.buckets[:g.step.next] {
		if err := b.reducer.RollBack(); err != nil && g.err == nil {
			g.err = fmt.Errorf("%w; and residuals are lost, because they could not be restored: %w", cause, err)
		}
	}
	if g.err == nil {
		g.err = g.side.join()
	}
	g.unfold()
	g.newStep()
	if g.err != nil {
		return g.err
	}
	return fmt.Errorf("%w (the step was rolled back: gradients and residuals are as before)", cause)
}

// ReduceAll is a step at once: Ready for all gradients, of which one that is nil
// is left out, and Wait. A wrong one, and a context that is over, is an error before
// any of them is taken.
func (g *Gradients) ReduceAll(ctx context.Context, gradients []*runtime.Tensor) error {
	const op = "gradient reduce"
	if len(gradients) != len(g.step.given) {
		return base.OpError(op, fmt.Errorf("%w: %d gradients, registered were %d", comm.ErrArgument, len(gradients), len(g.step.given)))
	}
	if g.usable(op) == nil {
		for i, t := range gradients {
			if t == nil {
				continue
			}
			if err := g.check(op, i, t); err != nil {
				return err
			}
		}
		if !g.step.begun && ctx.Err() != nil {
			return base.OpError(op, comm.ContextError(ctx))
		}
	}
	for i, t := range slices.Backward(gradients) {
		if t != nil {
			if err := g.Ready(ctx, i, t); err != nil {
				if g.step.fault != nil {
					return g.Wait(ctx) // it ends the step
				}
				return err
			}
		}
	}
	return g.Wait(ctx)
}

// Result returns the average of gradient i in the last complete step: the tensor
// that was given or, if it was left out, a vector that is valid until the next
// step's Wait and Close. It is nil before the first step.
func (g *Gradients) Result(i int) *runtime.Tensor { return g.results[i] }

// Stats returns what the last complete step did. Whether it was skipped may be known
// by the device only, which is waited for then, until ctx is done. In the middle of a
// step on which the Gradients's goroutine works, that is [comm.ErrArgument].
func (g *Gradients) Stats(ctx context.Context) (Stats, error) {
	if g.open && !g.closed {
		if err := g.alone(); err != nil {
			return g.stats, base.OpError("gradient stats", err)
		}
		if err := g.side.catchUp(); err != nil {
			return g.stats, base.OpError("gradient stats", err)
		}
		skipped, err := g.transaction.skips(ctx)
		if err != nil {
			return g.stats, base.OpError("gradient stats", err)
		}
		g.stats.Skipped, g.open = skipped, false
	}
	return g.stats, nil
}

// alone checks that no goroutine works on a step, which uses buckets and communicator.
func (g *Gradients) alone() error {
	if g.step.begun && g.async != nil {
		return fmt.Errorf("%w: in the middle of a step, want after Wait", comm.ErrArgument)
	}
	return nil
}

// BucketStats returns what the last complete step did for a bucket, as
// [sparse.Reducer.Stats] does. A bucket that is a plain allreduce has no times, and its
// traffic is part of [Stats] only.
func (g *Gradients) BucketStats(ctx context.Context, bucket int) (sparse.Stats, error) {
	const op = "gradient stats"
	if bucket < 0 || bucket >= len(g.buckets) {
		return sparse.Stats{}, base.OpError(op, fmt.Errorf("%w: bucket %d is not in [0, %d)", comm.ErrArgument, bucket, len(g.buckets)))
	}
	b := g.buckets[bucket]
	if err := g.alone(); err != nil {
		return sparse.Stats{}, base.OpError(op, err)
	}
	if !g.closed {
		if err := g.side.catchUp(); err != nil {
			return sparse.Stats{}, base.OpError(op, err)
		}
	}
	return b.reducer.Stats(ctx)
}

// Close frees the buckets. Gradients and communicator stay as they are.
// Closing twice is fine. Where the communicator has symmetric memory, all ranks
// close together; after an error that memory is left to the communicator's Close,
// because the peers may be calling something else.
//
// In the middle of a step the host waits for the buckets that were launched,
// because the communicator still reads and writes them. If the peers do not
// reduce theirs within 5 seconds, that is [comm.ErrTimeout], and the communicator
// is aborted. After this or any other error of that wait the buckets' memory is
// not given back, because the communicator may still write it. Close the
// communicator then, and after it the Gradients again, before the gradients
// are freed: they may be buckets themselves.
func (g *Gradients) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), base.DrainLimit)
	defer cancel()
	if g.async != nil && !g.closed {
		_ = g.async.wait(ctx, g.lines.all) // what it leaves in flight, DrainToFree finds
		g.async.close()
	}
	g.closed = true
	settled := g.order.DrainToFree()
	errs := []error{settled}
	_, symmetric := comm.As[comm.SymmetricAllocator](g.meter)
	own := []*runtime.Tensor{g.active}
	for _, p := range g.gradients {
		own = append(own, p.spare, p.sum.of)
	}
	for _, b := range g.buckets {
		err := settled
		if b.reducer != nil {
			failed := b.reducer.Close()
			errs = append(errs, failed)
			err = cmp.Or(err, failed)
		}
		if b.memory != nil && err == nil && !(symmetric && g.err != nil) {
			// A communicator that was closed has freed its memory.
			if err := b.memory.Free(ctx); !errors.Is(err, comm.ErrClosed) {
				errs = append(errs, err)
			}
		}
	}
	for _, b := range g.buckets {
		errs = append(errs, g.forget(b))
	}
	if g.transaction != nil {
		errs = append(errs, g.transaction.close())
	}
	for _, t := range own {
		if t != nil && settled == nil {
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

func (g *Gradients) usable(op string) error {
	if g.closed {
		return base.OpError(op, base.ClosedError("the Gradients"))
	}
	return base.OpError(op, errors.Join(g.err, g.step.fault))
}
