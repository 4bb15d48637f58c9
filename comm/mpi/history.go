package mpi

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
)

// history is the collectives that a rank has called. All ranks of a communicator
// call the same in the same order; the tags of their messages carry a fingerprint
// of everything called so far (see tag), so that messages of ranks that disagree
// do not meet. Who waits in vain for one compares histories with the rank that
// should have sent it (see notes.go).
type history struct {
	calls  uint64             // how many; a Split counts thrice
	named  uint64             // how many for users, to whom it is one
	chain  uint64             // the fingerprint of all of them, in order
	recent [remembered]record // the last ones, by number
}

// remembered is how many calls can be named afterwards.
const remembered = 256

// record is a call, the fingerprint of all calls up to it, and how many these are to
// users.
type record struct {
	entry
	chain, named uint64
}

// add appends a call. The lengths of an AllGatherV are the same on all ranks.
func (h *history) add(e entry, counts []int) {
	r := record{entry: e, named: h.named}
	if e.op == comm.OpAllGatherV {
		for _, n := range counts {
			r.count = int(mix(uint64(r.count), uint64(n)))
		}
	}
	h.chain = mix(h.chain, uint64(r.count))
	h.chain = mix(h.chain, uint64(r.op)|uint64(r.dt)<<8|uint64(r.reduce)<<16|uint64(r.peer)<<32)
	r.chain = h.chain
	h.recent[h.calls%remembered] = r
	h.calls++
}

// mix returns h changed by x: another result for another x, with all bits of the
// upper half likely to differ.
func mix(h, x uint64) uint64 {
	h = (h ^ x) * 0x9e3779b97f4a7c15 // 2^64 divided by the golden ratio (Knuth)
	return h ^ h>>32
}

// knows reports whether the call with that number is remembered.
func (h *history) knows(number uint64) bool {
	return number < h.calls && number+remembered >= h.calls
}

// at returns the call with that number, which the history knows.
func (h *history) at(number uint64) *record { return &h.recent[number%remembered] }

// Internal tags are made of the number of an operation (modulo tagWindow), the
// half of it that a message belongs to, and as many bits of the fingerprint as
// MPI_TAG_UB leaves room for: 5 if it is the smallest that the standard allows,
// 18 with MPICH over UCX, 21 with Open MPI. A disagreement that these bits do not
// show is shown by those of the next call. Messages of two operations that share
// a tag, a window apart, stay apart because MPI keeps the order of messages
// between two ranks, operations start in order, and no two of them that are a
// window apart are active (see endpoint.ready).
const (
	noteTag   = 0
	tagPhases = 2
	tagWindow = 256
	firstTag  = 1
)

// tag returns the tag of the first phase's messages of an operation.
func (e *endpoint) tag(seq uint64) uintptr {
	return uintptr(firstTag + seq%tagWindow*tagPhases + e.history.chain>>e.state.tagShift*tagWindow*tagPhases)
}

// disagreement is the error that names what two ranks called.
func (e *endpoint) disagreement(other int, theirs, ours *record) error {
	number := ours.named
	a, b := e.rank, other
	if b < a {
		a, b, ours, theirs = b, a, theirs, ours
	}
	first, second := ours.String(), theirs.String()
	if first == second {
		return fmt.Errorf("%w: ranks %d and %d called %s with different counts (collective #%d)", comm.ErrMismatch, a, b, first, number)
	}
	return fmt.Errorf("%w: rank %d called %s, rank %d called %s (collective #%d)", comm.ErrMismatch, a, first, b, second, number)
}
