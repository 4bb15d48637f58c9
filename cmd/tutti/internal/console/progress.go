package console

import (
	"fmt"
	"io"
	"time"

	"github.com/jedib0t/go-pretty/v6/progress"
)

// Bars shows a bar for each piece of a long work if out is a terminal that can be redrawn, and elsewhere an
// occasional line. It shows nothing before the first step.
type Bars struct {
	Out    io.Writer // the display
	Pieces int       // expected number of pieces

	writer  progress.Writer   // nil without bars, and before the first step
	tracker *progress.Tracker // of the current piece
	stopped chan struct{}     // closed when the writer has ended
	told    time.Time         // time of the last line, also if it was suppressed
}

// tellEvery is the time between lines.
const tellEvery = 5 * time.Second

// messageWidth aligns the bars: the width of the longest pattern name.
const messageWidth = 16

// start begins the display.
func (b *Bars) start() {
	w := progress.NewWriter()
	w.SetOutputWriter(b.Out)
	w.SetNumTrackersExpected(b.Pieces)
	w.SetMessageLength(messageWidth)
	width, _ := terminalWidth(b.Out)
	w.SetTerminalWidth(width - 1) // on some terminals a full line begins the next one
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
