// Package local runs the ranks of a job as goroutines of one process, with [Run]: on a
// laptop and in tests. They share memory, so nothing is packed or sent: an allreduce reads every
// rank's input where it lies and writes every rank's output once.
//
// # How it works
//
// The collectives of a world form one sequence. A rank submits one by writing its arguments into the slot of the next
// sequence number, in a ring of slots, and counting down the events that the slot waits for: one arrival per rank,
// and the end of the preceding collective. The rank that brings this count to zero compares the arguments of all
// ranks, so a disagreement is found before any memory is touched, and starts the work. Small work is done at once.
// Larger work is cut into chunks, which any rank that waits in Sync claims one after the other; a rank that computes
// meanwhile need not take part.
//
// Where each rank has a processor, and there are at most 16, barriers and short allreduces, of up to 32 KiB, go
// another way: each rank tells the others its call and its data in its own cell. For short data, each rank computes
// the whole result. For longer data, each computes a part, which the others copy.
//
// Messages (Send, Recv) are matched in mailboxes and copied once, from the
// sender's buffer into the receiver's.
//
// A rank that waits first helps with chunks, then looks for a while, then
// yields its processor, then sleeps until it is woken, so worlds of more
// ranks than processors stay live. Submitting never blocks, except for the
// group of another goroutine, and does not allocate in the steady state.
//
// # Guarantees
//
//   - Sources are combined in rank order by one goroutine per element: results
//     are reproducible and bit-identical on all ranks. f16, bf16 and fp8 are
//     accumulated in float32 and rounded once.
//   - Ranks that disagree on what they called all get [comm.ErrMismatch].
//   - When a call returns an error because the communicator aborted, nobody touches this rank's buffers any more.
//   - The operations of one [comm.Communicator.Group] are not ordered among
//     each other, except that collectives keep their order; overlapping
//     buffers of messages in one group are [comm.ErrArgument].
//
// # How it is written
//
// Each file uses only those before it in this list:
//
//   - entry, plan, claim, spin: a call, how work is cut, who takes it, and how ranks wait
//   - world: the state, of the ranks together and of each
//   - lot, failure: how ranks sleep and are woken, how a world aborts
//   - op, fixed, collective, driver, small, message, endpoint: what one operation does,
//     and in which order a rank's operations start
//   - progress: how they go on
//   - submit, wait, close, split: what a rank does
//   - communicator, local: what the user sees
package local

import (
	"context"
	"crypto/rand"
	"fmt"

	"github.com/tutti-go/tutti/comm"
)

// New makes a world of n ranks and returns their communicators, in rank order.
// Each rank closes its own; a communicator that is garbage collected without
// having been closed is logged, and its peers see it leave.
func New(n int) ([]comm.Communicator, error) {
	if n < 1 {
		return nil, &comm.OpError{
			Backend: name,
			Op:      "new",
			Rank:    -1,
			Err:     fmt.Errorf("%w: world of %d ranks", comm.ErrArgument, n),
		}
	}
	w := newWorld(n, seatsFor(n))
	w.run = rand.Text()
	comms := make([]comm.Communicator, n)
	for r, e := range w.ranks {
		comms[r] = newCommunicator(e)
	}
	return comms, nil
}

// Run makes a world of n ranks and runs body for each of them as [comm.Run]
// does: it closes the communicators and their open sub-communicators, and a rank
// whose body returns an error or panics aborts them, so that the others get [comm.ErrPeerFailed] and the cause.
func Run(ctx context.Context, n int, body func(ctx context.Context, c comm.Communicator) error) error {
	comms, err := New(n)
	if err != nil {
		return err
	}
	return comm.Run(ctx, comms, body)
}
