package backend

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// Memory moves and reduces elements where all ranks of a communicator have their
// buffers. A runtime/cpu.Runtime is one.
type Memory interface {
	// Copy copies bytes that do not overlap.
	Copy(dst, src uintptr, bytes int) error
	// Reduce stores the reduction of all srcs in each of dsts, which may be srcs.
	Reduce(dsts, srcs []uintptr, count int, dt dtype.DType, op comm.ReduceOp) error
}

// ExecuteShared does a collective, given what all ranks called, in rank order, or a
// message, given its Send and its Recv: for a backend whose ranks share memory. It
// compares the calls first, and returns an error wrapping [comm.ErrMismatch], with
// nothing done, if they do not fit.
func ExecuteShared(m Memory, calls ...comm.Call) error {
	rank := func(i int) int { return i }
	if first := &calls[0]; first.Op == comm.OpSend {
		rank = func(i int) int { return calls[1-i].Peer }
		if err := AgreeOnMessage(rank(0), first, rank(1), &calls[1]); err != nil {
			return err
		}
	} else if err := Agree(calls); err != nil {
		return err
	}
	for to := range calls {
		var sources, everywhere []uintptr
		for from := range calls {
			src, bytes, sends := calls[from].SendPart(rank(from), rank(to))
			dst, _, receives := calls[to].RecvPart(rank(to), rank(from))
			switch {
			case !sends || !receives || bytes == 0:
			case calls[to].Op.Reduces():
				sources, everywhere = append(sources, src), append(everywhere, calls[from].Recv)
			case dst != src:
				if err := m.Copy(dst, src, bytes); err != nil {
					return err
				}
			}
		}
		if len(sources) == 0 {
			continue
		}
		c := &calls[to]
		if c.Op == comm.OpAllReduce { // it may be in place, so all get the result at once
			return m.Reduce(everywhere, sources, c.Count, c.DType, c.Reduce)
		}
		if err := m.Reduce([]uintptr{c.Recv}, sources, c.Count, c.DType, c.Reduce); err != nil {
			return err
		}
	}
	return nil
}
