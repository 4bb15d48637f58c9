//go:build race

package race

// Enabled is true if this program runs under the race detector, which makes it an order of magnitude slower.
const Enabled = true
