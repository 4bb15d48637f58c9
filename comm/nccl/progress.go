package nccl

import (
	"math"

	"github.com/tutti-go/tutti/comm/backend"
)

// Progress implements [backend.Progresser]. Captured calls count once the stream has reached later submissions.
func (c *Comm) Progress() backend.Progress {
	c.submitted.ledger.Done(c.marks.Reached(c.submitted.soFar, c.idle, c.Healthy))
	return c.submitted.ledger.Progress()
}

// Healthy reports whether neither this rank nor, as far as it knows, another one has aborted. A rank learns of an
// abort before the abort ends any work of the stream.
func (c *Comm) Healthy() bool {
	return c.life.Broken() == nil && c.abandoned(math.MaxUint64) == nil
}

// idle returns the submissions if all of them are complete and nobody is submitting.
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
