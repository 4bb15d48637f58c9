package schedule

import (
	"cmp"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
)

// TestPeerAborted has a rank wait, and another one abort before or after the barrier that
// this one waits in.
func TestPeerAborted(t *testing.T) {
	waits := func(call comm.Op) *Engine {
		o := &Op{plan: plan{entry: entry{op: call}, number: 3}}
		return &Engine{size: 2, peers: make([]peer, 2), running: []*Op{o}}
	}
	failed := func(passed uint64) *controlMessage {
		n := &controlMessage{kind: failure, calls: 4, passed: passed}
		n.length = uint64(copy(n.text[:], "disk full"))
		return n
	}
	for _, call := range []comm.Op{comm.OpBarrier, comm.OpSplit} {
		e := waits(call)
		assert.NoError(t, e.aborted(1), "nobody has aborted")
		e.keep(1, failed(4))
		assert.NoError(t, e.aborted(1), "all have come to that %v", call)
		e.running = nil
		assert.ErrorIs(t, e.aborted(1), comm.ErrPeerFailed, "and after it")

		e = waits(call)
		e.keep(1, failed(3))
		assert.ErrorContains(t, e.aborted(1), "rank 1 aborted: disk full", "in that %v or before it", call)
	}
	e := waits(comm.OpBarrier)
	e.log.calls = 4
	last := unsent(4)
	e.keep(1, last)
	assert.NoError(t, cmp.Or(e.aborted(1), e.needs(1)), "all have come, whatever the other one could not send")

	e = waits(comm.OpBroadcast)
	e.keep(1, failed(4))
	assert.ErrorIs(t, e.aborted(1), comm.ErrPeerFailed, "where not all have come if one is done")
}
