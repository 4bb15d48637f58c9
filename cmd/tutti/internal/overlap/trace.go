package overlap

import (
	"errors"
	"time"

	"github.com/tutti-go/tutti/comm"
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
	clock      clock
	ops        comm.StreamSyncOps
	stream     uintptr // the compute stream
	begin, end uintptr
	compute    []computeMark
	reductions []reductionMarks
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
	t.ops, t.stream, t.compute, t.reductions = ops, computeStream, nil, nil
	t.begin, err = t.clock.record(t.onCompute)
	return err
}

// Computed is called when a piece of work was submitted to the compute stream.
func (t *Trace) Computed(kind Kind, name string) error {
	if t == nil {
		return nil
	}
	timer, err := t.clock.record(t.onCompute)
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
	end, err := t.clock.record(t.ops.RecordOnCommStream)
	t.reductions = append(t.reductions, reductionMarks{t.compute[len(t.compute)-1].timer, end, name})
	return err
}

// End ends the step: the compute stream waits for all that belongs to it.
func (t *Trace) End() (err error) {
	t.end, err = t.clock.record(t.onCompute)
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
	return out, errors.Join(errs...)
}

// Close frees the timers.
func (t *Trace) Close() error { return t.clock.close() }
