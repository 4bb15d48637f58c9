package nccl

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// A Split that is done is not what a later wait is for; what came before it may be.
func TestWaitsForNoSplit(t *testing.T) {
	s := new(submissions)
	reduce := comm.AllReduceCall(0, 0, 16, dtype.F32, comm.Sum)
	split := func() {
		s.add(comm.OpSplit, &comm.Call{})
		s.end(s.next(s.begin()))
	}
	split()
	assert.Equal(t, "nothing", s.waitsFor())
	s.add(reduce.Op, &reduce)
	assert.Equal(t, "allreduce of 16 f32, sum (operation 1)", s.waitsFor())
	split()
	assert.Equal(t, "allreduce of 16 f32, sum (operation 1); 1 operations behind that", s.waitsFor())
}
