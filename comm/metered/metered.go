// Package metered counts what a program sends: wrap its communicator with [New], and [Communicator.Totals] returns the
// elements, bytes, calls and time of this rank.
package metered

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/fixedpoint"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Traffic is what one rank has sent, as a [Communicator] counts it.
type Traffic struct {
	SentElements int64 // by the counts of Communicator
	SentBytes    int64 // those elements, in bytes
	// Calls that were accepted. Sync, Barrier and Split are calls too.
	Calls int64
	// Time spent inside the calls, waiting included.
	Time time.Duration
}

// Communicator counts the traffic of the communicator that it wraps.
//
// Volume is counted per rank, as in the literature: the elements that an optimal algorithm has to move, not those
// that the backend happens to move. With P ranks:
//
//	AllReduce      2·count·(P-1)/P, rounded down
//	ReduceScatter  count·(P-1)
//	AllGather      count·(P-1): what the rank receives
//	AllGatherV     the sum of the other ranks' counts
//	AllToAll       count·(P-1)
//	AllToAllV      the sum of what goes to other ranks
//	Broadcast      count on all ranks but the root, for what they receive
//	Reduce, Gather count on all ranks but the root
//	Scatter        count·(P-1) at the root
//	Send           count, unless it is to oneself
//
// Everything else moves nothing. Calls that fail are not counted. The time of a
// group counts for its first call.
//
// A sub-communicator is metered too. Its traffic counts for itself and for the
// Communicator that it was split from, so that the topmost one has everything.
//
// A Communicator can be used from any goroutine and allocates nothing.
type Communicator struct {
	comm.Methods
	comm.Waits
	comm.Wrapped
	parent   *Communicator             // that it was split from; nil for the topmost one
	counters [comm.OpSplit + 1]counter // by operation
}

type counter struct{ elements, bytes, calls, nanoseconds atomic.Int64 }

// New returns a Communicator around c.
func New(c comm.Communicator) *Communicator {
	return meter(c, nil)
}

// meter returns a Communicator whose traffic also counts for a parent, if that is not nil.
func meter(c comm.Communicator, parent *Communicator) *Communicator {
	m := &Communicator{Wrapped: comm.Wrap(c), parent: parent}
	m.Methods = comm.Methods{Do: m.do, Together: m.group}
	m.Waits = comm.Waits{Wait: m.wait}
	return m
}

// Totals returns the traffic of some operations, or of all if none is given.
func (m *Communicator) Totals(ops ...comm.Op) (sum Traffic) {
	for op := range comm.OpSplit + 1 {
		if len(ops) == 0 || slices.Contains(ops, op) {
			sum.add(&m.counters[op])
		}
	}
	return sum
}

func (t *Traffic) add(c *counter) {
	t.SentElements += c.elements.Load()
	t.SentBytes += c.bytes.Load()
	t.Calls += c.calls.Load()
	t.Time += time.Duration(c.nanoseconds.Load())
}

// count records a call that was accepted.
func (m *Communicator) count(c *comm.Call, spent time.Duration) {
	bytes := m.sent(c)
	for ; m != nil; m = m.parent {
		n := &m.counters[c.Op]
		n.elements.Add(int64(bytes / max(1, c.DType.Size()))) // waits have no type
		n.bytes.Add(int64(bytes))
		n.calls.Add(1)
		n.nanoseconds.Add(int64(spent))
	}
}

// sent is how many bytes of a call count for this rank: what it sends to the
// others, or receives where the table says so.
func (m *Communicator) sent(c *comm.Call) (bytes int) {
	size := m.WorldSize()
	rank := m.Rank()
	if c.Op == comm.OpAllReduce {
		return 2 * c.Count * (size - 1) / size * c.DType.Size()
	}
	receives := c.Op == comm.OpAllGather || c.Op == comm.OpAllGatherV || c.Op == comm.OpBroadcast
	for r := range size {
		_, n, ok := c.SendPart(rank, r)
		if receives {
			_, n, ok = c.RecvPart(rank, r)
		}
		if ok && r != rank {
			bytes += n
		}
	}
	return bytes
}

