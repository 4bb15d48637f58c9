//go:build !race

package hostops_test

// raceEnabled says whether the tests run under the race detector.
const raceEnabled = false
