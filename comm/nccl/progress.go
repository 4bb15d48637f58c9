package nccl

import (
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/marks"
)

// setMark has the stream say when it is here, behind so many more calls. Comm.mu is
// held.
func (c *Comm) setMark(calls int) {
	if c.marks.Due(calls) {
		c.marks.Set(c.stream, c.submitted.soFar())
	}
}

// Progress implements [comm.Progresser]. What is captured counts when the stream has
// come to what was submitted behind it.
func (c *Comm) Progress() comm.Progress {
	done := c.marks.Reached(c.submitted.soFar, c.idle, c.Healthy)
	begun, settled := c.submitted.extents()
	return marks.Progress(begun, done.Max(settled))
}

// Healthy reports whether neither this rank nor, as far as it knows, another one has
// given up. It knows that before an abort ends anything that the stream has to do.
func (c *Comm) Healthy() bool { return c.sound() == nil && c.abandoned(math.MaxUint64) == nil }

// idle returns what was submitted if all that is done, and nobody is submitting.
func (c *Comm) idle() (marks.Extent, bool) {
	if !c.mu.TryLock() {
		return marks.Extent{}, false
	}
	defer c.mu.Unlock()
	if !c.looks.TryRLock() {
		return marks.Extent{}, false
	}
	defer c.looks.RUnlock()
	return c.submitted.soFar(), c.stream.Idle()
}

// endMarks gives back what the stream writes.
func (c *Comm) endMarks() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.marks.Close(!c.settled())
}
