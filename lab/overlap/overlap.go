// Package overlap measures how much of the gradients' communication a data-parallel training step can hide behind its
// backward pass.
//
// The model is a chain of linear layers in bfloat16. Each rank computes a step on its own batch, with a loss divided
// by the world size. [ddp.Gradients] sums the gradients after the backward pass, or during it, ordered by events. The
// gradients are in symmetric memory if the communicator has that. All times are from the devices' clocks.
//
// With a sparse pattern the data that is sent depends on the numbers. Gradients are then random numbers, new ones in
// every step, copied over the products' results as part of the passes. Residuals start as they are after many steps.
//
// The measurement needs streams and timing events, represented by [Compute] and [comm.StreamSyncOps]. [GPU] provides
// them on NVIDIA GPUs.
package overlap

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/tutti-go/tutti/cmd/tutti/lab/cublas"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/measure"
	"github.com/tutti-go/tutti/runtime"
)

// Compute has the operations of a device that its runtime lacks.
type Compute interface {
	// Multiply submits c = a·b, matrices of [Element], to the runtime's compute stream.
	Multiply(c, a, b cublas.Matrix) error
	// SetMultiprocessors limits later products to n multiprocessors, which leaves the others to communication; 0 uses
	// all.
	SetMultiprocessors(n int) error

	// CreateTimer makes an event with a time, for [comm.StreamSyncOps] to record.
	CreateTimer() (event uintptr, err error)
	// DestroyTimer frees it.
	DestroyTimer(event uintptr) error
	// Elapsed is the device's time between two completed events.
	Elapsed(from, to uintptr) (time.Duration, error)
}

// Element is the type of all matrices.
const Element = dtype.BF16

// Config describes the measurement. All ranks pass the same.
type Config struct {
	// Layers is the number of linear layers, Width the size of a layer's input and output, and Batch the number of
	// rows in a rank's input.
	Layers, Width, Batch int
	// BucketBytes is the number of bytes of gradients that are reduced together, as in [ddp.Config]. A larger layer
	// is reduced alone. If the first layer's gradient, the last to be ready, is larger, it is computed and reduced in
	// parts of at most this size, because reductions after the last product are not hidden.
	BucketBytes int
	// Pattern is the pattern that averages gradients; [sparse.Dense] is their plain sum. For other patterns, Density
	// is the fraction of the entries that a rank selects.
	Pattern string
	Density float64
	// Multiprocessors is the number of multiprocessors that products use while gradients are being reduced, 0 for
	// all.
	Multiprocessors int
	// Steps is the number of consecutive steps in each of Rounds. The median of the rounds counts. One additional
	// round warms up.
	Steps, Rounds int
	// Seed draws weights and inputs.
	Seed uint64
	// Progress, if set, is called on rank 0 with the number of finished rounds.
	Progress func(done, total int)
}

// Default is the shape for which PyTorch's DistributedDataParallel was measured.
func Default() Config {
	return Config{
		Layers:      32,
		Width:       4096,
		Batch:       8192,
		BucketBytes: 8 << 20,
		Pattern:     sparse.Dense,
		Density:     0.01,
		Steps:       5,
		Rounds:      7,
		Seed:        1,
	}
}

// sparse reports whether only a part of the gradients is sent.
func (c Config) sparse() bool { return c.Pattern != "" && c.Pattern != sparse.Dense }

// Validate returns an error that names the first invalid setting.
func (c Config) Validate() error {
	for _, n := range []struct {
		name   string
		value  int
		lowest int
	}{
		{"layers", c.Layers, 1}, {"width", c.Width, 1}, {"batch", c.Batch, 1}, {"bucket", c.BucketBytes, 1},
		{"sms", c.Multiprocessors, 0}, {"steps", c.Steps, 1}, {"rounds", c.Rounds, 1},
	} {
		highest := 1 << 20 // no product of three of them overflows
		if n.name == "bucket" {
			highest = math.MaxInt
		}
		if n.value < n.lowest || n.value > highest {
			return fmt.Errorf("%s is %d, want a number in [%d, %d]", n.name, n.value, n.lowest, highest)
		}
	}
	if c.sparse() && !(c.Density > 0 && c.Density <= 1) {
		return fmt.Errorf("density %v is not in (0, 1]", c.Density)
	}
	return nil
}

// Rank is the environment of one rank.
type Rank struct {
	Runtime runtime.Runtime // of a device with streams
	Compute Compute         // on Runtime's device
	// Comm communicates while nothing else runs, with the library's default settings.
	Comm comm.Communicator
	// Beside has the same ranks and communicates beside products, possibly with fewer thread blocks; nil means Comm.
	Beside comm.Communicator
}

