package p2p

import (
	"os"
	"time"
)

// memoryVariable is what has the tests use scratch memory of the host if it is "host".
const memoryVariable = "TUTTI_TEST_MEMORY"

// tested reports whether tests do.
func tested() bool { return os.Getenv(memoryVariable) == "host" }

// Tested is the option for that.
func Tested(o *options) { o.inHost = tested() }

// WithLimit runs operations of up to that many bytes by peer memory, instead of up to
// the measured size.
func WithLimit(bytes int) Option { return func(o *options) { o.most = bytes } }

// InHostMemory reports whether a communicator's scratch memory is the host's.
func InHostMemory(c *Comm) bool { return c.here.host }

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
