package nccl

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// drain is a wait that has seen everything done.
func drain(s *submissions) {
	wait, _ := s.begin()
	s.end(wait)
}

// A Split that is done is not what a later wait is for; what came before it may be.
func TestWaitsForNoSplit(t *testing.T) {
	s := new(submissions)
	reduce := comm.AllReduceCall(0, 0, 16, dtype.F32, comm.Sum)
	split := func() { s.endSplit(s.addSplit(), true) }
	split()
	assert.Equal(t, "nothing", s.ledger.InFlight().String())
	s.add(&reduce)
	assert.Equal(t, "allreduce of 16 f32, sum (collective #2)", s.ledger.InFlight().String())
	split()
	assert.Equal(t, "allreduce of 16 f32, sum (collective #2); 1 operation behind that", s.ledger.InFlight().String())
}

// Collectives and messages are counted apart, from 1, as in a flight record.
func TestNumbersOfWhatIsWaitedFor(t *testing.T) {
	s := new(submissions)
	reduce, send := comm.AllReduceCall(0, 0, 16, dtype.F32, comm.Sum), comm.SendCall(0, 3, dtype.F32, 1, 7)
	for range 2 {
		s.add(&reduce)
	}
	drain(s)
	s.add(&send)
	assert.Equal(t, "send of 3 f32 to rank 1, tag 7", s.ledger.InFlight().String())
	drain(s)
	s.add(&reduce)
	assert.Equal(t, "allreduce of 16 f32, sum (collective #3)", s.ledger.InFlight().String())
	for range 64 {
		s.add(&send)
	}
	assert.Equal(t, "send of 3 f32 to rank 1, tag 7; 63 operations behind that", s.ledger.InFlight().String())
}

// A wait needs of the other ranks the collectives up to its last, and one more after messages. Calls of the
// communicator itself count on all ranks.
func TestCollectivesOfAWait(t *testing.T) {
	s := new(submissions)
	reduce, send := comm.AllReduceCall(0, 0, 16, dtype.F32, comm.Sum), comm.SendCall(0, 3, dtype.F32, 1, 7)
	needs := func() uint64 {
		_, collectives := s.begin()
		s.end(extent{})
		return collectives
	}
	assert.Zero(t, needs())
	s.add(&send)
	assert.EqualValues(t, 1, needs(), "of who has done no collective behind it, nothing is known")
	s.add(&reduce)
	assert.EqualValues(t, 1, needs())
	s.addOwn()
	assert.EqualValues(t, 2, needs())
	assert.EqualValues(t, 0, s.seen.Load())
	drain(s)
	assert.EqualValues(t, 2, s.seen.Load())
	assert.Equal(t, "nothing", s.ledger.InFlight().String())
	s.add(&send)
	assert.EqualValues(t, 3, needs())
	drain(s)
	assert.EqualValues(t, 2, needs(), "the message is done")
	s.add(&send)
	s.endStep(s.beginStep(), true)
	assert.EqualValues(t, 4, needs(), "a step does not come after the message in the stream")
	drain(s)
	s.addTogether([]comm.Call{send, reduce})
	assert.EqualValues(t, 5, needs(), "nor does a collective in a group with it")
	drain(s)
	assert.EqualValues(t, 4, needs())
}

// A rank has not seen a step complete that is in flight, nor what comes after it, although waits within the step see the
// stream idle. A Split is such a step.
func TestNothingIsSeenBeyondAStep(t *testing.T) {
	s := new(submissions)
	reduce := comm.AllReduceCall(0, 0, 16, dtype.F32, comm.Sum)
	s.add(&reduce)
	drain(s)
	through := s.addSplit()
	first := s.beginStep()
	s.addOwn()
	drain(s)
	assert.EqualValues(t, 2, first)
	assert.EqualValues(t, 1, s.seen.Load())
	assert.Equal(t, "split (collective #2)", s.ledger.InFlight().String())
	second := s.beginStep()
	s.endStep(first, true)
	assert.EqualValues(t, 3, s.seen.Load(), "with the collective within it")
	s.endStep(second, true)
	s.endSplit(through, true)
	assert.EqualValues(t, 4, s.seen.Load())
	assert.Equal(t, "nothing", s.ledger.InFlight().String())
	s.add(&reduce)
	s.endStep(s.beginStep(), true)
	assert.EqualValues(t, 4, s.seen.Load(), "what came before it is in flight")
	drain(s)
	assert.EqualValues(t, 6, s.seen.Load())
	failed := s.beginStep()
	s.endStep(failed, false)
	assert.EqualValues(t, 6, s.seen.Load())
}

// A Split ends whatever else is submitted beside its beginning.
func TestSplitBesideCalls(t *testing.T) {
	s := new(submissions)
	reduce := comm.AllReduceCall(0, 0, 16, dtype.F32, comm.Sum)
	const n = 10_000
	var beside sync.WaitGroup
	beside.Go(func() {
		for range n {
			s.add(&reduce)
		}
	})
	for range n {
		s.endSplit(s.addSplit(), true)
	}
	beside.Wait()
	assert.Empty(t, s.splits)
	assert.EqualValues(t, 2*n, s.soFar().Collectives)
}

// A communicator that is made again gets another name, by which nobody takes it for one
// that broke, and the same one on all who are left.
func TestNamesOfShrunkOnes(t *testing.T) {
	var one, two shrinks // of ranks 1 and 2 of four
	first := one.name([]int32{3})
	assert.Equal(t, first, two.name([]int32{3}))
	one.name([]int32{2, 3})
	second := one.name([]int32{3})
	assert.NotEqual(t, first, second)
	assert.Equal(t, second, two.name([]int32{3}), "rank 2 has no part in that without it")
}
