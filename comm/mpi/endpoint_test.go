package mpi

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
)

// TestProgressOfWhatWaits has a collective wait, behind a message that uses its memory,
// when all before it are done.
func TestProgressOfWhatWaits(t *testing.T) {
	e := new(endpoint)
	e.log.sequence, e.seq, e.begun, e.latest = 5, 9, 9, 5
	e.publish()
	assert.Equal(t, comm.Count{Submitted: 5, Done: 5}, e.Progress().Collectives)
	e.log.sequence, e.seq = 6, 10
	e.publish()
	assert.Equal(t, comm.Count{Submitted: 6, Done: 5}, e.Progress().Collectives)
}
