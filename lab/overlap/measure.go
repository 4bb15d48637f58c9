package overlap

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/cmd/tutti/internal/attempt"
	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/internal/stages"
	"github.com/tutti-go/tutti/runtime"
)

// session is one rank's part of a measurement.
type session struct {
	Rank
	cfg    Config          // of the measurement
	model  *model          // the computation; nil before init
	alone  *link           // uses Comm
	side   *link           // uses Beside, or equals alone
	clock  clock           // times a round's steps
	trace  *Trace          // records a traced step
	stream uintptr         // the compute stream
	line   *runtime.Tensor // the ranks reduce it to start together
}

// newSession prepares a measurement. It is collective.
func newSession(ctx context.Context, r Rank, cfg Config) (*session, error) {
	s := &session{
		Rank:   r,
		cfg:    cfg,
		stream: r.Runtime.ComputeStream(),
		clock:  clock{device: r.Compute},
		trace:  NewTrace(r.Compute),
	}
	if s.stream == 0 {
		return nil, fmt.Errorf("overlap: %w: %v has no streams", comm.ErrUnsupported, r.Runtime.Device())
	}
	if err := s.init(ctx); err != nil {
		return nil, errors.Join(err, s.close(ctx, true))
	}
	return s, nil
}

// init acquires what close frees.
func (s *session) init(ctx context.Context) error {
	var a attempt.Calls
	side := s.Comm
	if s.Beside != nil {
		side = s.Beside
	}
	s.model = attempt.Get(&a, func() (*model, error) {
		return newModel(
			ctx,
			s.Runtime,
			side,
			s.cfg,
			s.Comm.Rank(),
			s.Comm.WorldSize(),
		)
	})
	s.line = attempt.Get(&a, func() (*runtime.Tensor, error) {
		return runtime.FromSlice(s.Runtime, []int32{0})
	})
	s.alone = attempt.Get(&a, func() (*link, error) {
		return s.newLink(ctx, s.Comm)
	})
	s.side = s.alone
	if s.Beside != nil {
		s.side = attempt.Get(&a, func() (*link, error) {
			return s.newLink(ctx, s.Beside)
		})
	}
	a.Do(func() error { return s.warmUp(ctx) })
	return a.Err
}

// settleSteps is the number of steps with a sparse pattern after which its residuals, which begin as zeros, are as in
// training. Residuals grow like random walks, so step t's threshold is about 1/2t higher than the one before. After
// 1/density steps the entries that were sent first come round again, and the threshold stays.
// sent first comes round again: then it stays where it is.
const settleSteps = 300

// warmUp makes the residuals as large as after many steps.
func (s *session) warmUp(ctx context.Context) error {
	if !s.cfg.sparse() {
		return nil
	}
	links := []*link{s.alone}
	if s.side != s.alone {
		links = append(links, s.side)
	}
	for _, l := range links {
		for range settleSteps {
			if err := errors.Join(s.drawAll(ctx, nil), l.reduceAll(ctx, nil)); err != nil {
				return err
			}
		}
		if err := l.Sync(ctx); err != nil {
			return err
		}
	}
	return s.Runtime.Synchronize(ctx)
}

// drawAll draws all gradients instead of computing them.
func (s *session) drawAll(context.Context, *Trace) error {
	var err error
	for i := range s.model.gradients {
		err = errors.Join(err, s.model.draw(s.Runtime, i))
	}
	s.model.drawn++
	return err
}

// close frees everything except memory that the communicator must free because this rank has failed, or that the
// communicator may still write.
func (s *session) close(ctx context.Context, failed bool) error {
	var errs []error
	for _, l := range []*link{s.alone, s.side} {
		if l != nil {
			errs = append(errs, l.sync.Close())
		}
	}
	inUse := errors.Join(errs...) != nil
	errs = append(errs, s.line.Free())
	if s.model != nil {
		errs = append(errs, s.model.free(ctx, inUse || failed && s.model.collective))
	}
	return errors.Join(append(errs, s.clock.close(), s.trace.Close())...)
}

// link is a communicator and the gradients that it sums.
type link struct {
	comm.Communicator
	ops  comm.StreamSyncOps // of the communicator
	sync *ddp.Gradients     // reduces the gradients; closed with the session
	// gradients are the gradients to sum.
	gradients []*runtime.Tensor
	// closes names the bucket that a gradient completes, "" if none. Gradients become ready in the order of the
	// buckets.
	closes []string
	sparse bool // a sparse pattern reduces the gradients
}

