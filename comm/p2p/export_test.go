package p2p

import "time"

// Measured are the sizes that New measures.
var Measured = &measured

// Patience is how long a communicator's kernels wait for a peer.
func Patience(c *Comm) time.Duration { return time.Duration(c.here.watch.limit) }

// Launching reports whether a communicator is in a launch.
func Launching(c *Comm) bool {
	if c.here.mu.TryLock() {
		c.here.mu.Unlock()
		return false
	}
	return true
}
