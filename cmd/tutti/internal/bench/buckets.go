package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tutti-go/tutti/cmd/tutti/internal/attempt"
	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/measure"
	"github.com/tutti-go/tutti/runtime"
)

// BucketsConfig describes a measurement of gradients that are exchanged during a backward pass. Each bucket of a
// [ddp.Gradients] has one float32 gradient.
type BucketsConfig struct {
	// Backend is the name that results carry.
	Backend string
	// Patterns of package distributed. Each is measured.
	Patterns []string
	// Density is the fraction of the entries that a rank selects, in (0, 1].
	Density float64
	// Buckets is the number of buckets, and Bytes the size of each.
	Buckets, Bytes int
	// Wire is the type in which the dense pattern sends gradients, F32, F16 or BF16.
	Wire dtype.DType
	// Views has the backward pass write gradients into the buckets, which saves the copy. It excludes Wire.
	Views bool
	// Backward is the time to compute the gradients of a bucket. The rank sleeps for that time, because the ranks of
	// an emulated cluster share its processors.
	Backward time.Duration
	// Rounds is the number of rounds. Their median counts.
	Rounds int
}

// Validate returns an error that names the first invalid setting.
func (c BucketsConfig) Validate() error {
	switch {
	case !(c.Density > 0 && c.Density <= 1):
		return fmt.Errorf("density %v is not in (0, 1]", c.Density)
	case c.Buckets < 1 || c.Buckets > 1<<16:
		return fmt.Errorf("buckets %d is not in [1, %d]", c.Buckets, 1<<16)
	case c.Bytes < dtype.F32.Size():
		return fmt.Errorf("size %d is not %d bytes or more", c.Bytes, dtype.F32.Size())
	case c.Wire != dtype.F32 && c.Wire != dtype.F16 && c.Wire != dtype.BF16:
		return fmt.Errorf("gradients are sent as f32, f16 or bf16, not %v", c.Wire)
	case c.Wire != dtype.F32 && c.Views:
		return fmt.Errorf("gradients in the buckets are sent as f32, not %v", c.Wire)
	case c.Backward < 0 || c.Backward > time.Hour:
		return fmt.Errorf("backward %v is not in [0s, %v]", c.Backward, time.Hour)
	}
	return Repeats{Rounds: c.Rounds}.Validate()
}

// BucketsResult is one line of `tutti bench buckets --json`. Times are those of a
// step on the slowest rank, in microseconds.
type BucketsResult struct {
	Pattern  string   `json:"pattern"`          // as requested
	Chosen   []string `json:"chosen,omitempty"` // by auto, for each bucket
	Backend  string   `json:"backend"`          // its name
	Ranks    int      `json:"ranks"`            // of the world
	Density  float64  `json:"density"`          // of the pattern's selection
	Buckets  int      `json:"buckets"`          // number of them
	Bytes    int      `json:"bytes"`            // of a bucket
	Wire     string   `json:"wire,omitempty"`   // type that is sent, if not the gradients' own
	Views    bool     `json:"views,omitempty"`  // gradients are in the buckets
	Backward float64  `json:"backward_us"`      // of all buckets
	// After reduces the buckets when the backward pass is over. Overlapped reduces them during the pass.
	After      float64 `json:"after_us"`
	Overlapped float64 `json:"overlapped_us"`
	// Hidden is the fraction of the reduction's time that Overlapped does not add.
	Hidden float64 `json:"hidden"`
}

// wire is the type that a pattern sends instead of the gradients' own; Invalid for none.
func (c BucketsConfig) wire(pattern string) dtype.DType {
	if pattern != sparse.Dense || c.Wire == dtype.F32 {
		return dtype.Invalid
	}
	return c.Wire
}

// RunBuckets runs the measurement. It is collective: every rank calls it with the same valid configuration. Rank 0
// calls report with each result.
func RunBuckets(ctx context.Context, r backend.Rank, cfg BucketsConfig, report func(BucketsResult)) error {
	// The random numbers, and for each bucket the gradient, the residual and the previous residual.
	if err := r.Fits(cfg.Backend, "the buffers", float64(1+3*cfg.Buckets)*float64(cfg.Bytes),
		"--size, --buckets or --ranks"); err != nil {
		return err
	}
	for _, pattern := range cfg.Patterns {
		result, err := measureBuckets(ctx, r, cfg, pattern)
		if err != nil {
			return fmt.Errorf("pattern %s: %w", pattern, err)
		}
		if r.Comm.Rank() == 0 {
			report(result)
		}
	}
	return nil
}

