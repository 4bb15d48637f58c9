package backend

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/ranks"
)

// Agree compares the calls of a communicator's ranks that form one collective, in rank order, before their memory is
// touched. A Barrier or Split is a Call with that Op and nothing else. Addresses are not compared, but lists are: if
// Agree returns nil, RecvPart on one rank and SendPart on the other have the same length.
//
// If the ranks disagree, the error wraps [comm.ErrMismatch] and names each rank's call. Every rank that took part
// returns it instead of [comm.ErrPeerFailed]: a rank that learns of a peer's abort because of a mismatch passes the
// mismatch on.
func Agree(calls []comm.Call) error {
	first := &calls[0]
	differs := func(c comm.Call) bool {
		sameKind := c.Op == first.Op && c.DType == first.DType && c.Reduce == first.Reduce
		return !sameKind || c.Peer != first.Peer || c.Count != first.Count
	}
	if slices.ContainsFunc(calls, differs) {
		return fmt.Errorf("%w: %s", comm.ErrMismatch, whoCalledWhat(calls))
	}
	switch first.Op {
	case comm.OpAllGatherV:
		return agreeOnCounts(calls)
	case comm.OpAllToAllV:
		return agreeOnParts(calls)
	}
	return nil
}

// agreeOnCounts compares the lengths of an AllGatherV.
func agreeOnCounts(calls []comm.Call) error {
	first := &calls[0]
	for r := range calls {
		for i, n := range calls[r].RecvCounts {
			if want := first.RecvCounts[i]; n != want {
				return fmt.Errorf("%w: %v, where rank 0 passed counts[%d] = %d, rank %d passed %d",
					comm.ErrMismatch, first, i, want, r, n)
			}
		}
	}
	return nil
}

// agreeOnParts compares the lengths of an AllToAllV on both sides.
func agreeOnParts(calls []comm.Call) error {
	for r := range calls {
		for to, n := range calls[r].SendCounts {
			if want := calls[to].RecvCounts[r]; n != want {
				return fmt.Errorf("%w: %v, where rank %d sends %d elements to rank %d, which receives %d",
					comm.ErrMismatch, &calls[0], r, n, to, want)
			}
		}
	}
	return nil
}

// AgreeOnMessage is [Agree] for the two ends of a message, in either order.
func AgreeOnMessage(sender int, send *comm.Call, receiver int, recv *comm.Call) error {
	if send.Op == comm.OpRecv {
		sender, send, receiver, recv = receiver, recv, sender, send
	}
	if send.Count == recv.Count && send.DType == recv.DType && send.Tag == recv.Tag {
		return nil
	}
	return fmt.Errorf("%w: rank %d called %v; rank %d called %v", comm.ErrMismatch, sender, send, receiver, recv)
}

// whoCalledWhat lists the ranks by their calls.
func whoCalledWhat(calls []comm.Call) string {
	var variants []string
	callers := map[string][]int{}
	for r, c := range calls {
		text := c.String()
		if callers[text] == nil {
			variants = append(variants, text)
		}
		callers[text] = append(callers[text], r)
	}
	for i, text := range variants {
		variants[i] = ranks.Text(callers[text]) + " called " + text
	}
	return strings.Join(variants, "; ")
}
