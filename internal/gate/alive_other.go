//go:build !linux

package gate

// boundUnacknowledged leaves it to the system's retransmissions while data is on its way.
func boundUnacknowledged(uintptr) {}
