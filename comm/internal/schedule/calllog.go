package schedule

import (
	"fmt"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
)

// callLog is the log of the collectives that a rank has called. All ranks of a communicator must make the same calls
// in the same order. The tags of their messages carry a fingerprint of the log (see tag), so that messages of ranks
// that disagree do not match. A rank that waits and the rank that it waits for compare their logs (see control.go).
type callLog struct {
	calls       uint64                 // number of calls; each barrier and exchange of a Split counts
	sequence    atomic.Uint64          // number of calls for users, for whom a Split counts once
	fingerprint uint64                 // hash of all calls, in order
	recent      [remembered]loggedCall // the last ones, by number
}

// remembered is the number of calls that can be named afterwards.
const remembered = 256

// loggedCall is a call, the fingerprint of all calls up to it, and its sequence number for
// users.
type loggedCall struct {
	entry
	fingerprint, sequence uint64 // of all calls up to this one; sequence: its number for users
}

// add appends a call. The lengths of an AllGatherV are the same on all ranks.
func (l *callLog) add(e entry, counts []int) {
	r := loggedCall{entry: e, sequence: l.sequence.Load()}
	if e.op == comm.OpAllGatherV {
		for _, n := range counts {
			r.count = int(mix(uint64(r.count), uint64(n)))
			// Not r.count: numbers that earlier calls mixed in the same way would cancel it.
			l.fingerprint = mix(l.fingerprint, uint64(n))
		}
	}
	l.fingerprint = mix(l.fingerprint, uint64(e.count))
	l.fingerprint = mix(l.fingerprint, uint64(r.op)|uint64(r.dt)<<8|uint64(r.reduce)<<16|uint64(r.peer)<<32)
	r.fingerprint = l.fingerprint
	l.recent[l.calls%remembered] = r
	l.calls++
}

// mix returns h changed by x: another x gives another result, which is likely to differ in all bits of the upper half.
// It makes fingerprints, which show that ranks disagree, but not names: an x that was mixed before may cancel itself.
func mix(h, x uint64) uint64 {
	h = (h ^ x) * 0x9e3779b97f4a7c15 // 2^64 divided by the golden ratio (Knuth)
	return h ^ h>>32
}

// knows reports whether the call with that number is remembered.
func (l *callLog) knows(number uint64) bool {
	return number < l.calls && number+remembered >= l.calls
}

// call returns the call with that number, which the log knows.
func (l *callLog) call(number uint64) *loggedCall {
	return &l.recent[number%remembered]
}

// Internal tags consist of the number of an operation (modulo tagWindow), the half of it that a message belongs to,
// and as many bits of the fingerprint as the wire has room for. With MPI these are 4 bits if MPI_TAG_UB is the
// smallest that the standard allows, 17 bits with MPICH over UCX, and 20 bits with Open MPI. A disagreement that these
// bits do not show appears in those of the next call. Two operations a window apart share a tag. Their messages stay
// apart, because wires keep the order of messages between two ranks, operations start in order, and no two operations
// a window apart are active (see Engine.ready).
const (
	tagPhases = 2
	tagWindow = 256
	firstTag  = 1
)

// tag returns the tag of the first phase's messages of an operation.
func (e *Engine) tag(seq uint64) uint64 {
	return firstTag + seq%tagWindow*tagPhases + e.log.fingerprint>>e.tagShift*tagWindow*tagPhases
}

// disagreement returns the error that names the calls of two ranks.
func (e *Engine) disagreement(peer int, peerCall, call *loggedCall) error {
	number := call.sequence
	lower := e.rank
	lowerCall := call.String()
	higher := peer
	higherCall := peerCall.String()
	if higher < lower {
		lower, higher = higher, lower
		lowerCall, higherCall = higherCall, lowerCall
	}
	if lowerCall == higherCall {
		return fmt.Errorf("%w: ranks %d and %d called %s with different counts (collective #%d)",
			comm.ErrMismatch, lower, higher, lowerCall, number)
	}
	return fmt.Errorf("%w: rank %d called %s, rank %d called %s (collective #%d)",
		comm.ErrMismatch, lower, lowerCall, higher, higherCall, number)
}
