//go:build !race

package race

// Enabled says whether this program runs under the race detector.
const Enabled = false
