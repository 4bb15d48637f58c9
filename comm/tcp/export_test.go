package tcp

import (
	"syscall"
	"testing"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// LanesOf is what a round trip asks for.
var LanesOf = lanesOf

// MeasureByMessages has a test measure round trips as where the kernel does not tell them.
func MeasureByMessages(t *testing.T) {
	before := measured
	measured = func(syscall.RawConn) (time.Duration, bool) { return 0, false }
	t.Cleanup(func() { measured = before })
}

// Lanes is the number of connections to the last other rank.
func Lanes(c comm.Communicator) (n int) {
	for _, p := range c.(*communicator).e.wire.pairs {
		n = max(n, len(p.lanes))
	}
	return n
}
