// Package train trains a small network, data-parallel, on the digits data set or the bytes of a text. Every rank
// computes the gradient of its part of a batch, a pattern of package distributed averages the gradients, and every
// rank applies the same update to the same weights.
//
// # The update
//
// Each rank keeps a velocity v ← momentum·v + gradient and exchanges learningRate·v. Momentum and learning rate act
// before the selection, so entries that error feedback delivers late carry the momentum and the step size of the time
// when they arose ("momentum correction" of Y. Lin et al., "Deep Gradient Compression", 2018; learning rate inside
// error feedback as in S. P. Karimireddy et al., "Error Feedback Fixes SignSGD", 2019). With the dense pattern this
// is ordinary SGD with momentum.
package train

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"gonum.org/v1/gonum/blas/blas32"

	"github.com/tutti-go/tutti/cmd/tutti/internal/attempt"
	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// Run trains once with each pattern of cfg. It is collective: every rank calls it with the same valid configuration.
// Only rank 0 calls observer.
func Run(ctx context.Context, r backend.Rank, cfg Config, observer Observer) error {
	trainSet, testSet, err := cfg.examples()
	if err != nil {
		return err
	}
	if err := r.Fits(cfg.Backend, "weights, gradients and activations", cfg.bytes(trainSet.Len()),
		"--hidden, --batch or --ranks"); err != nil {
		return err
	}
	for _, one := range cfg.Runs() {
		result, err := trainPattern(ctx, r, one, trainSet, testSet, observer)
		if err != nil {
			return fmt.Errorf("training with pattern %s and values %s: %w", one.Patterns[0], one.Values[0], err)
		}
		if r.Comm.Rank() == 0 {
			observer.Finished(result)
		}
	}
	return nil
}

// trainer is one rank's state while it trains with one pattern.
type trainer struct {
	cfg   Config       // its first pattern and codec apply
	rank  backend.Rank // this one
	data  examples     // to train on
	model *model       // the same on every rank, except between outer rounds
	rng   *rand.Rand   // the same stream on every rank

	velocity []float32                       // momentum of all parameters
	gradient []float32                       // of the rank's part of a batch
	update   *runtime.Tensor                 // exchanged, in memory of the rank's runtime
	average  func(ctx context.Context) error // of update, if that is a gradient
	sparse   *backend.Reducer                // for all ranks; nil with fixed or outer
	fixed    *ddp.Gradients                  // with Reproducible, nil otherwise
	outer    *outer.Loop                     // exchanges update; nil without an outer loop
	owned    []func() error                  // close the above
	chosen   string                          // pattern chosen by auto
	values   string                          // codec of the values that are sent

	tested examples      // to test on
	clock  time.Duration // training time so far, without tests and comparisons of losses

	order    []int         // of the training images in this epoch
	epochs   int           // begun so far
	exchange time.Duration // of the steps so far
	history
}

// history is the record of a training so far.
type history struct {
	Curve           []Point // of this rank
	Bytes, Elements int64   // sent
	Tests           []Test  // in order
}

