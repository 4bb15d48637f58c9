package distributed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

// DefaultBucketBytes is the size of a gradient bucket unless set, that of
// PyTorch's DistributedDataParallel.
const DefaultBucketBytes = 25 << 20

// GradientConfig says how a [GradientSync] works. All ranks use the same.
type GradientConfig struct {
	// BucketBytes is how many bytes of gradients are reduced together,
	// [DefaultBucketBytes] unless set. A larger tensor is a bucket of its own.
	BucketBytes int
	// Sum adds gradients up instead of averaging them, for programs that divide
	// the loss by the world size: a backend may add faster than it averages. It
	// is for dense buckets without clipping only.
	Sum bool
	// Config is how a bucket is reduced, dense unless set.
	Config
	// PerBucket, if set, replaces Config for each bucket: bucket 0 is reduced
	// first and holds the gradients registered last.
	PerBucket func(bucket, elements int) Config
}

// GradientStats tells what the last step of a [GradientSync] did on this rank.
type GradientStats struct {
	Step    int
	Buckets int
	// SentElements and SentBytes count as in [StepStats].
	SentElements, SentBytes int64
	// LaunchTime is the host's time in Ready, WaitTime that in Wait: the
	// communication that the backward pass did not hide.
	LaunchTime, WaitTime time.Duration
}

// GradientSync averages the gradients of a model over the ranks, or adds them
// up, while the backward pass goes on.
//
// Gradients are put into buckets in reverse order of registration, because a
// backward pass computes the last layer's gradient first. A bucket is reduced
// as soon as all its gradients, and all buckets before it, are ready: so all
// ranks reduce the same buckets in the same order, whatever the order in which
// their gradients become ready.
//
// A dense bucket is submitted in Ready and completed in Wait; meanwhile the
// communicator works on it if it has a stream of its own (then buckets and
// compute are ordered by events and the host never waits) or makes progress by
// itself. A sparse bucket needs numbers on the host, so Ready reduces it
// before it returns.
//
//	for step := range steps {
//		// backward pass: after the gradient of parameter i is complete
//		err := sync.Ready(ctx, i)
//		...
//		err = sync.Wait(ctx) // all gradients are averages now
//	}
//
// A GradientSync belongs to one goroutine at a time, and so does its
// communicator between the first Ready and the end of Wait.
type GradientSync struct {
	rt      runtime.Runtime
	meter   *comm.Meter
	order   order
	op      comm.ReduceOp // of dense buckets
	params  []*runtime.Tensor
	where   []int // bucket of each parameter
	ready   []bool
	buckets []*bucket
	next    int // first bucket that is not launched
	steps   int // complete steps

	stats  GradientStats
	launch time.Duration
	before comm.Traffic
	err    error
	closed bool
}

// bucket is a group of gradients that are reduced together.
type bucket struct {
	params  []int
	missing int             // gradients that are not ready
	flat    *runtime.Tensor // all of them, or the only one itself
	owned   bool            // flat is a copy
	sparse  *Sparse         // nil: a plain allreduce
}

// NewGradientSync prepares the reduction of gradients: contiguous tensors of
// rt's memory, registered in the order of the forward pass, which the program
// fills anew in every step. It does not communicate. All ranks pass the same
// shapes, types and configuration. Gradients whose runtime has another device or
// another compute stream than rt are [runtime.ErrDevice].
func NewGradientSync(rt runtime.Runtime, c comm.Communicator, gradients []*runtime.Tensor, cfg GradientConfig) (*GradientSync, error) {
	const op = "gradient sync"
	if rt == nil || c == nil {
		return nil, opError(op, fmt.Errorf("%w: runtime or communicator is nil", comm.ErrArgument))
	}
	if cfg.BucketBytes < 0 {
		return nil, configError("BucketBytes is %d, want at least 1", cfg.BucketBytes)
	}
	if cfg.BucketBytes == 0 {
		cfg.BucketBytes = DefaultBucketBytes
	}
	for i, t := range gradients {
		if _, err := address(op, fmt.Sprintf("gradient %d", i), c, t); err != nil {
			return nil, err
		}
		if err := sameStream(rt, t.Runtime()); err != nil {
			return nil, opError(op, fmt.Errorf("the runtime and gradient %d: %w", i, err))
		}
	}
	g := &GradientSync{rt: rt, meter: comm.NewMeter(c), params: slices.Clone(gradients),
		where: make([]int, len(gradients)), ready: make([]bool, len(gradients))}
	g.op = comm.Avg
	if cfg.Sum {
		g.op = comm.Sum
	}
	g.fillBuckets(cfg.BucketBytes)
	g.order = newOrder(rt, g.meter)
	if err := g.prepareBuckets(cfg); err != nil {
		return nil, opError(op, errors.Join(err, g.Close()))
	}
	g.reset()
	return g, nil
}

