//go:build !linux

package gate

// boundUnacknowledged leaves data in flight to the system's retransmissions.
func boundUnacknowledged(uintptr) {}