// trainPattern trains with one pattern and tests the result.
func trainPattern(
	ctx context.Context,
	r backend.Rank,
	cfg Config,
	trainSet, testSet examples,
	observer Observer,
) (_ Result, err error) {
	t, err := newTrainer(ctx, r, cfg, trainSet, testSet)
	if err != nil {
		return Result{}, err
	}
	defer func() {
		err = errors.Join(err, t.close())
	}()
	var a attempt.Calls
	barrier := func() error { return r.Comm.Barrier(ctx) }
	a.Do(barrier)
	start := time.Now()
	stepsPerEpoch := trainSet.Len() / cfg.Batch
	steps := stepsPerEpoch * cfg.Epochs
	name := Result{
		Pattern: cfg.Patterns[0],
		Values:  t.values,
		Outer:   cfg.Outer.Every,
	}.Name()
	for step := 1; step <= steps && a.Err == nil; step++ {
		if err := t.step(ctx, step-1, stepsPerEpoch); err != nil {
			return Result{}, fmt.Errorf("step %d of %d: %w", step, steps, err)
		}
		t.Curve[step-1].Seconds = (t.clock + time.Since(start)).Seconds()
		if r.Comm.Rank() == 0 {
			observer.Step(name, step, steps)
		}
		tests := step%cfg.testEvery(stepsPerEpoch) == 0 || step == steps
		if tests && t.outer == nil {
			a.Do(barrier) // the time counts until the last rank is here
		}
		t.clock += time.Since(start)
		if tests {
			a.Do(func() error { return t.test(ctx, testSet.Len()) })
		}
		if step%stepsPerEpoch == 0 {
			a.Do(func() error { return t.checkLoss(ctx, stepsPerEpoch) })
		}
		start = time.Now()
	}
	if t.outer != nil { // the last window may be incomplete
		a.Do(func() error {
			return t.through(ctx, t.model.params, t.outer.Adopt)
		})
	}
	a.Do(func() error { return t.checkAgreement(ctx) })
	result := attempt.Get(&a, func() (Result, error) { return t.result(ctx) })
	return result, a.Err
}

// newTrainer makes a rank's state, with rank 0's initial weights.
func newTrainer(ctx context.Context, r backend.Rank, cfg Config, data, test examples) (*trainer, error) {
	n := cfg.shape().parameters()
	t := &trainer{
		cfg:      cfg,
		values:   cfg.Values[0],
		rank:     r,
		data:     data,
		tested:   test.share(r.Comm),
		model:    newModel(cfg.shape(), cfg.Batch),
		rng:      rand.New(rand.NewPCG(cfg.Seed, 0x0bde5)),
		velocity: make([]float32, n),
		gradient: make([]float32, n),
		order:    make([]int, data.Len()),
	}
	for i := range t.order {
		t.order[i] = i
	}
	var err error
	if t.update, err = runtime.New(r.Runtime, dtype.F32, n); err != nil {
		return nil, err
	}
	t.owned = append(t.owned, t.update.Free)
	reduce := sparse.Config{
		Pattern:         cfg.Patterns[0],
		Values:          cfg.Values[0],
		Density:         cfg.Density,
		NoErrorFeedback: cfg.NoErrorFeedback,
		Schedule:        sparse.Schedule{WarmupSteps: cfg.WarmupSteps},
	}
	if cfg.Reproducible > 0 {
		err = t.newReproducible(ctx)
	} else if cfg.Outer.Every == 0 {
		if t.sparse, err = backend.NewReducer(ctx, r, cfg.Backend, cfg.Hosts, n, dtype.F32, reduce); err == nil {
			t.owned = append(t.owned, t.sparse.Close)
			t.average = func(ctx context.Context) error {
				return t.sparse.AllReduce(ctx, t.update)
			}
		}
	}
	if err == nil && cfg.Elastic {
		t.model.initialize(cfg.Seed) // other ranks may be ahead
	} else if err == nil {
		err = t.shareWeights(ctx)
	}
	if err == nil && cfg.Outer.Every > 0 {
		t.tested = test
		err = t.newOuter(ctx, reduce)
	}
	if err != nil {
		return nil, errors.Join(err, t.close())
	}
	t.exchange = 0 // the exchange so far was no gradient
	return t, nil
}