// fillBuckets puts the parameters into buckets of one type each.
func (g *GradientSync) fillBuckets(limit int) {
	bytes := 0
	for i := len(g.params) - 1; i >= 0; i-- {
		t := g.params[i]
		last := len(g.buckets) - 1
		if last < 0 || bytes+t.Bytes() > limit || g.params[g.buckets[last].params[0]].DType() != t.DType() {
			g.buckets = append(g.buckets, &bucket{})
			last++
			bytes = 0
		}
		g.buckets[last].params = append(g.buckets[last].params, i)
		g.where[i] = last
		bytes += t.Bytes()
	}
}

// prepareBuckets allocates what the buckets need.
func (g *GradientSync) prepareBuckets(cfg GradientConfig) error {
	for i, b := range g.buckets {
		n := 0
		for _, p := range b.params {
			n += g.params[p].Len()
		}
		first := g.params[b.params[0]]
		b.flat = first
		if len(b.params) > 1 {
			flat, err := runtime.New(g.rt, first.DType(), n)
			if err != nil {
				return err
			}
			b.flat, b.owned = flat, true
		}
		c := cfg.Config
		if cfg.PerBucket != nil {
			c = cfg.PerBucket(i, n)
		}
		c, err := c.withDefaults()
		if err != nil {
			return fmt.Errorf("bucket %d: %w", i, err)
		}
		if c.Pattern == Dense && c.ClipNorm == 0 {
			if !g.op.Defined(first.DType()) {
				return fmt.Errorf("bucket %d: %w: no %v of %v", i, comm.ErrUnsupported, g.op, first.DType())
			}
			continue
		}
		if cfg.Sum {
			return fmt.Errorf("bucket %d: %w: Sum with pattern %s and ClipNorm %v, which average", i, comm.ErrArgument, c.Pattern, c.ClipNorm)
		}
		if err := checkGradientType(first.DType()); err != nil {
			return fmt.Errorf("bucket %d: %w", i, err)
		}
		sparse, err := NewSparse(g.rt, g.meter, n, c)
		if err != nil {
			return fmt.Errorf("bucket %d: %w", i, err)
		}
		b.sparse = sparse
	}
	return nil
}

// reset prepares for the next step.
func (g *GradientSync) reset() {
	clear(g.ready)
	for _, b := range g.buckets {
		b.missing = len(b.params)
	}
	g.next = 0
	g.launch = 0
	g.before = g.meter.Totals()
}

// Buckets returns for each bucket, in the order of reduction, the numbers of
// its gradients.
func (g *GradientSync) Buckets() [][]int {
	all := make([][]int, len(g.buckets))
	for i, b := range g.buckets {
		all[i] = slices.Clone(b.params)
	}
	return all
}

// Ready says that gradient i is complete (or that the work that completes it
// has been submitted to the runtime's compute stream). It must not be written
// again before Wait returned.
//
// A number that is out of range, or a gradient that is ready already, is
// [comm.ErrArgument] and changes nothing. An error of the communication stays:
// later calls return it too.
func (g *GradientSync) Ready(ctx context.Context, i int) error {
	const op = "gradient ready"
	if err := g.usable(op); err != nil {
		return err
	}
	if i < 0 || i >= len(g.params) {
		return opError(op, fmt.Errorf("%w: gradient %d is not in [0, %d)", comm.ErrArgument, i, len(g.params)))
	}
	if g.ready[i] {
		return opError(op, fmt.Errorf("%w: gradient %d is ready already in this step", comm.ErrArgument, i))
	}
	if _, err := g.params[i].Ptr(); err != nil {
		return opError(op, fmt.Errorf("gradient %d: %w", i, err))
	}
	started := time.Now()
	g.ready[i] = true
	g.buckets[g.where[i]].missing--
	for g.next < len(g.buckets) && g.buckets[g.next].missing == 0 && g.err == nil {
		g.err = g.start(ctx, g.buckets[g.next])
		g.next++
	}
	g.launch += time.Since(started)
	if g.err != nil {
		return opError(op, g.err)
	}
	return nil
}

