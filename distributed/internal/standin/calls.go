package standin

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// observed is a communicator that reports each call before it is made.
type observed struct {
	comm.Methods
	comm.Wrapped
}

// Observe returns c with look called for each of its calls, before it is made.
func Observe(c comm.Communicator, look func(call comm.Call)) comm.Communicator {
	return &observed{Wrapped: comm.Wrap(c), Methods: intercept(c, func(calls ...comm.Call) error {
		for _, call := range calls {
			look(call)
		}
		return nil
	})}
}

// intercept calls before with the calls of c, which are not made if it fails.
func intercept(c comm.Communicator, before func(calls ...comm.Call) error) comm.Methods {
	return comm.Methods{
		Do: func(call comm.Call) error {
			if err := before(call); err != nil {
				return err
			}
			return call.Make(c)
		},
		Together: func(calls []comm.Call) error {
			if err := before(calls...); err != nil {
				return err
			}
			return c.Group(calls...)
		},
	}
}

// Pace sets the time of calls, in addition to a microsecond each: when the ranks agree on the time of a step that Auto
// measures, it replaces that time. So a choice does not depend on the speed and load of the machine.
func Pace(c comm.Communicator, takes func(call comm.Call) time.Duration) comm.Communicator {
	var step atomic.Int64
	return Observe(c, func(call comm.Call) {
		if call.Op == comm.OpAllReduce && call.DType == dtype.F64 && call.Reduce == comm.Max {
			hostmem.Slice[float64](call.Send, 1)[0] = time.Duration(step.Swap(0)).Seconds()
			return
		}
		step.Add(int64(time.Microsecond + takes(call)))
	})
}

// Prefer makes Auto choose a pattern, one of its candidates: when the ranks agree on the time of a step, it returns 1
// ms for steps of that pattern and 10 ms for others, which it distinguishes by their calls.
func Prefer(c comm.Communicator, pattern string) comm.Communicator {
	var mu sync.Mutex
	made := map[comm.Op]bool{} // since the last time that was agreed on; guarded by mu
	return Observe(c, func(call comm.Call) {
		mu.Lock()
		defer mu.Unlock()
		if call.Op != comm.OpAllReduce || call.DType != dtype.F64 || call.Reduce != comm.Max {
			made[call.Op] = true
			return
		}
		took := 10 * time.Millisecond
		if patternOf(made) == pattern {
			took = time.Millisecond
		}
		hostmem.Slice[float64](call.Send, 1)[0] = took.Seconds()
		clear(made)
	})
}

// patternOf returns the candidate of Auto that makes such calls in a step.
func patternOf(made map[comm.Op]bool) string {
	pairs := made[comm.OpSend] || made[comm.OpRecv]
	switch {
	case made[comm.OpAllReduce]:
		return "dense"
	case made[comm.OpAllGatherV] && (pairs || made[comm.OpAllToAll]):
		return "oktopk"
	case made[comm.OpAllGatherV]:
		return "topkAopt"
	case pairs || made[comm.OpBroadcast]:
		return "gtopk"
	case made[comm.OpAllToAll]: // with a codec
		return "dense"
	}
	return "topkA"
}