// newOuter makes the outer loop over the exchanged tensor, which holds the weights.
func (t *trainer) newOuter(ctx context.Context, reduce sparse.Config) error {
	cfg := t.cfg.Outer
	update := []*runtime.Tensor{t.update}
	cfg.Reduce = ddp.Config{Config: reduce, DenseUpTo: -1}
	if t.cfg.Hosts > 0 {
		cfg.Reduce.Mesh = backend.Hosts(t.cfg.Backend, t.cfg.Hosts)
		mesh, err := cfg.Reduce.Mesh(ctx, t.rank.Comm)
		if err != nil {
			return err
		}
		t.owned = append(t.owned, mesh.Close)
		host, err := mesh.Comm("rank")
		if err != nil {
			return err
		}
		average, err := ddp.New(ctx, t.rank.Runtime, host, update, ddp.Config{})
		if err != nil {
			return err
		}
		t.owned = append(t.owned, average.Close)
		t.average = func(ctx context.Context) error {
			return average.ReduceAll(ctx, update)
		}
	}
	var err error
	if t.outer, err = outer.New(ctx, t.rank.Runtime, t.rank.Comm, update, cfg); err == nil {
		t.owned = append(t.owned, t.outer.Close)
	}
	return err
}

// close frees what the trainer allocated.
func (t *trainer) close() error {
	var errs []error
	for _, c := range slices.Backward(t.owned) {
		errs = append(errs, c())
	}
	return errors.Join(errs...)
}

// shareWeights gives every rank the initial weights of rank 0.
func (t *trainer) shareWeights(ctx context.Context) error {
	if t.rank.Comm.Rank() == 0 {
		t.model.initialize(t.cfg.Seed)
	}
	return t.through(ctx, t.model.params, func() error {
		return distributed.Broadcast(ctx, t.rank.Comm, t.update, 0)
	})
}

// through copies values to the exchanged tensor, runs exchange on it, and copies the result back. On a device with
// streams it first waits for the communication. The end of ctx ends this wait, but not the wait for a copy.
func (t *trainer) through(ctx context.Context, values []float32, exchange func() error) error {
	if err := runtime.CopyIn(t.update, values); err != nil {
		return err
	}
	if err := exchange(); err != nil {
		return err
	}
	start := time.Now()
	err := t.rank.Comm.Sync(ctx)
	if t.sparse != nil {
		err = errors.Join(err, t.sparse.Sync(ctx))
	}
	if err != nil {
		return err
	}
	t.exchange += time.Since(start)
	return runtime.CopyOut(values, t.update)
}

// batch returns the images of a step over all ranks.
func (t *trainer) batch(step, stepsPerEpoch int) []int {
	inEpoch := step % stepsPerEpoch
	for ; t.epochs <= step/stepsPerEpoch; t.epochs++ {
		t.rng.Shuffle(len(t.order), func(i, j int) {
			t.order[i], t.order[j] = t.order[j], t.order[i]
		})
	}
	return t.order[inEpoch*t.cfg.Batch : (inEpoch+1)*t.cfg.Batch]
}

// move replaces the gradient with this rank's change of the weights in a step, and returns the loss.
func (t *trainer) move(step, stepsPerEpoch int) (loss float64) {
	batch := t.batch(step, stepsPerEpoch)
	ranks := t.rank.Comm.WorldSize()
	rank := t.rank.Comm.Rank()
	share := batch[rank*len(batch)/ranks : (rank+1)*len(batch)/ranks]

	// Ranks may have different numbers of images. With this scale, the average over ranks is the mean gradient over
	// the batch, however it is divided.
	scale := float32(ranks) / float32(len(batch))
	if t.outer != nil { // it averages changes of the weights, not gradients
		scale = 1 / float32(max(len(share), 1))
	}
	loss = t.model.gradient(t.gradient, t.data, share, scale) * float64(scale)

	velocity := vector(t.velocity)
	blas32.Scal(float32(t.cfg.Momentum), velocity)
	blas32.Axpy(1, vector(t.gradient), velocity)
	blas32.Copy(velocity, vector(t.gradient))
	blas32.Scal(t.cfg.schedule(step, stepsPerEpoch), vector(t.gradient))
	return loss
}

