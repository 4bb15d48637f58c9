//go:build !race

package race

// Enabled is true if this program runs under the race detector.
const Enabled = false