// bucketName is the name of a bucket in timelines.
func bucketName(b int) string { return fmt.Sprintf("bucket %d", b) }

func (s *session) newLink(ctx context.Context, c comm.Communicator) (*link, error) {
	ops, ok := comm.As[comm.StreamSyncOps](c)
	if !ok {
		return nil, fmt.Errorf("overlap: %w: the communicator has no streams", comm.ErrUnsupported)
	}
	cfg := ddp.Config{BucketBytes: s.cfg.BucketBytes, Sum: true}
	if s.cfg.sparse() {
		cfg.Sum = false
		cfg.DenseUpTo = -1
		cfg.Config = sparse.Config{Pattern: s.cfg.Pattern, Density: s.cfg.Density}
	}
	sync, err := ddp.New(ctx, s.Runtime, c, s.model.gradients, cfg)
	if err != nil {
		return nil, err
	}
	l := &link{
		Communicator: c,
		ops:          ops,
		sync:         sync,
		gradients:    s.model.gradients,
		closes:       make([]string, len(s.model.gradients)),
		sparse:       s.cfg.sparse(),
	}
	for b, gradients := range sync.Buckets() {
		l.closes[gradients[len(gradients)-1]] = bucketName(b)
	}
	return l, nil
}

// ready hands over a gradient whose product has been submitted.
func (l *link) ready(ctx context.Context, gradient int, t *Trace) error {
	bucket := l.closes[gradient]
	if bucket != "" && l.sparse {
		if err := t.Ready(); err != nil {
			return err
		}
	}
	if err := l.sync.Ready(ctx, gradient, l.gradients[gradient]); err != nil {
		return err
	}
	if bucket != "" && !l.sparse {
		return t.Reduced(bucket)
	}
	return nil
}

// reduceAll hands over all gradients and completes the step.
func (l *link) reduceAll(ctx context.Context, t *Trace) error {
	for i := len(l.closes) - 1; i >= 0; i-- {
		if err := l.ready(ctx, i, t); err != nil {
			return err
		}
	}
	return l.sync.Wait(ctx)
}

// phaseName names the measurement of a phase.
type phaseName string

const (
	computing      phaseName = "compute"
	reducing       phaseName = "communication"
	reducingFlat   phaseName = "communication of one buffer"
	reducingBeside phaseName = "communication of the overlapped step"
	sequential     phaseName = "one after the other"
	overlapped     phaseName = "overlapped"
)

// phase is a kind of step.
type phase struct {
	name   phaseName // in timelines
	link   *link     // a round waits for its communicator
	traced bool      // a round ends with a recorded step
	// passes is the part up to the last product or gradient, and tail the part after it.
	passes, tail func(context.Context, *Trace) error
	// busy is the time up to the last product in each round, in seconds.
	busy      []float64
	timelines []Timeline
}

// phases returns all kinds of steps.
func (s *session) phases() []phase {
	compute := func(_ context.Context, t *Trace) error {
		return s.compute(t, nil)
	}
	flat := func(ctx context.Context, _ *Trace) error {
		return distributed.AllReduce(ctx, s.Comm, s.model.flat, comm.Sum)
	}
	wait := func(ctx context.Context, _ *Trace) error {
		return s.side.sync.Wait(ctx)
	}
	return []phase{
		{name: computing, link: s.alone, passes: compute, tail: func(context.Context, *Trace) error { return nil }},
		{name: reducing, link: s.alone, passes: s.drawAll, tail: s.alone.reduceAll},
		{name: reducingFlat, link: s.alone, passes: s.drawAll, tail: flat},
		{name: sequential, link: s.alone, passes: compute, tail: s.alone.reduceAll, traced: true},
		{name: reducingBeside, link: s.side, passes: s.drawAll, tail: s.side.reduceAll},
		{name: overlapped, link: s.side, passes: s.overlap, tail: wait, traced: true},
	}
}

// compute submits the products of a step. It calls ready, unless it is nil, after each product that completes a
// gradient.
func (s *session) compute(t *Trace, ready func(gradient int) error) error {
	defer func() { s.model.drawn++ }()
	for i := range s.model.products {
		p := &s.model.products[i]
		if err := s.Compute.Multiply(p.c, p.a, p.b); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		if p.gradient != none {
			if err := s.model.draw(s.Runtime, p.gradient); err != nil {
				return err
			}
		}
		if err := t.Computed(p.kind, p.name); err != nil {
			return err
		}
		if ready != nil && p.gradient != none {
			if err := ready(p.gradient); err != nil {
				return err
			}
		}
	}
	return nil
}

