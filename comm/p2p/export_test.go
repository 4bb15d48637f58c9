package p2p

import (
	"context"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// NewWithLimit runs operations on pieces of up to that many bytes over peer memory, instead of up to
// the measured size.
func NewWithLimit(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, bytes int) (*Comm, error) {
	return newOver(ctx, base, rt, bytes)
}

// Measured are the sizes that New measures.
var Measured = &measured

// Patience is how long a communicator's kernels wait for a peer.
func Patience(c *Comm) time.Duration { return time.Duration(c.here.watch.limit) }

// CloseWithin bounds the abort and the drain in Close.
func CloseWithin(c *Comm, d time.Duration) { c.life.Timeout = d }

// Launching reports whether a communicator is in a launch.
func Launching(c *Comm) bool {
	if c.here.mu.TryLock() {
		c.here.mu.Unlock()
		return false
	}
	return true
}
