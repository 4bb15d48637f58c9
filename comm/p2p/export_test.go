package p2p

// Measured are the sizes that New measures.
var Measured = &measured

// Launching reports whether a communicator is in a launch.
func Launching(c *Comm) bool {
	if c.here.mu.TryLock() {
		c.here.mu.Unlock()
		return false
	}
	return true
}
