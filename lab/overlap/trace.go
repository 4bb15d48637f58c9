package overlap

import (
	"errors"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/stages"
)

// clock lends timers and takes all of them back at once.
type clock struct {
	device Compute   // makes the timers
	timers []uintptr // all timers
	used   int       // number of recorded timers, from the first on
}

// record records a timer with on and returns it.
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

// reset makes all timers available.
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

// Trace records when the work of a step runs, by timers between the pieces on all streams. It records one step at a
// time. A nil Trace records nothing.
type Trace struct {
	mu     sync.Mutex         // stages come from another goroutine
	clock  clock              // of the step; guarded by mu between Begin and End
	ops    comm.StreamSyncOps // of the communicator; nil before Begin
	stream uintptr            // the compute stream
	begin  uintptr            // the timer before the step; 0 before the first Begin
	end    uintptr            // the timer after the step; 0 before the first End
	marks  []mark             // in the order of submission; guarded by mu between Begin and End
	ready  []uintptr          // when the next stage of each sparse bucket can begin; guarded by mu as well
}

// mark is the end of a piece of work. A piece without a name is not shown.
type mark struct {
	timer uintptr // end of the piece
	after uintptr // timer on another stream that the piece waited for, or 0
	kind  Kind    // determines the lane
	name  string  // "" if not shown
}

// NewTrace makes a Trace with the device's timers.
func NewTrace(device Compute) *Trace { return &Trace{clock: clock{device: device}} }

// Begin begins a step and forgets the previous one.
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

// Ready is called before a sparse bucket is handed over. Calls do not overlap.
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

// stageKinds maps a stage to the kind of the piece that it ends.
var stageKinds = map[stages.Stage]Kind{stages.Selected: Select, stages.Exchanged: Exchange, stages.Finished: Merge}

// Passed is called when a stage of a sparse bucket has been submitted. stream is the stream that selects and merges.
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

// Computed is called when a piece of work has been submitted to the compute stream.
func (t *Trace) Computed(kind Kind, name string) error {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	_, err := t.mark(kind, name, 0, t.onCompute)
	return err
}

// Reduced is called when a reduction has been submitted that waits for the compute stream's work so far.
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

// End ends the step: the compute stream waits for all its work.
func (t *Trace) End() (err error) {
	t.end, err = t.clock.record(t.onCompute)
	return err
}

func (t *Trace) onCompute(timer uintptr) error {
	return t.ops.RecordOnStream(timer, t.stream)
}

// Timeline returns the latest step, which must be complete on the device: the pieces of the compute stream, and then
// those of other streams.
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
		// A piece begins when its input is complete and the piece before it has ended.
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
