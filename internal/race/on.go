//go:build race

package race

// Enabled says whether this program runs under the race detector, which makes it an
// order of magnitude slower.
const Enabled = true
