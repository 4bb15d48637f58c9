package overlap

import (
	"errors"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/stages"
)

// clock hands out timers and takes all of them back at once.
type clock struct {
	device Compute   // that makes the timers
	timers []uintptr // all that were made
	used   int       // how many of them, from the first on, are recorded
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
	c.timers = nil
	c.used = 0
	return errors.Join(errs...)
}

// Trace records when the work of a step runs, by timers between the pieces on
// all streams, one step after the other. A nil Trace records nothing.
type Trace struct {
	mu     sync.Mutex         // stages come from another goroutine
	clock  clock              // of the step; guarded by mu between Begin and End
	ops    comm.StreamSyncOps // of the communicator; nil before Begin
	stream uintptr            // the compute stream
	begin  uintptr            // the timer before the step; 0 before the first Begin
	end    uintptr            // the timer behind it; 0 before the first End
	marks  []mark             // in the order of submission; guarded by mu between Begin and End
	ready  []uintptr          // when the next stage of each sparse bucket can begin; guarded by mu, too
}

// mark is the end of a piece of work. The piece has no name if it is not to be shown.
type mark struct {
	timer uintptr // when it ends
	after uintptr // a timer on another stream, which the piece waited for, or 0
	kind  Kind    // whose lane it is on
	name  string  // "" if it is not shown
}

// NewTrace makes a Trace with the device's timers.
func NewTrace(device Compute) *Trace { return &Trace{clock: clock{device: device}} }

// Begin begins a step and forgets the one before.
func (t *Trace) Begin(ops comm.StreamSyncOps, computeStream uintptr) (err error) {
	t.clock.reset()
	t.ops = ops
	t.stream = computeStream
	t.marks = nil
	t.ready = nil
	t.begin, err = t.clock.record(t.onCompute)
	return err
}

// mark records the end of a piece of work. t.mu is locked.
func (t *Trace) mark(kind Kind, name string, after uintptr, on func(timer uintptr) error) (uintptr, error) {
	timer, err := t.clock.record(on)
	t.marks = append(t.marks, mark{timer, after, kind, name})
	return timer, err
}

// Ready is called before a sparse bucket is handed over, one after the other.
func (t *Trace) Ready() error {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	timer, err := t.mark("", "", 0, t.onCompute)
	t.ready = append(t.ready, timer)
	return err
}

// stageKinds are the kinds of the pieces that stages end.
var stageKinds = map[stages.Stage]Kind{stages.Selected: Select, stages.Exchanged: Exchange, stages.Finished: Merge}

// Passed is called when a stage of a sparse bucket was submitted; stream is where they
// are selected from and merged.
func (t *Trace) Passed(bucket int, stage stages.Stage, stream uintptr) (err error) {
	on := t.ops.RecordOnCommStream
	if stage != stages.Exchanged {
		on = func(timer uintptr) error {
			return t.ops.RecordOnStream(timer, stream)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ready[bucket], err = t.mark(stageKinds[stage], bucketName(bucket), t.ready[bucket], on)
	return err
}

// Computed is called when a piece of work was submitted to the compute stream.
func (t *Trace) Computed(kind Kind, name string) error {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	_, err := t.mark(kind, name, 0, t.onCompute)
	return err
}

// Reduced is called when a reduction was submitted that waits for the compute
// stream as it is now.
func (t *Trace) Reduced(name string) error {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	ready, err := t.mark("", "", 0, t.onCompute)
	if err == nil {
		_, err = t.mark(AllReduce, name, ready, t.ops.RecordOnCommStream)
	}
	return err
}

// End ends the step: the compute stream waits for all that belongs to it.
func (t *Trace) End() (err error) {
	t.end, err = t.clock.record(t.onCompute)
	return err
}

func (t *Trace) onCompute(timer uintptr) error {
	return t.ops.RecordOnStream(timer, t.stream)
}

// Timeline returns the step that began last, which is complete on the device: the pieces
// of the compute stream, and then those of the others.
func (t *Trace) Timeline(name string) (Timeline, error) {
	var errs []error
	elapsed := func(timer uintptr) float64 {
		d, err := t.clock.device.Elapsed(t.begin, timer)
		errs = append(errs, err)
		return float64(d) / float64(time.Microsecond)
	}
	out := Timeline{Name: name, Total: elapsed(t.end)}
	var communication []Span
	lasts := make(map[Lane]float64)
	for _, m := range t.marks {
		// A piece begins when what it waits for is done, and the one before it.
		lane := m.kind.Lane()
		end := elapsed(m.timer)
		start := lasts[lane]
		if m.after != 0 {
			start = max(start, elapsed(m.after))
		}
		lasts[lane] = end
		switch span := (Span{
			Kind:  m.kind,
			Name:  m.name,
			Start: min(start, end),
			End:   end,
		}); {
		case m.name == "":
		case lane == ComputeLane:
			out.Spans = append(out.Spans, span)
		default:
			communication = append(communication, span)
		}
	}
	out.Spans = append(out.Spans, communication...)
	return out, errors.Join(errs...)
}

// Close frees the timers.
func (t *Trace) Close() error { return t.clock.close() }
