package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tutti-go/tutti/cmd/tutti/internal/attempt"
	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/measure"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/internal/stages"
	"github.com/tutti-go/tutti/runtime"
)

// SparseConfig describes a measurement of the sparse allreduce on tensors of normally distributed random numbers, new
// ones in every step. Residuals start as they are after many steps.
type SparseConfig struct {
	// Backend is the name that results carry.
	Backend string
	// DType of the tensors: F32, F16 or BF16.
	DType dtype.DType
	// Patterns of package sparse, each measured at each size with each codec in Values (package sparse); f32 if
	// Values is empty.
	Patterns, Values []string
	// Densities are the fractions of the entries that a rank selects, in (0, 1]. The dense pattern is measured once
	// for all densities.
	Densities []float64
	// Hosts is the number of hosts that the ranks run on, see [backend.NewReducer]; 0 treats all ranks alike.
	Hosts int
	// Sizes of the tensor in bytes.
	Sizes []int
	Repeats
	// Interleave measures the patterns of a size alternately, one round each, instead of one after the other. Close
	// results need it, and it takes the memory of all patterns at once.
	Interleave bool
	// Verify compares a step with a reference, see [SparseResult].
	Verify bool
	// Graph captures a step in a CUDA graph and replays it. It needs a rank with a [backend.ComputeStream] and a
	// pattern that needs no number on the host.
	Graph bool
	// NoUndo: steps are no transactions, as in [sparse.Config].
	NoUndo bool
}

// Validate returns an error that names the first invalid setting.
func (c SparseConfig) Validate() error {
	for _, d := range c.Densities {
		if !(d > 0 && d <= 1) {
			return fmt.Errorf("density %v is not in (0, 1]", d)
		}
	}
	switch c.DType {
	case dtype.F32, dtype.F16, dtype.BF16:
	default:
		return fmt.Errorf("gradients are f32, f16 or bf16, not %v", c.DType)
	}
	if c.Hosts < 0 {
		return fmt.Errorf("%d hosts are not 1 or more", c.Hosts)
	}
	return c.Repeats.Validate()
}

// SparseResult is one line of `tutti bench sparse --json`. Bandwidths are those of a dense allreduce that takes the
// same time. Wrong counts the elements that break a promise of every pattern: the input of a step comes out of it, in
// the result or in the residuals, and all ranks have the same bits.
type SparseResult struct {
	Result
	Pattern string `json:"pattern"` // as requested
	// Chosen is the pattern that auto chose; "" for other patterns.
	Chosen string `json:"chosen,omitempty"`
	// Values is the codec of the values that are sent.
	Values  string  `json:"values"`
	Density float64 `json:"density"`
	// Hosts is the number of hosts that the pattern connects; 0: it connects all ranks.
	Hosts int `json:"hosts,omitempty"`
	// SentBytes is the number of bytes sent in a step, with lengths and headers, as package metered counts: the mean
	// over ranks and steps. With Hosts it counts traffic between hosts, and InnerBytes traffic within them.
	SentBytes  float64 `json:"sent_bytes_per_rank"`
	InnerBytes float64 `json:"inner_bytes_per_rank,omitempty"`
	// SelectTime, ExchangeTime and MergeTime are the parts of a step in microseconds: the mean over ranks and the
	// steps of a round, and the median over rounds. On a device they are its times for steps submitted one by one;
	// otherwise the exchange contains the merge.
	SelectTime   float64 `json:"select_us"`
	ExchangeTime float64 `json:"exchange_us"`
	MergeTime    float64 `json:"merge_us,omitempty"`
	// RoundTimes, with Interleave, are the rounds whose median is Time. Rounds with the same index were measured
	// alternately.
	RoundTimes []float64 `json:"rounds_us,omitempty"`
	// NoUndo as in [SparseConfig].
	NoUndo bool `json:"no_undo,omitempty"`
}

