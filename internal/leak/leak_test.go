package leak

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/logtest"
)

// TestOneLine: communicators of a backend that are lost together are one line, with their number and where the first
// ones were made. Those that are lost later are further lines, ever less often.
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

		for range 100 { // one every 100 ms
			lose("one", 1)
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(longestGather)
		synctest.Wait()
		lines := logged.Lines("backend=one ")
		assert.Len(t, lines, 8, "after pauses of 0.1, 0.2, 0.4, 0.8, 1.6, 3, 3 and 3 s")
		assert.Contains(t, lines[len(lines)-1], "total=900")
	})
}
