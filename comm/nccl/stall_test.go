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
	assert.Equal(t, "allreduce of 16 f32, sum (collective #2)", s.waitsFor())
	split()
	assert.Equal(t, "allreduce of 16 f32, sum (collective #2); 1 operations behind that", s.waitsFor())
}

// Collectives and messages are counted apart, from 1, as in a flight record.
func TestNumbersOfWhatIsWaitedFor(t *testing.T) {
	s := new(submissions)
	reduce, send := comm.AllReduceCall(0, 0, 16, dtype.F32, comm.Sum), comm.SendCall(0, 3, dtype.F32, 1, 7)
	for range 2 {
		s.add(reduce.Op, &reduce)
	}
	s.end(s.begin())
	s.add(send.Op, &send)
	assert.Equal(t, "send of 3 f32 to rank 1, tag 7 (message #1)", s.waitsFor())
	s.end(s.begin())
	s.add(reduce.Op, &reduce)
	assert.Equal(t, "allreduce of 16 f32, sum (collective #3)", s.waitsFor())
	for range remembered {
		s.add(send.Op, &send)
	}
	assert.Equal(t, "one of 1 operations before, or send of 3 f32 to rank 1, tag 7 (message #2); 63 operations behind that", s.waitsFor())
}
