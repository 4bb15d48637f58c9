package tcp

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// TestNextListenTime: listen leaves waits alone for longer only while short collectives follow each other, and no
// operation is without a wait.
func TestNextListenTime(t *testing.T) {
	for _, c := range []struct {
		name        string
		last        time.Duration
		collectives int64
		unattended  bool
		want        time.Duration
	}{
		{"short collectives", time.Millisecond, 20, false, 2 * time.Millisecond},
		{"as many in twice the time", 2 * time.Millisecond, 20, false, time.Millisecond},
		{"short ones still", 2 * time.Millisecond, 40, false, 4 * time.Millisecond},
		{"for long", 16 * time.Millisecond, 10_000, false, 16 * time.Millisecond},
		{"a long one", 16 * time.Millisecond, 1, false, time.Millisecond},
		{"none", time.Millisecond, 0, false, time.Millisecond},
		{"one that nobody waits for", 16 * time.Millisecond, 10_000, true, time.Millisecond},
		{"a communicator was closed", 4 * time.Millisecond, -10_000, false, time.Millisecond},
	} {
		assert.Equal(t, c.want, nextListenTime(c.last, c.collectives, c.unattended), c.name)
	}
}