// freshShift is the number of different gradients cut from one row of random numbers: step t uses the numbers shifted
// by t mod freshShift elements.
const freshShift = 4096

// RunSparse runs the measurement. It is collective: every rank calls it with the same valid configuration. Rank 0
// calls report with each result.
func RunSparse(ctx context.Context, r backend.Rank, cfg SparseConfig, report func(SparseResult)) error {
	if cfg.Graph && r.Compute == nil {
		return backend.Needs(cfg.Backend, "--graph", "CUDA graphs")
	}
	// The random numbers, and for each pattern the residual and its saved copy for rollback.
	perElement := cfg.DType.Size() + cfg.subjects()*(cfg.DType.Size()+dtype.F32.Size())
	if err := r.Fits(cfg.Backend, "the buffers", float64(slices.Max(cfg.Sizes)/cfg.DType.Size())*float64(perElement),
		"--max or --ranks"); err != nil {
		return err
	}
	locations, err := backend.Locations(ctx, r)
	if err != nil {
		return err
	}
	for _, bytes := range cfg.Sizes {
		err := measureSize(ctx, r, cfg, max(1, bytes/cfg.DType.Size()), func(result SparseResult) {
			result.Locations = locations
			report(result)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// subjects is the number of patterns measured alternately.
func (c SparseConfig) subjects() int {
	if c.Interleave {
		return max(len(c.cells()), 1)
	}
	return 1
}

// cell is one combination to measure at each size and density.
type cell struct{ pattern, values string }

// cells returns all combinations of patterns and values.
func (c SparseConfig) cells() (all []cell) {
	named := c.Values
	if len(named) == 0 {
		named = []string{sparse.F32}
	}
	for _, pattern := range c.Patterns {
		for _, values := range named {
			all = append(all, cell{pattern, values})
		}
	}
	return all
}

// measureSize measures all patterns on n elements.
func measureSize(ctx context.Context, r backend.Rank, cfg SparseConfig, n int, report func(SparseResult)) (err error) {
	rng := rand.New(rand.NewPCG(uint64(r.Comm.Rank()), uint64(n)))
	values := make([]float32, n+freshShift)
	for i := range values {
		if i%chunkBytes == 0 && ctx.Err() != nil {
			return comm.ContextError(ctx)
		}
		values[i] = float32(rng.NormFloat64())
	}
	random, err := fromFloats(r.Runtime, cfg.DType, values)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, random.Free())
	}()
	for i, density := range cfg.Densities {
		for cells := range slices.Chunk(cfg.cells(), cfg.subjects()) {
			if i > 0 {
				cells = slices.DeleteFunc(slices.Clone(cells), func(c cell) bool {
					return c.pattern == sparse.Dense
				})
			}
			if err := measureSparse(ctx, r, cfg, random, cells, density, n, report); err != nil {
				return err
			}
		}
	}
	return nil
}

// sparseRun is one rank's state while a pattern is measured at a size.
type sparseRun struct {
	backend.Rank
	cell
	hosts  int              // see [SparseConfig]
	sparse *backend.Reducer // of the cell
	random *runtime.Tensor  // n + freshShift elements
	tensor *runtime.Tensor  // n elements: the gradient, then the result; shared by all patterns
	step   int              // number of the next step
	rounds []sparseRound    // in order
	graph  backend.Graph    // of a step; nil if steps are submitted one by one
}

// sparseRound holds the means of a round on one rank.
type sparseRound struct {
	sent, inner, choose, exchange, merge float64 // bytes, bytes, seconds, seconds, seconds
}

// measureSparse measures patterns alternately.
func measureSparse(
	ctx context.Context,
	r backend.Rank,
	cfg SparseConfig,
	random *runtime.Tensor,
	cells []cell,
	density float64,
	n int,
	report func(SparseResult),
) (err error) {
	// All patterns share it, because a buffer's place may matter as much as the pattern.
	gradient, err := runtime.New(r.Runtime, cfg.DType, n)
	if err != nil {
		return err
	}
	var runs []*sparseRun
	defer func() {
		for _, s := range runs {
			err = errors.Join(err, s.close())
		}
		err = errors.Join(err, gradient.Free())
	}()
	var rounds []measure.Round
	for _, c := range cells {
		s, err := newSparseRun(ctx, r, cfg, random, gradient, c, density)
		if err != nil {
			return c.about(n, err)
		}
		runs = append(runs, s)
		var a attempt.Calls
		a.Do(func() error { return s.warmUp(ctx, density) })
		if cfg.Graph && !sparsity.NeedsHost(c.pattern) {
			a.Do(func() error { return s.capture(ctx) })
		}
		once := attempt.Get(&a, func() (int, error) {
			return cfg.calibrate(ctx, r, s.round)
		})
		if a.Err != nil {
			return c.about(n, a.Err)
		}
		s.rounds = nil // those so far were warm-up
		rounds = append(rounds, perIteration(
			ctx,
			func(ctx context.Context, iterations int) (float64, error) {
				seconds, err := s.round(ctx, iterations)
				return seconds, c.about(n, err)
			},
			once,
		))
	}
	seconds, err := measure.InTurns(0, cfg.Rounds, slowest(ctx, r), rounds...)
	if err != nil {
		return err
	}
	for i, s := range runs {
		result, err := s.result(ctx, cfg, density, seconds[i])
		if err != nil {
			return s.about(n, err)
		}
		if r.Comm.Rank() == 0 {
			report(result)
		}
	}
	return nil
}

// about adds the measurement to its error.
func (c cell) about(n int, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("pattern %s with values %s on %d elements: %w", c.pattern, c.values, n, err)
}

// result makes the result of the measurement.
func (s *sparseRun) result(
	ctx context.Context,
	cfg SparseConfig,
	density float64,
	seconds []float64,
) (SparseResult, error) {
	var a attempt.Calls
	parts := attempt.Get(&a, func() (sparseRound, error) { return s.meanRounds(ctx) })
	stats := attempt.Get(&a, func() (sparse.Stats, error) {
		return s.sparse.Stats(ctx)
	})
	n := s.tensor.Len()
	p := float64(s.Comm.WorldSize())
	result := SparseResult{
		Result: Result{
			Collective: "sparse",
			Backend:    cfg.Backend,
			Device:     s.Runtime.Name(),
			Ranks:      s.Comm.WorldSize(),
			Bytes:      n * cfg.DType.Size(),
			Count:      n,
			DType:      cfg.DType.String(),
			Op:         comm.Avg.String(),
			Place:      InPlace,
			Graph:      s.graph != nil,
			Root:       -1,
		},
		Pattern:      s.pattern,
		Values:       s.values,
		Density:      density,
		Hosts:        cfg.Hosts,
		SentBytes:    significant(parts.sent),
		InnerBytes:   significant(parts.inner),
		SelectTime:   significant(parts.choose * 1e6),
		ExchangeTime: significant(parts.exchange * 1e6),
		MergeTime:    significant(parts.merge * 1e6),
		NoUndo:       cfg.NoUndo,
		Chosen:       stats.Chosen,
	}
	if s.pattern == sparse.Dense || result.Chosen == sparse.Dense {
		result.Density = 1
	}
	result.setTime(measure.Median(seconds), 2*(p-1)/p)
	if cfg.Interleave {
		for _, round := range seconds {
			result.RoundTimes = append(result.RoundTimes, significant(round*1e6))
		}
	}
	if cfg.Verify {
		wrong := attempt.Get(&a, func() (int64, error) { return s.verify(ctx) })
		result.Wrong = &wrong
	}
	return result, a.Err
}

// newSparseRun makes one rank's reduction.
func newSparseRun(
	ctx context.Context,
	r backend.Rank,
	cfg SparseConfig,
	random, gradient *runtime.Tensor,
	c cell,
	density float64,
) (_ *sparseRun, err error) {
	n := gradient.Len()
	s := &sparseRun{
		Rank:   r,
		random: random,
		tensor: gradient,
		cell:   c,
		hosts:  cfg.Hosts,
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	reduce := cfg.sparse(c.pattern, c.values, density)
	reduce.NoUndo = cfg.NoUndo || c.pattern == sparse.Dense // the dense reference is a plain allreduce
	s.sparse, err = backend.NewReducer(ctx, r, cfg.Backend, cfg.Hosts, n, cfg.DType, reduce)
	return s, err
}

// sparse returns the configuration of a cell.
func (c SparseConfig) sparse(pattern, values string, density float64) sparse.Config {
	return sparse.Config{
		Pattern: pattern,
		Values:  values,
		Density: density,
	}
}

// warmUp makes the residual as large as after many steps.
func (s *sparseRun) warmUp(ctx context.Context, density float64) error {
	var a attempt.Calls
	pattern := s.pattern
	ranks := s.Comm.WorldSize()
	if pattern == sparse.Auto { // chosen in the first step
		attempt.Get(&a, func() (float64, error) { return s.round(ctx, 1) })
		stats := attempt.Get(&a, func() (sparse.Stats, error) {
			return s.sparse.Stats(ctx)
		})
		if a.Err != nil {
			return a.Err
		}
		pattern = stats.Chosen
	}
	if pattern == sparse.Dense {
		return nil
	}
	residual := attempt.Get(&a, s.sparse.Residual)
	if a.Err != nil {
		return a.Err
	}
	between := cmp.Or(s.hosts, ranks)
	n := residual.Len()
	interval := float64(n) / max(1, math.Round(density*float64(n)))
	if pattern == sparse.TopkA2 || pattern == sparse.Oktopk { // k entries of all ranks together are sent
		interval *= float64(between)
	}
	values := make([]float32, min(n, 1<<16))
	measure.DrawResidual(
		rand.New(rand.NewPCG(uint64(s.Comm.Rank()), uint64(n))),
		values,
		math.Sqrt(float64(between)/float64(ranks)),
		interval,
	)
	for from := 0; from < n; from += len(values) {
		to := min(from+len(values), n)
		part := attempt.Get(&a, func() (*runtime.Tensor, error) {
			return residual.Slice(0, from, to)
		})
		a.Do(func() error {
			return errors.Join(runtime.CopyIn(part, values[:to-from]), part.Free())
		})
	}
	return a.Err
}

// capture makes the graph of a step. The step before it allocates the memory.
func (s *sparseRun) capture(ctx context.Context) error {
	if _, err := s.round(ctx, 2); err != nil {
		return err
	}
	var err error
	s.graph, err = s.Compute.Capture(func() error {
		return s.sparse.AllReduce(ctx, s.tensor)
	})
	return err
}

// close frees the memory of newSparseRun.
func (s *sparseRun) close() error {
	var err error
	if s.graph != nil {
		err = s.graph.Close()
	}
	if s.sparse != nil {
		err = s.sparse.Close()
	}
	return err
}

// round measures the steps without the preparation of their gradients. It uses the device's clock if the host runs
// ahead of the device, and otherwise the host's clock.
func (s *sparseRun) round(ctx context.Context, iterations int) (seconds float64, err error) {
	if s.Compute != nil {
		return s.deviceRound(ctx, iterations)
	}
	var mean sparseRound
	for range iterations {
		var a attempt.Calls
		a.Do(s.nextGradient)
		a.Do(func() error { return s.Runtime.Synchronize(ctx) })
		a.Do(func() error { return s.Comm.Barrier(ctx) })
		start := time.Now()
		a.Do(func() error { return s.sparse.AllReduce(ctx, s.tensor) })
		// The communicator goes first: it aborts its work when ctx ends the wait.
		a.Do(func() error { return s.sparse.Sync(ctx) })
		a.Do(func() error { return s.Runtime.Synchronize(ctx) })
		seconds += time.Since(start).Seconds()
		stats := attempt.Get(&a, func() (sparse.Stats, error) {
			return s.sparse.Stats(ctx)
		})
		if a.Err != nil {
			return 0, a.Err
		}
		mean.sent += float64(stats.SentBytes) / float64(iterations)
		sent, _ := s.sparse.Within()
		mean.inner += float64(sent) / float64(iterations)
		mean.choose += stats.SelectTime.Seconds() / float64(iterations)
		mean.exchange += stats.ExchangeTime.Seconds() / float64(iterations)
	}
	s.rounds = append(s.rounds, mean)
	return seconds, nil
}

// deviceRound is round on a device.
func (s *sparseRun) deviceRound(ctx context.Context, iterations int) (seconds float64, err error) {
	var a attempt.Calls
	a.Do(func() error { return s.Comm.Barrier(ctx) })
	step := func() error { return s.sparse.AllReduce(ctx, s.tensor) }
	if s.graph != nil {
		step = s.graph.Launch
	}
	const maxAhead = 64 // steps that the host may be ahead
	for done := 0; done < iterations; done += maxAhead {
		seconds += attempt.Get(&a, func() (time.Duration, error) {
			return s.Compute.Steps(ctx, min(maxAhead, iterations-done), s.nextGradient, step)
		}).Seconds()
	}
	s.rounds = append(s.rounds, attempt.Get(&a, func() (sparseRound, error) {
		return s.parts(ctx)
	}))
	return seconds, a.Err
}

// parts measures the parts of a few steps on a device.
func (s *sparseRun) parts(ctx context.Context) (sparseRound, error) {
	var round sparseRound
	if r, ok := s.sparse.Sparse(); ok && s.pattern != sparse.Dense {
		took, err := s.Compute.Parts(ctx, 8, 3, s.nextGradient, func(next func() error) error {
			var err error
			observed := stages.Observe(ctx, func(int, stages.Stage, uintptr) {
				err = errors.Join(err, next())
			})
			return errors.Join(r.AllReduce(observed, s.tensor), err)
		})
		if err != nil {
			return round, err
		}
		round.choose = took[0].Seconds()
		round.exchange = took[1].Seconds()
		round.merge = took[2].Seconds()
	}
	stats, err := s.sparse.Stats(ctx)
	round.sent = float64(stats.SentBytes)
	sent, _ := s.sparse.Within()
	round.inner = float64(sent)
	return round, err
}

// meanRounds returns the means of the bytes sent and the medians over rounds of the times, each averaged over ranks.
func (s *sparseRun) meanRounds(ctx context.Context) (sparseRound, error) {
	n := len(s.rounds)
	values := make([]float64, 5*n)
	for i, r := range s.rounds {
		values[i] = r.sent
		values[n+i] = r.inner
		values[2*n+i] = r.choose
		values[3*n+i] = r.exchange
		values[4*n+i] = r.merge
	}
	values, err := backend.Reduce(ctx, s.Rank, values, comm.Sum)
	if err != nil {
		return sparseRound{}, err
	}
	ranks := float64(s.Comm.WorldSize())
	var sent, inner float64
	for i := range n {
		sent += values[i] / float64(n)
		inner += values[n+i] / float64(n)
	}
	return sparseRound{
		sent:     sent / ranks,
		inner:    inner / ranks,
		choose:   measure.Median(values[2*n:3*n]) / ranks,
		exchange: measure.Median(values[3*n:4*n]) / ranks,
		merge:    measure.Median(values[4*n:]) / ranks,
	}, nil
}

// nextGradient writes the gradient of the next step into the tensor.
func (s *sparseRun) nextGradient() (err error) {
	shift := s.step % freshShift
	s.step++
	gradient, err := s.random.Slice(0, shift, shift+s.tensor.Len())
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, gradient.Free())
	}()
	return s.tensor.CopyFrom(gradient)
}

// verify makes one more step and counts wrong elements over all ranks.
func (s *sparseRun) verify(ctx context.Context) (int64, error) {
	var a attempt.Calls
	values := func() []float32 {
		return attempt.Get(&a, func() ([]float32, error) { return toFloats(s.tensor) })
	}
	sum := func(x []float32) []float32 {
		return attempt.Get(&a, func() ([]float32, error) {
			return backend.Reduce(ctx, s.Rank, x, comm.Sum)
		})
	}
	pending := func() ([]float32, error) {
		return s.sparse.Pending(s.tensor.Len())
	}
	a.Do(s.nextGradient)
	gradient := values()
	before := attempt.Get(&a, pending)
	a.Do(func() error { return s.sparse.AllReduce(ctx, s.tensor) })
	a.Do(func() error { return s.sparse.Sync(ctx) })
	after := attempt.Get(&a, pending)
	a.Do(func() error { return s.Comm.Sync(ctx) })
	result := values()
	if a.Err != nil {
		return 0, a.Err
	}

	// gone is the data that left this rank, and size the scale of its rounding errors.
	gone := make([]float32, len(gradient))
	size := make([]float32, len(gradient))
	for i, g := range gradient {
		in := before[i] + g
		gone[i] = in - after[i]
		scale := math.Abs(float64(in)) + math.Abs(float64(after[i])) + math.Abs(float64(result[i]))
		size[i] = float32(scale)
	}
	gone = sum(gone)
	size = sum(size)
	a.Do(func() error {
		return distributed.Broadcast(ctx, s.Comm, s.tensor, 0)
	})
	a.Do(func() error { return s.Comm.Sync(ctx) })
	rank0 := values()
	if a.Err != nil {
		return 0, a.Err
	}
	total, err := backend.Reduce(
		ctx,
		s.Rank,
		[]int64{brokenPromises(
			s.tensor.DType(),
			gone,
			size,
			result,
			rank0,
			s.Comm.WorldSize(),
		)},
		comm.Sum,
	)
	if err != nil {
		return 0, err
	}
	return total[0], nil
}

// brokenPromises counts wrong elements of a rank's result. An element must equal the sum of the data that left all
// ranks divided by their number, up to the rounding of dt, and have the bits of rank 0's element.
func brokenPromises(dt dtype.DType, gone, size, result, rank0 []float32, ranks int) int64 {
	tolerance := 4 * float64(ranks) * epsilon(dt)
	var count int64
	for i, v := range result {
		difference := math.Abs(float64(gone[i]) - float64(v)*float64(ranks))
		if !(difference <= tolerance*float64(size[i])) || math.Float32bits(v) != math.Float32bits(rank0[i]) {
			count++
		}
	}
	return count
}

// fromFloats makes a tensor from values, rounded to dt.
func fromFloats(rt runtime.Runtime, dt dtype.DType, values []float32) (*runtime.Tensor, error) {
	t, err := runtime.New(rt, dt, len(values))
	if err != nil {
		return nil, err
	}
	var a attempt.Calls
	data := make([]byte, t.Bytes())
	a.Do(func() error { return dtype.FromFloat32(data, dt, values) })
	p := attempt.Get(&a, t.Ptr)
	a.Do(func() error { return rt.CopyIn(p, data) })
	if a.Err != nil {
		return nil, errors.Join(a.Err, t.Free())
	}
	return t, nil
}

// toFloats returns the elements of a tensor. It waits for the device.
func toFloats(t *runtime.Tensor) ([]float32, error) {
	var a attempt.Calls
	data := make([]byte, t.Bytes())
	values := make([]float32, t.Len())
	p := attempt.Get(&a, t.Ptr)
	a.Do(func() error { return t.Runtime().CopyOut(data, p) })
	a.Do(func() error {
		return dtype.ToFloat32(values, data, t.DType())
	})
	return values, a.Err
}
