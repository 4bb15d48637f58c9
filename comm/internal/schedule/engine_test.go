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
	e.queued = []*Op{{plan: plan{entry: entry{op: comm.OpBarrier}, sequence: 6}}}
	e.publish()
	assert.Equal(t, backend.Count{Submitted: 6, Done: 5}, e.Progress().Collectives)
}

func TestConflicts(t *testing.T) {
	group := uint64(0)
	next := func() uint64 { group++; return group }
	reads := func(from, to uintptr) *Op { return &Op{plan: plan{group: next(), reads: spanOf(from, int(to-from))}} }
	writes := func(from, to uintptr) *Op { return &Op{plan: plan{group: next(), writes: spanOf(from, int(to-from))}} }
	started := func(o *Op) *usage { return &usage{o, o.reads, o.writes} }
	assert.False(t, reads(0, 8).conflicts(started(reads(0, 8))), "two readers")
	assert.True(t, writes(0, 8).conflicts(started(reads(4, 12))), "write after read")
	assert.True(t, reads(4, 12).conflicts(started(writes(0, 8))), "read after write")
	assert.True(t, writes(7, 9).conflicts(started(writes(0, 8))), "write after write")
	assert.False(t, writes(8, 9).conflicts(started(writes(0, 8))), "neighbors")
	assert.False(t, writes(4, 4).conflicts(started(writes(0, 8))), "nothing")

	a, b := writes(0, 8), writes(0, 8)
	a.group, b.group = 3, 3
	assert.False(t, b.conflicts(started(a)), "one group")
	b.chained = true
	assert.True(t, b.conflicts(started(a)), "one group, but a second step of one operation")
}
