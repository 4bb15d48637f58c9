package comm

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/dtype"
)

// Traffic is what one rank has sent, as [Meter] counts it.
type Traffic struct {
	SentElements int64
	SentBytes    int64
	// Calls that were accepted. Sync, Barrier and Split are calls too.
	Calls int64
	// Time spent inside the calls, waiting included.
	Time time.Duration
}

// Meter is a communicator that counts what passes through another one.
//
// Volume is counted per rank as the field's literature does, from what an
// optimal algorithm has to move, not from what the backend happens to do. With
// P ranks:
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
// Everything else moves nothing. Calls that fail are not counted; those of a
// group that is given up are, if they were accepted one by one.
//
// A communicator that Split makes is metered too. Its traffic counts for
// itself and for the Meter that it was split from, so that the topmost one has
// everything.
//
// A Meter can be used from any goroutine and allocates nothing.
type Meter struct {
	Communicator
	parent   *Meter
	counters [numOperations]counter
}

type counter struct{ elements, bytes, calls, nanoseconds atomic.Int64 }

// NewMeter returns a Meter around c.
func NewMeter(c Communicator) *Meter { return &Meter{Communicator: c} }

// Unwrap returns the communicator that is metered.
func (m *Meter) Unwrap() Communicator { return m.Communicator }

// Totals returns the traffic of all operations since the start or the last
// Reset.
func (m *Meter) Totals() Traffic {
	var sum Traffic
	for i := range m.counters {
		t := m.counters[i].traffic()
		sum.SentElements += t.SentElements
		sum.SentBytes += t.SentBytes
		sum.Calls += t.Calls
		sum.Time += t.Time
	}
	return sum
}

// ByOperation returns the traffic of each operation that was called, by its
// name in [OpError].
func (m *Meter) ByOperation() map[string]Traffic {
	out := make(map[string]Traffic)
	for i := range m.counters {
		if t := m.counters[i].traffic(); t.Calls > 0 {
			out[operation(i).String()] = t
		}
	}
	return out
}

// Reset starts counting anew. The Meter that this one was split from keeps
// what it has counted.
func (m *Meter) Reset() {
	for i := range m.counters {
		c := &m.counters[i]
		c.elements.Store(0)
		c.bytes.Store(0)
		c.calls.Store(0)
		c.nanoseconds.Store(0)
	}
}

func (c *counter) traffic() Traffic {
	return Traffic{
		SentElements: c.elements.Load(),
		SentBytes:    c.bytes.Load(),
		Calls:        c.calls.Load(),
		Time:         time.Duration(c.nanoseconds.Load()),
	}
}

// count records a call that began at start and sent so many elements, unless it
// failed. It returns err.
func (m *Meter) count(op operation, start time.Time, elements int, dt dtype.DType, err error) error {
	if err != nil {
		return err
	}
	spent := time.Since(start)
	for ; m != nil; m = m.parent {
		c := &m.counters[op]
		c.elements.Add(int64(elements))
		c.bytes.Add(int64(elements) * int64(dt.Size()))
		c.calls.Add(1)
		c.nanoseconds.Add(int64(spent))
	}
	return nil
}

// others is the number of other ranks.
func (m *Meter) others() int { return m.WorldSize() - 1 }

// unless returns count, or 0 where the rank is root.
func (m *Meter) unless(root, count int) int {
	if m.Rank() == root {
		return 0
	}
	return count
}

// toOthers adds up what counts has for the other ranks.
func (m *Meter) toOthers(counts []int) int {
	sum := 0
	for r, n := range counts {
		sum += m.unless(r, n)
	}
	return sum
}

// AllReduce implements [Communicator].
func (m *Meter) AllReduce(send, recv uintptr, count int, dt dtype.DType, op ReduceOp) error {
	start := time.Now()
	err := m.Communicator.AllReduce(send, recv, count, dt, op)
	return m.count(opAllReduce, start, 2*count*m.others()/m.WorldSize(), dt, err)
}

// Broadcast implements [Communicator].
func (m *Meter) Broadcast(buf uintptr, count int, dt dtype.DType, root int) error {
	start := time.Now()
	err := m.Communicator.Broadcast(buf, count, dt, root)
	return m.count(opBroadcast, start, m.unless(root, count), dt, err)
}