// step trains on one batch.
func (t *trainer) step(ctx context.Context, step, stepsPerEpoch int) error {
	if tracer, ok := comm.As[comm.Tracer](t.rank.Comm); ok {
		defer tracer.Span("step", time.Now())
	}
	if t.fixed != nil {
		loss, err := t.contribute(ctx, step, stepsPerEpoch)
		if err != nil {
			return err
		}
		t.descend(step, stepsPerEpoch)
		return t.record(ctx, loss)
	}
	loss := t.move(step, stepsPerEpoch)
	if t.average != nil {
		if err := t.through(ctx, t.gradient, func() error { return t.average(ctx) }); err != nil {
			return err
		}
	}
	blas32.Axpy(-1, vector(t.gradient), vector(t.model.params))
	if t.outer != nil {
		if err := t.through(ctx, t.model.params, func() error {
			return t.outer.Step(ctx)
		}); err != nil {
			return err
		}
	}
	return t.record(ctx, loss)
}

// test measures the accuracy with the parameters that all ranks share. Every rank tests a part of the images, or all
// of them with an outer loop: on links slow enough for one, a round trip takes longer than the test.
func (t *trainer) test(ctx context.Context, all int) (err error) {
	params := t.model.params
	if t.outer != nil {
		defer copy(params, slices.Clone(params))
		if err := t.through(ctx, params, t.outer.Adopt); err != nil {
			return err
		}
	}
	right, loss := t.model.test(t.tested)
	sums := []float64{float64(right), loss}
	if t.outer == nil {
		sums, err = backend.Reduce(ctx, t.rank, sums, comm.Sum)
	}
	if err == nil {
		n := float64(all)
		t.Tests = append(t.Tests, Test{
			Step:     len(t.Curve),
			Seconds:  t.clock.Seconds(),
			Accuracy: 100 * sums[0] / n,
			Loss:     sums[1] / n,
			rounds:   t.rounds(),
		})
	}
	return err
}

// rounds returns the number of exchanges so far.
func (t *trainer) rounds() int {
	if t.outer != nil {
		return t.outer.Stats().Rounds
	}
	return len(t.Curve)
}

// record keeps the statistics of the last step.
func (t *trainer) record(ctx context.Context, loss float64) (err error) {
	switch {
	case t.outer != nil:
		stats := t.outer.Stats()
		t.Bytes = stats.SentBytes
		t.Elements = stats.SentElements
		t.exchange = stats.WaitTime
	case t.fixed != nil:
		var stats ddp.Stats
		stats, err = t.fixed.Stats(ctx)
		t.Bytes += stats.SentBytes
		t.Elements += stats.SentElements
		t.exchange += stats.WaitTime
	default:
		var stats sparse.Stats
		if stats, err = t.sparse.Stats(ctx); stats.Chosen != "" {
			t.chosen = stats.Chosen
		}
		t.Bytes = t.Bytes + stats.SentBytes
		t.Elements = t.Elements + stats.SentElements
		_, exchange := t.sparse.Within()
		t.exchange += stats.ExchangeTime + exchange
	}
	t.Curve = append(t.Curve, Point{SentBytes: float64(t.Bytes), Loss: loss})
	return err
}

// ErrDiverged reports a loss that is not finite. Further training is useless.
var ErrDiverged = errors.New("training diverged")

// checkLoss returns the same error on all ranks if the mean loss of the last steps is not finite. It is collective.
func (t *trainer) checkLoss(ctx context.Context, last int) error {
	var sum float64
	for _, p := range t.Curve[len(t.Curve)-last:] {
		sum += p.Loss
	}
	mean, err := t.mean(ctx, []float64{sum / float64(last)})
	if err != nil {
		return err
	}
	if math.IsNaN(mean[0]) || math.IsInf(mean[0], 0) {
		return fmt.Errorf("%w: the loss is %v after %d steps; lower --lr or --momentum", ErrDiverged, mean[0], len(t.Curve))
	}
	return nil
}

// mean averages values over the ranks, by a sum, which MPI supports as well.
func (t *trainer) mean(ctx context.Context, values []float64) ([]float64, error) {
	sums, err := backend.Reduce(ctx, t.rank, values, comm.Sum)
	for i := range sums {
		sums[i] /= float64(t.rank.Comm.WorldSize())
	}
	return sums, err
}

