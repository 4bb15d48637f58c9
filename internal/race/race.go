// Package race tells tests what they cannot ask of a program under the race detector.
package race

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// NoAllocs checks that f, which calls into a library, makes no allocation in the mean
// of some runs. Under the race detector it just runs it: there a [sync.Pool], such as
// the one that the arguments of such calls are in, drops things at random.
func NoAllocs(t testing.TB, runs int, f func() error, about ...any) {
	t.Helper()
	allocs := testing.AllocsPerRun(runs, func() {
		if err := f(); err != nil {
			t.Fatal(err)
		}
	})
	if !Enabled {
		assert.Zero(t, allocs, about...)
	}
}