// Reduce implements [Communicator].
func (m *Meter) Reduce(send, recv uintptr, count int, dt dtype.DType, op ReduceOp, root int) error {
	start := time.Now()
	err := m.Communicator.Reduce(send, recv, count, dt, op, root)
	return m.count(opReduce, start, m.unless(root, count), dt, err)
}

// AllGather implements [Communicator].
func (m *Meter) AllGather(send, recv uintptr, count int, dt dtype.DType) error {
	start := time.Now()
	err := m.Communicator.AllGather(send, recv, count, dt)
	return m.count(opAllGather, start, count*m.others(), dt, err)
}

// AllGatherV implements [Communicator].
func (m *Meter) AllGatherV(send, recv uintptr, counts, displs []int, dt dtype.DType) error {
	start := time.Now()
	err := m.Communicator.AllGatherV(send, recv, counts, displs, dt)
	return m.count(opAllGatherV, start, m.toOthers(counts), dt, err)
}

// ReduceScatter implements [Communicator].
func (m *Meter) ReduceScatter(send, recv uintptr, count int, dt dtype.DType, op ReduceOp) error {
	start := time.Now()
	err := m.Communicator.ReduceScatter(send, recv, count, dt, op)
	return m.count(opReduceScatter, start, count*m.others(), dt, err)
}

// AllToAll implements [Communicator].
func (m *Meter) AllToAll(send, recv uintptr, count int, dt dtype.DType) error {
	start := time.Now()
	err := m.Communicator.AllToAll(send, recv, count, dt)
	return m.count(opAllToAll, start, count*m.others(), dt, err)
}

// AllToAllV implements [Communicator].
func (m *Meter) AllToAllV(send uintptr, sendCounts, sendDispls []int, recv uintptr, recvCounts, recvDispls []int, dt dtype.DType) error {
	start := time.Now()
	err := m.Communicator.AllToAllV(send, sendCounts, sendDispls, recv, recvCounts, recvDispls, dt)
	return m.count(opAllToAllV, start, m.toOthers(sendCounts), dt, err)
}

// Gather implements [Communicator].
func (m *Meter) Gather(send, recv uintptr, count int, dt dtype.DType, root int) error {
	start := time.Now()
	err := m.Communicator.Gather(send, recv, count, dt, root)
	return m.count(opGather, start, m.unless(root, count), dt, err)
}

// Scatter implements [Communicator].
func (m *Meter) Scatter(send, recv uintptr, count int, dt dtype.DType, root int) error {
	start := time.Now()
	err := m.Communicator.Scatter(send, recv, count, dt, root)
	sent := count*m.others() - m.unless(root, count*m.others())
	return m.count(opScatter, start, sent, dt, err)
}

// Send implements [Communicator].
func (m *Meter) Send(buf uintptr, count int, dt dtype.DType, dest int, tag uint32) error {
	start := time.Now()
	err := m.Communicator.Send(buf, count, dt, dest, tag)
	return m.count(opSend, start, m.unless(dest, count), dt, err)
}

// Recv implements [Communicator].
func (m *Meter) Recv(buf uintptr, count int, dt dtype.DType, src int, tag uint32) error {
	start := time.Now()
	err := m.Communicator.Recv(buf, count, dt, src, tag)
	return m.count(opRecv, start, 0, dt, err)
}

// Sync implements [Communicator].
func (m *Meter) Sync(ctx context.Context) error {
	start := time.Now()
	return m.count(opSync, start, 0, dtype.Invalid, m.Communicator.Sync(ctx))
}

// Barrier implements [Communicator].
func (m *Meter) Barrier(ctx context.Context) error {
	start := time.Now()
	return m.count(opBarrier, start, 0, dtype.Invalid, m.Communicator.Barrier(ctx))
}

// Split implements [Communicator]. What it makes is metered and counts here as
// well.
func (m *Meter) Split(ctx context.Context, color, key int) (Communicator, error) {
	start := time.Now()
	c, err := m.Communicator.Split(ctx, color, key)
	if err := m.count(opSplit, start, 0, dtype.Invalid, err); err != nil || c == nil {
		return nil, err
	}
	return &Meter{Communicator: c, parent: m}, nil
}
