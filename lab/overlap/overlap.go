// Package overlap measures how much of the gradients' communication a data
// parallel training step can hide behind its backward pass.
//
// The model is a chain of linear layers in bfloat16. Each rank computes a step
// on its own batch, of a loss divided by the world size; the gradients are
// added up by [ddp.Gradients], either after the backward pass or while
// it goes on, ordered by events. They lie in symmetric memory where the
// communicator has that. All times are those of the devices' clocks.
//
// With a sparse pattern what is sent depends on the numbers, so there gradients are
// random numbers, new ones in every step, which are copied to where products have left
// theirs (part of the passes), and residuals begin as they are after many steps.
//
// It needs streams and timing events, which [Compute] and [comm.StreamSyncOps]
// stand for: [GPU] has them on NVIDIA GPUs.
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

// Compute is what the measurement needs of a device beyond its runtime.
type Compute interface {
	// Multiply submits c = a·b, matrices of [Element], to the runtime's compute
	// stream.
	Multiply(c, a, b cublas.Matrix) error
	// SetMultiprocessors makes later products leave the device's other
	// multiprocessors to communication; 0 uses all.
	SetMultiprocessors(n int) error

	// CreateTimer makes an event with a time, which [comm.StreamSyncOps] can
	// record.
	CreateTimer() (event uintptr, err error)
	// DestroyTimer frees it.
	DestroyTimer(event uintptr) error
	// Elapsed is the device's time between two such events that have passed.
	Elapsed(from, to uintptr) (time.Duration, error)
}

// Element is the type of all matrices.
const Element = dtype.BF16

// Config is what to measure. All ranks pass the same.
type Config struct {
	// Layers is the number of linear layers, Width the size of a layer's input
	// and output, Batch the rows of a rank's input.
	Layers, Width, Batch int
	// BucketBytes is how many bytes of gradients are reduced together, as in
	// [ddp.Config]. A layer with more is reduced on its own. The
	// first layer's gradient, the last to be ready, is then computed and reduced
	// in parts of at most this size, since all that is reduced after the last
	// product is not hidden.
	BucketBytes int
	// Pattern is how gradients are averaged, [sparse.Dense] for their plain sum;
	// of another one Density is the part of the entries that a rank selects.
	Pattern string
	Density float64
	// Multiprocessors is how many of them products use while gradients are being
	// reduced, 0 for all.
	Multiprocessors int
	// Steps are run one after the other in each of Rounds, of which the median
	// counts; a round more warms up.
	Steps, Rounds int
	// Seed draws weights and inputs.
	Seed uint64
	// Progress, if set, is told on rank 0 how many rounds are done.
	Progress func(done, total int)
}

// Default is the shape on which PyTorch's DistributedDataParallel was measured.
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

// sparse reports whether not all of the gradients is sent.
func (c Config) sparse() bool { return c.Pattern != "" && c.Pattern != sparse.Dense }

// Validate names the first setting that cannot be used.
func (c Config) Validate() error {
	for _, n := range []struct {
		name   string
		value  int
		lowest int
	}{
		{"layers", c.Layers, 1}, {"width", c.Width, 1}, {"batch", c.Batch, 1}, {"bucket", c.BucketBytes, 1},
		{"sms", c.Multiprocessors, 0}, {"steps", c.Steps, 1}, {"rounds", c.Rounds, 1},
	} {
		highest := 1 << 20 // so that no product of three overflows
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

// Rank is what one rank works with.
type Rank struct {
	Runtime runtime.Runtime // of a device with streams
	Compute Compute         // on Runtime's device
	// Comm communicates where nothing runs beside, with the library's own
	// settings.
	Comm comm.Communicator
	// Beside has the same ranks and communicates beside products, perhaps with
	// fewer thread blocks; nil means Comm.
	Beside comm.Communicator
}

// Result is what was measured: milliseconds of a step on the slowest rank,
// medians over the rounds.
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
	// Pattern is how buckets are reduced, Density how much of a sparse one is sent.
	Pattern string  `json:"pattern"`
	Density float64 `json:"density"`

	// ComputeMS is the forward and backward pass alone.
	ComputeMS float64 `json:"compute_ms"`
	// CommMS is the reduction of all buckets, one after the other, alone.
	CommMS float64 `json:"comm_ms"`
	// CommFlatMS is one reduction of all gradients as a single buffer, alone.
	CommFlatMS float64 `json:"comm_flat_ms"`
	// CommBesideMS is CommMS with the communicator that works beside products.
	CommBesideMS float64 `json:"comm_beside_ms"`
	// SequentialMS is the passes and then the buckets.
	SequentialMS float64 `json:"sequential_ms"`
	// OverlappedMS is the passes with each bucket reduced as soon as it is ready.
	OverlappedMS float64 `json:"overlapped_ms"`

	// Hidden is (ComputeMS + CommFlatMS - OverlappedMS) / CommFlatMS: the share of
	// the communication that takes no extra time, against the fastest way to
	// communicate the same bytes. 0 if there is nothing to communicate. With a sparse
	// pattern it is of CommMS, what selects, exchanges and merges all buckets alone;
	// CommFlatMS is the time of a dense step all the same.
	Hidden float64 `json:"hidden"`
	// OverlappedMS - ComputeMS is the sum of these two: the passes take longer
	// beside communication, and what is reduced after the last product.
	SlowdownMS float64 `json:"slowdown_ms"`
	TailMS     float64 `json:"tail_ms"`
	// TFLOPS is 10^12 floating point operations per second of the passes alone.
	TFLOPS float64 `json:"tflops"`

	// Timelines are a step one after the other and an overlapped one on rank 0,
	// each the median of those that were recorded.
	Timelines []Timeline `json:"timelines"`
}

// Run measures by a valid configuration. It is collective; every rank gets the result, with rank 0's
// timelines on rank 0 only. A communicator or runtime without streams is
// [comm.ErrUnsupported]. After an error close the communicators: the others wait
// for this rank until then, and symmetric memory is freed by that.
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

// result puts the figures together.
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
