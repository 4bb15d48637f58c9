package console

import (
	"fmt"
	"io"
	"time"

	"github.com/jedib0t/go-pretty/v6/progress"
)

// Bars shows a bar for each piece of a long work, if out is a terminal that
// can be written over, and elsewhere a line now and then. It shows nothing before the
// first step.
type Bars struct {
	Out    io.Writer // where they are shown
	Pieces int       // how many there will be

	writer  progress.Writer   // nil where no bars are shown, and before the first step
	tracker *progress.Tracker // of the piece that runs
	stopped chan struct{}     // closed when the writer has ended
	told    time.Time         // when the last line was written, or would have been
}

// tellEvery is the time from one line to the next.
const tellEvery = 5 * time.Second

// messageWidth aligns the bars; it is the width of the longest pattern name.
const messageWidth = 16

// start begins the display.
func (b *Bars) start() {
	w := progress.NewWriter()
	w.SetOutputWriter(b.Out)
	w.SetNumTrackersExpected(b.Pieces)
	w.SetMessageLength(messageWidth)
	width, _ := terminalWidth(b.Out)
	w.SetTerminalWidth(width - 1) // a full line begins the next one on some terminals
	w.SetTrackerLength(min(progress.DefaultLengthTracker, width/4))
	w.SetUpdateFrequency(100 * time.Millisecond)
	w.SetTrackerPosition(progress.PositionRight)
	w.SetStyle(progress.StyleBlocks)
	w.Style().Visibility.Value = false
	w.Style().Options.TimeInProgressPrecision = time.Second
	b.writer = w
	b.stopped = make(chan struct{})
	go func() {
		defer close(b.stopped)
		w.Render()
	}()
}

// Set moves the bar of the current piece; its first step begins a new bar.
func (b *Bars) Set(piece string, step, steps int) {
	if b.writer == nil && !CanRedraw(b.Out) {
		if b.told.IsZero() {
			b.told = time.Now()
		} else if time.Since(b.told) >= tellEvery {
			b.told = time.Now()
			fmt.Fprintf(b.Out, "tutti: %s: %d of %d\n", piece, step, steps)
		}
		return
	}
	if b.writer == nil {
		b.start()
	}
	if b.tracker == nil {
		b.tracker = &progress.Tracker{Message: piece, Total: int64(steps)}
		b.writer.AppendTracker(b.tracker)
	}
	b.tracker.SetValue(int64(step))
	if step == steps {
		b.tracker.MarkAsDone()
		b.tracker = nil
	}
}

// Stop ends the display, so that other output can follow.
func (b *Bars) Stop() {
	if b.writer == nil {
		return
	}
	if b.tracker != nil {
		b.tracker.MarkAsErrored()
	}
	for { // Stop does nothing before Render has begun
		b.writer.Stop()
		select {
		case <-b.stopped:
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}