func (m *Communicator) do(c comm.Call) error {
	start := time.Now()
	if err := c.Make(m.Communicator); err != nil {
		return err
	}
	m.count(&c, time.Since(start))
	return nil
}

// group counts a group's time for its first call.
func (m *Communicator) group(calls []comm.Call) error {
	start := time.Now()
	if err := m.Communicator.Group(calls...); err != nil {
		return err
	}
	spent := time.Since(start)
	for i := range calls {
		m.count(&calls[i], spent)
		spent = 0
	}
	return nil
}

func (m *Communicator) wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	start := time.Now()
	child, err := w.Make(ctx, m.Communicator)
	if err != nil {
		return nil, err
	}
	m.count(&comm.Call{Op: w.Op}, time.Since(start))
	if child == nil {
		return nil, nil
	}
	return meter(child, m), nil
}

// ShareLists implements [backend.ListSharer], if what is metered does. A Gather counts as the AllGather of lists with
// the room that the rank's list has.
func (m *Communicator) ShareLists(ctx context.Context, n int) (backend.SharedLists, error) {
	s, ok := comm.As[backend.ListSharer](m.Communicator)
	if !ok {
		return nil, fmt.Errorf("%w: shared lists", comm.ErrUnsupported)
	}
	lists, err := s.ShareLists(ctx, n)
	if err != nil {
		return nil, err
	}
	return &meteredLists{lists, m}, nil
}

type meteredLists struct {
	backend.SharedLists
	m *Communicator // counts them
}

func (l *meteredLists) Gather(list kernel.Entries) error {
	begun := time.Now()
	if err := l.SharedLists.Gather(list); err != nil {
		return err
	}
	gather := comm.AllGatherCall(0, 0, 2*list.N, dtype.I32)
	l.m.count(&gather, time.Since(begun))
	return nil
}

// AllReduceRounded implements [backend.Rounder], if what is metered does. It counts as the AllToAll and the
// AllGather of codes that it stands for.
func (m *Communicator) AllReduceRounded(
	src kernel.Source, sums uintptr, codec kernel.Codec, op comm.ReduceOp,
) error {
	r, ok := comm.As[backend.Rounder](m.Communicator)
	if !ok {
		return fmt.Errorf("%w: sums of rounded values", comm.ErrUnsupported)
	}
	begun := time.Now()
	if err := r.AllReduceRounded(src, sums, codec, op); err != nil {
		return err
	}
	size := m.WorldSize()
	words := codec.Size((src.N+size-1)/size) / dtype.I32.Size()
	exchange := comm.AllToAllCall(src.X, sums, words, dtype.I32)
	gather := comm.AllGatherCall(src.X, sums, words, dtype.I32)
	m.count(&exchange, time.Since(begun))
	m.count(&gather, 0)
	return nil
}

// Reduced implements [fixedpoint.Reducer].
func (m *Communicator) Reduced() bool {
	r, ok := m.Communicator.(fixedpoint.Reducer)
	return ok && r.Reduced()
}

// AllReduceFixed implements [fixedpoint.Reducer], if what is metered does, and not just what that decorates: decorators
// see all calls. It counts as an AllReduce of values.
func (m *Communicator) AllReduceFixed(sums []fixedpoint.Sum) error {
	r, ok := m.Communicator.(fixedpoint.Reducer)
	if !ok {
		return fmt.Errorf("%w: sums in fixed point", comm.ErrUnsupported)
	}
	begun := time.Now()
	if err := r.AllReduceFixed(sums); err != nil {
		return err
	}
	spent := time.Since(begun)
	for i := range sums {
		call := comm.AllReduceCall(sums[i].Result, sums[i].Result, sums[i].N, sums[i].DType, comm.Sum)
		m.count(&call, spent)
		spent = 0
	}
	return nil
}
