//go:build !race

package cpu

// raceEnabled says whether the tests run under the race detector.
const raceEnabled = false