// checkAgreement returns an error if the weights of the ranks differ in any bit.
func (t *trainer) checkAgreement(ctx context.Context) error {
	hash := t.hash()
	// One reduction gives both bounds: the minimum of ^x is ^ of the maximum.
	bounds, err := backend.Reduce(ctx, t.rank, []uint64{hash, ^hash}, comm.Min)
	if err != nil {
		return err
	}
	if bounds[0] != ^bounds[1] {
		return fmt.Errorf("%w: the weights are not the same on all ranks after %d steps", comm.ErrMismatch, len(t.Curve))
	}
	return nil
}

// hash hashes the weights.
func (t *trainer) hash() uint64 {
	h := fnv.New64a()
	h.Write(hostmem.Bytes(t.model.params)) // never fails
	return h.Sum64()
}

// result averages the statistics over ranks.
func (t *trainer) result(ctx context.Context) (Result, error) {
	pattern := t.cfg.Patterns[0]
	steps := float64(len(t.Curve))
	curve := slices.Clone(t.Curve)
	values := []float64{float64(t.Elements), t.exchange.Seconds()}
	for _, p := range curve {
		values = append(values, p.Loss, p.SentBytes)
	}
	values, err := t.mean(ctx, values)
	if err != nil {
		return Result{}, err
	}
	for i := range curve {
		curve[i].Loss = values[2+2*i]
		curve[i].SentBytes = values[3+2*i]
	}
	for i := range t.Tests {
		t.Tests[i].SentBytes = curve[t.Tests[i].Step-1].SentBytes
	}
	last := t.Tests[len(t.Tests)-1]
	density := t.cfg.Density
	if pattern == sparse.Dense || t.chosen == sparse.Dense {
		density = 1
	}

	r := Result{
		Pattern:      pattern,
		Chosen:       t.chosen,
		Values:       t.values,
		Backend:      t.cfg.Backend,
		Network:      t.cfg.Network,
		Device:       t.rank.Runtime.Name(),
		Ranks:        t.rank.Comm.WorldSize(),
		Density:      density,
		Reproducible: t.cfg.Reproducible,
		Outer:        t.cfg.Outer.Every,
		Rounds:       t.rounds(),
		Hosts:        t.cfg.Hosts,
		Accuracy:     last.Accuracy,
		Loss:         last.Loss,
		SentElements: values[0] / steps,
		SentBytes:    curve[len(curve)-1].SentBytes / steps,
		CommSeconds:  values[1],
		TotalSeconds: t.clock.Seconds(),
		Target:       t.cfg.Target,
		Tests:        t.Tests,
		Hash:         fmt.Sprintf("%016x", t.hash()),
		Curve:        curve,
	}
	if dense := t.denseBytes(); dense > 0 {
		r.RatioToDense = r.SentBytes / dense
	}
	reached := func(test Test) bool {
		return t.cfg.Target > 0 && test.Accuracy >= t.cfg.Target
	}
	if i := slices.IndexFunc(t.Tests, reached); i >= 0 {
		test := &t.Tests[i]
		r.TargetSeconds = &test.Seconds
		r.TargetStep = &test.Step
		r.TargetRounds = &test.rounds
		r.TargetSentBytes = &curve[test.Step-1].SentBytes
	}
	return r, nil
}

// denseBytes is the number of bytes that a rank sends in a dense allreduce of the gradient: 2n(P-1)/P elements, the
// minimum of any algorithm (P. Patarasuk, X. Yuan, "Bandwidth Optimal All-reduce Algorithms", 2009).
func (t *trainer) denseBytes() float64 {
	p := float64(t.rank.Comm.WorldSize())
	return 2 * float64(len(t.gradient)*dtype.F32.Size()) * (p - 1) / p
}

// vector views v as a BLAS vector.
func vector(v []float32) blas32.Vector {
	return blas32.Vector{
		N:    len(v),
		Inc:  1,
		Data: v,
	}
}
