package overlap

import (
	"errors"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/sparse"
)

// clock hands out timers and takes all of them back at once.
type clock struct {
	device Compute
	timers []uintptr
	used   int
}

// record records a timer, in the way that its argument does, and returns it.
func (c *clock) record(on func(timer uintptr) error) (uintptr, error) {
	if c.used == len(c.timers) {
		timer, err := c.device.CreateTimer()
		if err != nil {
			return 0, err
		}
		c.timers = append(c.timers, timer)
	}
	timer := c.timers[c.used]
	c.used++
	return timer, on(timer)
}

// reset makes all timers free for use.
func (c *clock) reset() { c.used = 0 }

func (c *clock) close() error {
	var errs []error
	for _, timer := range c.timers {
		errs = append(errs, c.device.DestroyTimer(timer))
	}
	c.timers, c.used = nil, 0
	return errors.Join(errs...)
}

// Trace records when the work of a step runs, by timers between the pieces on
// both streams, one step after the other. A nil Trace records nothing.
type Trace struct {
	mu         sync.Mutex // stages come from another goroutine
	clock      clock
	ops        comm.StreamSyncOps
	stream     uintptr // the compute stream
	begin, end uintptr
	compute    []computeMark
	reductions []reductionMarks
	stages     []stageMark // of sparse buckets, in the order in which they were submitted
	ready      []uintptr   // of a sparse bucket, on the compute stream
}

// stageMark is the end of a stage of a sparse bucket.
type stageMark struct {
	timer  uintptr
	bucket int
	stage  sparse.Stage
}

// computeMark is a point on the compute stream. The piece of work that ends there
// has no name if it is not to be shown.
type computeMark struct {
	timer uintptr
	kind  Kind
	name  string
}

// reductionMarks are the points between which something is reduced.
type reductionMarks struct {
	ready uintptr // on the compute stream
	end   uintptr // on the communicator's
	name  string
}

// NewTrace makes a Trace with the device's timers.
func NewTrace(device Compute) *Trace { return &Trace{clock: clock{device: device}} }

// Begin begins a step and forgets the one before.
func (t *Trace) Begin(ops comm.StreamSyncOps, computeStream uintptr) (err error) {
	t.clock.reset()
	t.ops, t.stream, t.compute, t.reductions, t.stages, t.ready = ops, computeStream, nil, nil, nil, nil
	t.begin, err = t.record(t.onCompute)
	return err
}

// record records a timer.
func (t *Trace) record(on func(timer uintptr) error) (uintptr, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.clock.record(on)
}

// Ready is called before a sparse bucket is handed over, one after the other.
func (t *Trace) Ready() error {
	if t == nil {
		return nil
	}
	if err := t.Computed("", ""); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ready = append(t.ready, t.compute[len(t.compute)-1].timer)
	return nil
}

// Passed is called when a stage of a sparse bucket was submitted; stream is where they
// are picked from and merged.
func (t *Trace) Passed(bucket int, stage sparse.Stage, stream uintptr) error {
	on := t.ops.RecordOnCommStream
	if stage != sparse.Exchanged {
		on = func(timer uintptr) error { return t.ops.RecordOnStream(timer, stream) }
	}
	timer, err := t.record(on)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stages = append(t.stages, stageMark{timer, bucket, stage})
	return err
}

// Computed is called when a piece of work was submitted to the compute stream.
func (t *Trace) Computed(kind Kind, name string) error {
	if t == nil {
		return nil
	}
	timer, err := t.record(t.onCompute)
	t.compute = append(t.compute, computeMark{timer, kind, name})
	return err
}

// Reduced is called when a reduction was submitted that waits for the compute
// stream as it is now.
func (t *Trace) Reduced(name string) error {
	if t == nil {
		return nil
	}
	if err := t.Computed("", ""); err != nil {
		return err
	}
	end, err := t.record(t.ops.RecordOnCommStream)
	t.reductions = append(t.reductions, reductionMarks{t.compute[len(t.compute)-1].timer, end, name})
	return err
}

// End ends the step: the compute stream waits for all that belongs to it.
func (t *Trace) End() (err error) {
	t.end, err = t.record(t.onCompute)
	return err
}

func (t *Trace) onCompute(timer uintptr) error { return t.ops.RecordOnStream(timer, t.stream) }

// Timeline returns the step that began last, which is complete on the device.
func (t *Trace) Timeline(name string) (Timeline, error) {
	var errs []error
	since := func(timer uintptr) float64 {
		d, err := t.clock.device.Elapsed(t.begin, timer)
		errs = append(errs, err)
		return float64(d) / float64(time.Microsecond)
	}
	out := Timeline{Name: name, Total: since(t.end)}
	last := 0.0
	for _, m := range t.compute {
		end := since(m.timer)
		if m.name != "" {
			out.Spans = append(out.Spans, Span{Kind: m.kind, Name: m.name, Start: last, End: end})
		}
		last = end
	}
	// A reduction begins when its data is ready and the one before it is done.
	last = 0
	for _, m := range t.reductions {
		end := since(m.end)
		out.Spans = append(out.Spans, Span{Kind: AllReduce, Name: m.name, Start: max(last, since(m.ready)), End: end})
		last = end
	}
	// So do stages, and each when the one before it of its bucket is.
	lasts, done := make(map[Lane]float64), make(map[int]float64)
	for b, timer := range t.ready {
		done[b] = since(timer)
	}
	kinds := map[sparse.Stage]Kind{sparse.Selected: Select, sparse.Exchanged: Exchange, sparse.Finished: Merge}
	for _, m := range t.stages {
		kind, end := kinds[m.stage], since(m.timer)
		lane := kind.Lane()
		out.Spans = append(out.Spans, Span{Kind: kind, Name: bucketName(m.bucket), Start: min(end, max(lasts[lane], done[m.bucket])), End: end})
		lasts[lane], done[m.bucket] = end, end
	}
	return out, errors.Join(errs...)
}

// Close frees the timers.
func (t *Trace) Close() error { return t.clock.close() }