// start reduces a bucket, or submits its reduction.
func (g *GradientSync) start(ctx context.Context, b *bucket) error {
	if err := g.copyParts(b, false); err != nil {
		return err
	}
	if b.sparse != nil {
		return b.sparse.AllReduce(ctx, b.flat)
	}
	ptr, err := b.flat.Ptr()
	if err != nil {
		return err
	}
	if err := g.order.commAfterCompute(ctx); err != nil {
		return err
	}
	return g.meter.AllReduce(ptr, ptr, b.flat.Len(), b.flat.DType(), g.op)
}

// copyParts copies a bucket's gradients to its flat tensor, or back.
func (g *GradientSync) copyParts(b *bucket, back bool) error {
	if !b.owned {
		return nil
	}
	flat, err := b.flat.Ptr()
	if err != nil {
		return err
	}
	for _, i := range b.params {
		t := g.params[i]
		param, err := t.Ptr()
		if err != nil {
			return fmt.Errorf("gradient %d: %w", i, err)
		}
		dst, src := flat, param
		if back {
			dst, src = src, dst
		}
		if err := g.rt.Copy(dst, src, t.Bytes()); err != nil {
			return err
		}
		flat += uintptr(t.Bytes())
	}
	return nil
}

// Wait completes the step: when it returns, all gradients are averages (for
// work submitted to the compute stream from then on), and the next step may
// begin. On a device with streams the host has not waited: before it reads a
// gradient, or anything computed from one, it calls the communicator's Sync, as
// "Completion" in the package's documentation explains. A gradient that is not
// ready is [comm.ErrArgument], names it, and changes nothing.
func (g *GradientSync) Wait(ctx context.Context) error {
	const op = "gradient wait"
	if err := g.usable(op); err != nil {
		return err
	}
	if i := slices.Index(g.ready, false); i >= 0 {
		return opError(op, fmt.Errorf("%w: gradient %d is not ready", comm.ErrArgument, i))
	}
	started := time.Now()
	g.err = g.order.computeAfterComm(ctx)
	for _, b := range g.buckets {
		if g.err == nil {
			g.err = g.copyParts(b, true)
		}
	}
	if g.err != nil {
		return opError(op, g.err)
	}
	after := g.meter.Totals()
	g.stats = GradientStats{
		Step: g.steps, Buckets: len(g.buckets), LaunchTime: g.launch, WaitTime: time.Since(started),
		SentElements: after.SentElements - g.before.SentElements, SentBytes: after.SentBytes - g.before.SentBytes,
	}
	g.steps++
	g.reset()
	return nil
}

// Stats returns what the last complete step did.
func (g *GradientSync) Stats() GradientStats { return g.stats }

// Close frees the buckets. Gradients and communicator stay as they are.
// Closing twice is fine.
//
// In the middle of a step the host waits for the buckets that were launched,
// because the communicator still reads and writes them. If the peers do not
// reduce theirs within 5 seconds, that is [comm.ErrTimeout], and the communicator
// is broken. After this or any other error of that wait the buckets' memory is
// not given back, because the communicator may still write it. Close the
// communicator then, and after it the GradientSync again, before the gradients
// are freed: they may be buckets themselves.
func (g *GradientSync) Close() error {
	g.closed = true
	settled := g.order.settle()
	errs := []error{settled}
	for _, b := range g.buckets {
		err := settled
		if b.sparse != nil {
			err = b.sparse.Close()
			errs = append(errs, err)
		}
		if b.owned && err == nil {
			errs = append(errs, b.flat.Free())
		}
	}
	if err := errors.Join(errs...); err != nil {
		return opError("gradient sync close", err)
	}
	return nil
}

func (g *GradientSync) usable(op string) error {
	if g.closed {
		return opError(op, comm.ErrClosed)
	}
	if g.err != nil {
		return opError(op, g.err)
	}
	return nil
}
