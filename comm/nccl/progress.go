package nccl

import (
	"math"

	"github.com/tutti-go/tutti/comm/backend"
)

// Progress implements [backend.Progresser]. Captured calls count when the stream has
// come to what was submitted behind them.
func (c *Comm) Progress() backend.Progress {
	c.submitted.ledger.Done(c.marks.Reached(c.submitted.soFar, c.idle, c.Healthy))
	return c.submitted.ledger.Progress()
}

// Healthy reports whether neither this rank nor, as far as it knows, another one has
// aborted. A rank learns that before an abort ends anything that the stream has to do.
func (c *Comm) Healthy() bool {
	return c.life.Broken() == nil && c.abandoned(math.MaxUint64) == nil
}

// idle returns what was submitted if all of it is done, and nobody is submitting.
func (c *Comm) idle() (backend.Extent, bool) {
	if !c.mu.TryLock() {
		return backend.Extent{}, false
	}
	defer c.mu.Unlock()
	if !c.streamMu.TryRLock() {
		return backend.Extent{}, false
	}
	defer c.streamMu.RUnlock()
	return c.submitted.soFar(), c.stream.Idle()
}
