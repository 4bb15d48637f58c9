package backend_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
)

func TestInFlightSays(t *testing.T) {
	sum := comm.AllReduceCall(1, 1, 1024, dtype.F32, comm.Sum)
	recv := comm.RecvCall(1, 2, dtype.F32, 3, 7)
	for text, f := range map[string]backend.InFlight{
		"nothing": {},
		"allreduce of 1024 f32, sum (collective #7), nothing from rank 2; 3 operations behind that": {
			Collective: sum, Number: 7, Missing: []int{2}, Behind: 3,
		},
		"barrier (collective #1), nothing from ranks 0, 2, not received by rank 1, rank 2 waits in split; recv of 2 f32 from rank 3, tag 7; 1 operation behind that": {
			Collective: comm.Call{Op: comm.OpBarrier}, Number: 1, Missing: []int{0, 2}, Unreceived: []int{1},
			Reports: []string{"rank 2 waits in split"}, Messages: []comm.Call{recv}, Behind: 1,
		},
		"recv of 2 f32 from rank 3, tag 7; recv of 2 f32 from rank 3, tag 7; recv of 2 f32 from rank 3, tag 7; recv of 2 f32 from rank 3, tag 7; 2 more messages": {
			Messages: []comm.Call{recv, recv, recv, recv, recv, recv},
		},
	} {
		assert.Equal(t, text, f.String())
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errCause)
	err := backend.InFlight{Messages: []comm.Call{recv}}.Error(ctx)
	assert.ErrorIs(t, err, comm.ErrCanceled)
	assert.EqualError(t, err, "canceled: no disk space, waiting for recv of 2 f32 from rank 3, tag 7")
}

// A Ledger numbers collectives and messages apart, and names the oldest call in flight
// that it remembers.
func TestLedger(t *testing.T) {
	var l backend.Ledger
	sum, recv := comm.AllReduceCall(1, 1, 4, dtype.F32, comm.Sum), comm.RecvCall(1, 2, dtype.F32, 3, 7)
	assert.True(t, l.Idle())
	l.Begin(&sum)
	l.Begin(&recv)
	l.Begin(&sum)
	assert.Equal(t, backend.Extent{Collectives: 2, Messages: 1}, l.Begun())
	assert.Equal(t, "allreduce of 4 f32, sum (collective #1); 2 operations behind that", l.InFlight().String())
	l.Done(backend.Extent{Collectives: 1})
	assert.Equal(t, "recv of 2 f32 from rank 3, tag 7; 1 operation behind that", l.InFlight().String())
	l.Done(backend.Extent{Messages: 1}) // what is done stays done
	assert.Equal(t, backend.Progress{
		Collectives: backend.Count{Submitted: 2, Done: 1}, Messages: backend.Count{Submitted: 1, Done: 1},
	}, l.Progress())
	assert.Equal(t, "allreduce of 4 f32, sum (collective #2)", l.InFlight().String())
	l.Done(l.Begun())
	assert.True(t, l.Idle())
	for range 100 {
		l.Begin(&recv)
	}
	assert.Equal(t, "recv of 2 f32 from rank 3, tag 7; 63 operations behind that", l.InFlight().String())
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		l.Begin(&sum)
		l.Done(l.Begun())
	}))
}