// overlap submits the products, and each gradient's reduction after its product. From the first reduction on,
// products leave multiprocessors to reductions.
func (s *session) overlap(ctx context.Context, t *Trace) error {
	room := false
	err := s.compute(t, func(gradient int) error {
		if err := s.side.ready(ctx, gradient, t); err != nil || room {
			return err
		}
		room = true
		return s.Compute.SetMultiprocessors(s.cfg.Multiprocessors)
	})
	return errors.Join(err, s.Compute.SetMultiprocessors(0))
}

// timing is a round of one phase: a step's mean time, and the time up to the last product or gradient.
type timing struct {
	total    time.Duration // of a step
	busy     time.Duration // of the part up to the last product or gradient
	timeline Timeline      // of a traced phase, otherwise zero
}

// round runs the steps of a round. If the phase is traced, it runs one more step with an event at every product and
// bucket.
func (s *session) round(ctx context.Context, p phase) (t timing, _ error) {
	var a attempt.Calls
	s.clock.reset()
	a.Do(func() error { return s.startTogether(ctx) })
	start := attempt.Get(&a, func() (uintptr, error) { return s.mark(p) })
	passed := make([]uintptr, s.cfg.Steps)
	ended := make([]uintptr, s.cfg.Steps)
	for i := range s.cfg.Steps {
		a.Do(func() (err error) {
			passed[i], ended[i], err = s.step(ctx, p, nil)
			return err
		})
	}
	if p.traced {
		a.Do(func() error { return s.tracedStep(ctx, p) })
	}
	// The communicator watches its peers while it waits. All its work is ordered after the compute stream's work or
	// before it.
	a.Do(func() error {
		return errors.Join(p.link.Sync(ctx), s.Runtime.Synchronize(ctx))
	})
	elapsed := func(from, to uintptr) time.Duration {
		return attempt.Get(&a, func() (time.Duration, error) {
			return s.Compute.Elapsed(from, to)
		})
	}
	t.total = elapsed(start, ended[len(ended)-1])
	t.busy = t.total
	for i := range passed {
		t.busy -= elapsed(passed[i], ended[i])
	}
	t.total /= time.Duration(s.cfg.Steps)
	t.busy /= time.Duration(s.cfg.Steps)
	if p.traced {
		t.timeline = attempt.Get(&a, func() (Timeline, error) {
			return s.trace.Timeline(string(p.name))
		})
	}
	return t, a.Err
}

// tracedStep runs a step that the session's trace records.
func (s *session) tracedStep(ctx context.Context, p phase) error {
	if err := s.trace.Begin(p.link.ops, s.stream); err != nil {
		return err
	}
	var failed error // of stages, which end with the step
	observed := stages.Observe(ctx, func(bucket int, stage stages.Stage, stream uintptr) {
		failed = errors.Join(failed, s.trace.Passed(bucket, stage, stream))
	})
	if _, _, err := s.step(observed, p, s.trace); err != nil {
		return err
	}
	return errors.Join(failed, s.trace.End())
}

// step runs one step and returns the events after its passes and at its end.
func (s *session) step(ctx context.Context, p phase, t *Trace) (passed, ended uintptr, err error) {
	var a attempt.Calls
	mark := func() (uintptr, error) { return s.mark(p) }
	a.Do(func() error { return p.passes(ctx, t) })
	passed = attempt.Get(&a, mark)
	a.Do(func() error { return p.tail(ctx, t) })
	ended = attempt.Get(&a, mark)
	return passed, ended, a.Err
}

// mark records a timer on the compute stream.
func (s *session) mark(p phase) (uintptr, error) {
	return s.clock.record(func(event uintptr) error {
		return p.link.ops.RecordOnStream(event, s.stream)
	})
}

// startTogether makes the compute streams of all ranks begin at the same time. A barrier gathers the hosts, which
// learn of its end at different times. A reduction on the devices then ends on all of them at once.
func (s *session) startTogether(ctx context.Context) error {
	if err := errors.Join(s.Comm.Barrier(ctx), s.Runtime.Synchronize(ctx)); err != nil {
		return err
	}
	return distributed.AllReduce(ctx, s.Comm, s.line, comm.Sum)
}

// slowest returns the largest of the ranks' values, element by element. It is collective.
func (s *session) slowest(ctx context.Context, values []float64) ([]float64, error) {
	return backend.Reduce(ctx, backend.Rank{Comm: s.Comm, Runtime: s.Runtime}, values, comm.Max)
}
