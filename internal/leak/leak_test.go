package leak

import (
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/logtest"
)

// TestOneLine: communicators of a backend that are lost together are one line, with their number and where the first
// ones were made. The next garbage collection makes a further line.
func TestOneLine(t *testing.T) {
	logged := logtest.Capture(t)
	synctest.Test(t, func(t *testing.T) {
		var c counts
		lose := func(backend string, count int) {
			for i := range count {
				c.add(NewMark(backend, fmt.Sprintf("rank %d of 900", i)))
			}
		}
		lose("one", 800)
		lose("another", 1)
		require.Empty(t, logged.Lines("never closed"))
		time.Sleep(gatherTime)
		synctest.Wait()
		require.Len(t, logged.Lines("communicators were never closed"), 2)
		assert.Len(t, logged.Lines("backend=another count=1 "), 1)
		one := logged.Lines("backend=one ")[0]
		assert.Regexp(t, `count=800 first="(rank [012] of 900, made at \S+testing\.go:\d+(; )?){3}" total=800`, one)

		lose("one", 2)
		c.log("one") // as at the next garbage collection
		time.Sleep(gatherTime)
		synctest.Wait()
		lines := logged.Lines("backend=one ")
		require.Len(t, lines, 2)
		assert.Contains(t, lines[1], "count=2 ")
		assert.Contains(t, lines[1], "total=802")
	})
}

// TestCollected: a garbage collection after the one that has found communicators ends the wait for more of them.
func TestCollected(t *testing.T) {
	logged := logtest.Capture(t)
	NewMark("collected", "rank 0 of 1").Report()
	require.Eventually(t, func() bool {
		runtime.GC()
		return len(logged.Lines("backend=collected count=1 ")) == 1
	}, time.Minute, time.Millisecond)
}
