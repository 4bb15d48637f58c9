//go:build race

package hostops_test

// raceEnabled says whether the tests run under the race detector, which makes
// them an order of magnitude slower.
const raceEnabled = true
