// Package race tells tests whether they run under the race detector.
package race

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// NoAllocs checks that f, which calls into a library, allocates nothing on average over some runs. Under the race
// detector it just runs f: there a [sync.Pool], such as the pool of arguments of such calls, drops items at random.
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
