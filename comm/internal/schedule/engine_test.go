package schedule

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
)

// TestProgressOfWhatWaits has a collective wait, behind a message that uses its memory,
// when all before it are done.
func TestProgressOfWhatWaits(t *testing.T) {
	e := new(Engine)
	e.log.sequence.Store(5)
	e.publish()
	assert.Equal(t, backend.Count{Submitted: 5, Done: 5}, e.Progress().Collectives)
	e.log.sequence.Store(6)
	e.queued.push(&Op{plan: plan{entry: entry{op: comm.OpBarrier}, sequence: 6}})
	e.publish()
	assert.Equal(t, backend.Count{Submitted: 6, Done: 5}, e.Progress().Collectives)
}

func TestConflicts(t *testing.T) {
	group := uint64(0)
	next := func() uint64 { group++; return group }
	reads := func(from, to uintptr) *Op { return &Op{plan: plan{group: next(), reads: spanOf(from, int(to-from))}} }
	writes := func(from, to uintptr) *Op { return &Op{plan: plan{group: next(), writes: spanOf(from, int(to-from))}} }
	conflict := func(o, started *Op) bool {
		var u usage
		u.add(started)
		conflicts := u.conflicts(o)
		u.remove(started)
		assert.False(t, u.conflicts(o), "nothing is left")
		return conflicts
	}
	assert.False(t, conflict(reads(0, 8), reads(0, 8)), "two readers")
	assert.True(t, conflict(writes(0, 8), reads(4, 12)), "write after read")
	assert.True(t, conflict(reads(4, 12), writes(0, 8)), "read after write")
	assert.True(t, conflict(writes(7, 9), writes(0, 8)), "write after write")
	assert.False(t, conflict(writes(8, 9), writes(0, 8)), "neighbors")
	assert.False(t, conflict(writes(4, 4), writes(0, 8)), "nothing")

	a := writes(0, 8)
	b := writes(0, 8)
	a.group = b.group
	assert.False(t, conflict(b, a), "one group")
	b.chained = true
	assert.True(t, conflict(b, a), "one group, but a second step of one operation")
}