// bucketsRun is one rank's state while a pattern is measured.
type bucketsRun struct {
	backend.Rank
	cfg        BucketsConfig     // the same for all patterns
	random     []float32         // the gradients' values
	registered []*runtime.Tensor // one per bucket
	gradients  []*runtime.Tensor // written by the backward pass: the registered tensors, or the views
	sync       *ddp.Gradients    // of the measured pattern
}

func measureBuckets(
	ctx context.Context,
	r backend.Rank,
	cfg BucketsConfig,
	pattern string,
) (_ BucketsResult, err error) {
	b := &bucketsRun{
		Rank:   r,
		cfg:    cfg,
		random: make([]float32, cfg.Bytes/dtype.F32.Size()),
	}
	defer func() {
		err = errors.Join(err, b.close())
	}()
	rng := rand.New(rand.NewPCG(
		uint64(r.Comm.Rank()),
		uint64(len(b.random)),
	))
	for i := range b.random {
		b.random[i] = float32(rng.NormFloat64())
	}
	if err := b.prepare(ctx, pattern); err != nil {
		return BucketsResult{}, err
	}
	seconds, err := measure.InTurns(2, cfg.Rounds, slowest(ctx, r),
		func() (float64, error) {
			return b.step(ctx, false)
		}, func() (float64, error) { return b.step(ctx, true) })
	if err != nil {
		return BucketsResult{}, err
	}
	result := BucketsResult{
		Pattern:    pattern,
		Backend:    cfg.Backend,
		Ranks:      r.Comm.WorldSize(),
		Density:    cfg.Density,
		Buckets:    cfg.Buckets,
		Bytes:      cfg.Bytes,
		Views:      cfg.Views,
		Backward:   significant(float64(cfg.Backward.Microseconds()) * float64(cfg.Buckets)),
		After:      significant(measure.Median(seconds[0]) * 1e6),
		Overlapped: significant(measure.Median(seconds[1]) * 1e6),
	}
	if cfg.wire(pattern) != dtype.Invalid {
		result.Wire = cfg.Wire.String()
	}
	result.Hidden = significant((result.After - result.Overlapped) / (result.After - result.Backward))
	if pattern == sparse.Auto {
		stats, err := b.sync.Stats(ctx)
		if err != nil {
			return BucketsResult{}, err
		}
		result.Chosen = stats.Patterns
	}
	return result, nil
}

// prepare makes the gradients and their reducer.
func (b *bucketsRun) prepare(ctx context.Context, pattern string) error {
	for range b.cfg.Buckets {
		// Two dimensions, like weights: vectors are reduced densely.
		t, err := runtime.New(b.Runtime, dtype.F32, len(b.random), 1)
		if err != nil {
			return err
		}
		b.registered = append(b.registered, t)
	}
	var err error
	b.sync, err = ddp.New(ctx, b.Runtime, b.Comm, b.registered, ddp.Config{
		BucketBytes: 1, // each gradient is a bucket
		Config:      sparse.Config{Pattern: pattern, Density: b.cfg.Density},
		Wire:        b.cfg.wire(pattern),
		BucketViews: b.cfg.Views,
	})
	if err != nil {
		return err
	}
	b.gradients = b.registered
	if b.cfg.Views {
		b.gradients = b.sync.Views()
	}
	return nil
}

// step makes a step and returns its time on this rank. With overlapped, buckets are reduced during the backward pass.
func (b *bucketsRun) step(ctx context.Context, overlapped bool) (float64, error) {
	var a attempt.Calls
	for _, g := range b.gradients {
		a.Do(func() error { return runtime.CopyIn(g, b.random) })
	}
	a.Do(func() error { return b.Comm.Barrier(ctx) })
	start := time.Now()
	if !overlapped {
		a.Do(func() error {
			return compute(ctx, b.cfg.Backward*time.Duration(b.cfg.Buckets))
		})
	}
	for i, g := range slices.Backward(b.gradients) {
		if overlapped {
			a.Do(func() error { return compute(ctx, b.cfg.Backward) })
		}
		a.Do(func() error { return b.sync.Ready(ctx, i, g) })
	}
	a.Do(func() error { return b.sync.Wait(ctx) })
	a.Do(func() error { return b.Comm.Sync(ctx) })
	a.Do(func() error { return b.Runtime.Synchronize(ctx) })
	return time.Since(start).Seconds(), a.Err
}

// compute stands for a backward pass of the given duration.
func compute(ctx context.Context, long time.Duration) error {
	select {
	case <-time.After(long):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// close frees the memory of measureBuckets.
func (b *bucketsRun) close() error {
	var errs []error
	if b.sync != nil {
		errs = append(errs, b.sync.Close())
	}
	for _, g := range b.registered {
		errs = append(errs, g.Free())
	}
	return errors.Join(errs...)
}