// Result holds milliseconds of a step on the slowest rank, as medians over the rounds.
type Result struct {
	Device          string `json:"device"`
	Ranks           int    `json:"ranks"`
	Layers          int    `json:"layers"`
	Width           int    `json:"width"`
	Batch           int    `json:"batch"`
	BucketBytes     int    `json:"bucket_bytes"`
	Buckets         int    `json:"buckets"`
	GradientBytes   int    `json:"gradient_bytes"`
	Multiprocessors int    `json:"sms"` // 0: all
	// Pattern is the pattern that reduces buckets, and Density the fraction that a sparse one sends.
	Pattern string  `json:"pattern"`
	Density float64 `json:"density"`

	// ComputeMS is the time of the forward and backward pass alone.
	ComputeMS float64 `json:"compute_ms"`
	// CommMS is the time of the reduction of all buckets alone, one after the other.
	CommMS float64 `json:"comm_ms"`
	// CommFlatMS is the time of one reduction of all gradients as a single buffer, alone.
	CommFlatMS float64 `json:"comm_flat_ms"`
	// CommBesideMS is CommMS with the communicator that works beside products.
	CommBesideMS float64 `json:"comm_beside_ms"`
	// SequentialMS is the time of the passes followed by the buckets.
	SequentialMS float64 `json:"sequential_ms"`
	// OverlappedMS is the time of the passes with each bucket reduced as soon as it is ready.
	OverlappedMS float64 `json:"overlapped_ms"`

	// Hidden is (ComputeMS + CommFlatMS - OverlappedMS) / CommFlatMS: the fraction of the communication that takes no
	// extra time, relative to the fastest way to communicate the same bytes. It is 0 without communication. With a
	// sparse pattern it is relative to CommMS, the time to select, exchange and merge all buckets alone; CommFlatMS
	// is then still the time of a dense step.
	Hidden float64 `json:"hidden"`
	// OverlappedMS - ComputeMS is the sum of these two: the slowdown of the passes by communication, and the
	// reductions after the last product.
	SlowdownMS float64 `json:"slowdown_ms"`
	TailMS     float64 `json:"tail_ms"`
	// TFLOPS is the speed of the passes alone in 10^12 floating-point operations per second.
	TFLOPS float64 `json:"tflops"`

	// Timelines are a sequential and an overlapped step on rank 0, each the median of the recorded ones.
	Timelines []Timeline `json:"timelines"`
}

// Run measures with a valid configuration. It is collective, and every rank gets the result, with rank 0's timelines
// on rank 0 only. A communicator or runtime without streams is [comm.ErrUnsupported]. After an error, close the
// communicators: until then the other ranks wait for this one, and Close frees symmetric memory.
func Run(ctx context.Context, r Rank, cfg Config) (_ Result, err error) {
	s, err := newSession(ctx, r, cfg)
	if err != nil {
		return Result{}, err
	}
	defer func() {
		err = errors.Join(err, s.close(ctx, err != nil))
	}()
	phases := s.phases()
	recorded := 0
	rounds := make([]measure.Round, len(phases))
	for i := range phases {
		p := &phases[i]
		rounds[i] = func() (float64, error) {
			t, err := s.round(ctx, *p)
			if err != nil {
				return 0, fmt.Errorf("%s: %w", p.name, err)
			}
			p.busy = append(p.busy, t.busy.Seconds())
			p.timelines = append(p.timelines, t.timeline)
			recorded++
			if recorded%len(phases) == 0 && cfg.Progress != nil && r.Comm.Rank() == 0 {
				cfg.Progress(recorded/len(phases), cfg.Rounds+1)
			}
			return t.total.Seconds(), nil
		}
	}
	slowest := func(values []float64) ([]float64, error) {
		return s.slowest(ctx, values)
	}
	total, err := measure.InTurns(1, cfg.Rounds, slowest, rounds...)
	if err != nil {
		return Result{}, err
	}
	return s.result(ctx, phases, total)
}

// result computes the figures.
func (s *session) result(ctx context.Context, phases []phase, seconds [][]float64) (Result, error) {
	cfg := s.cfg
	out := Result{
		Device:          s.Runtime.Name(),
		Ranks:           s.Comm.WorldSize(),
		Layers:          cfg.Layers,
		Width:           cfg.Width,
		Batch:           cfg.Batch,
		BucketBytes:     cfg.BucketBytes,
		Buckets:         len(s.alone.sync.Buckets()),
		GradientBytes:   s.model.flat.Bytes(),
		Multiprocessors: cfg.Multiprocessors,
		Pattern:         sparse.Dense,
		Density:         1,
	}
	if cfg.sparse() {
		out.Pattern = cfg.Pattern
		out.Density = cfg.Density
	}
	medians := make(map[phaseName][2]float64, len(phases)) // total and busy, in milliseconds
	for i, p := range phases {
		busy, err := s.slowest(ctx, p.busy[1:]) // the first round warmed up
		if err != nil {
			return Result{}, err
		}
		medians[p.name] = [2]float64{
			1e3 * measure.Median(seconds[i]),
			1e3 * measure.Median(busy),
		}
		if s.Comm.Rank() == 0 && p.traced {
			out.Timelines = append(out.Timelines, medianTimeline(p.timelines[1:]))
		}
	}
	total := func(name phaseName) float64 { return medians[name][0] }
	tail := func(name phaseName) float64 {
		return medians[name][0] - medians[name][1]
	}
	out.ComputeMS = total(computing)
	out.SequentialMS = total(sequential)
	out.OverlappedMS = total(overlapped)
	out.CommMS = tail(reducing)
	out.CommFlatMS = tail(reducingFlat)
	out.CommBesideMS = tail(reducingBeside)
	busy := medians[overlapped][1]
	out.TailMS = out.OverlappedMS - busy
	out.SlowdownMS = busy - out.ComputeMS
	alone := out.CommFlatMS
	if cfg.sparse() {
		alone = out.CommMS
	}
	if out.Ranks > 1 && alone > 0 {
		out.Hidden = (out.ComputeMS + alone - out.OverlappedMS) / alone
	}
	if out.ComputeMS > 0 {
		out.TFLOPS = s.model.flops / out.ComputeMS / 1e9
	}
	return out, nil
}
