package comm

import (
	"fmt"
	"math"

	"github.com/tutti-go/tutti/dtype"
)

// Check is the argument check that every backend runs before a native call,
// so that the same misuse gives the same error on each of them. A valid call
// costs a few comparisons and no allocation.
//
// The zero value of Supports accepts everything that [dtype.ReduceOp.Defined]
// does.
type Check struct {
	Backend   string
	Rank      int
	WorldSize int
	// Supports, if set, returns an error wrapping [ErrUnsupported] for a
	// reduction that this backend cannot do. It is asked after the checks that
	// are the same everywhere.
	Supports func(dt dtype.DType, op ReduceOp) error
	// SupportsType, if set, returns an error wrapping [ErrUnsupported] for an
	// element type that this backend cannot carry at all.
	SupportsType func(dt dtype.DType) error
}

// Fail wraps err in an [*OpError] of this rank.
func (c *Check) Fail(op string, err error) error {
	return &OpError{Backend: c.Backend, Op: op, Rank: c.Rank, Err: err}
}

// AllReduce checks the arguments of [Communicator.AllReduce].
func (c *Check) AllReduce(send, recv uintptr, count int, dt dtype.DType, op ReduceOp) error {
	const name = "allreduce"
	if err := c.reduction(name, count, 1, dt, op); err != nil {
		return err
	}
	return c.pair(name, send, recv, count*dt.Size())
}

// Broadcast checks the arguments of [Communicator.Broadcast].
func (c *Check) Broadcast(buf uintptr, count int, dt dtype.DType, root int) error {
	const name = "broadcast"
	if err := c.elements(name, count, 1, dt); err != nil {
		return err
	}
	if err := c.peer(name, "root", root); err != nil {
		return err
	}
	return c.pointer(name, "buf", buf, count)
}

// Reduce checks the arguments of [Communicator.Reduce].
func (c *Check) Reduce(send, recv uintptr, count int, dt dtype.DType, op ReduceOp, root int) error {
	const name = "reduce"
	if err := c.reduction(name, count, 1, dt, op); err != nil {
		return err
	}
	if err := c.peer(name, "root", root); err != nil {
		return err
	}
	if c.Rank != root {
		return c.pointer(name, "send", send, count)
	}
	return c.pair(name, send, recv, count*dt.Size())
}

// AllGather checks the arguments of [Communicator.AllGather].
func (c *Check) AllGather(send, recv uintptr, count int, dt dtype.DType) error {
	const name = "allgather"
	if err := c.elements(name, count, c.WorldSize, dt); err != nil {
		return err
	}
	return c.parts(name, "send", send, "recv", recv, count*dt.Size(), c.Rank)
}

// AllGatherV checks the arguments of [Communicator.AllGatherV].
func (c *Check) AllGatherV(send, recv uintptr, counts, displs []int, dt dtype.DType) error {
	const name = "allgatherv"
	if err := c.elements(name, 0, 1, dt); err != nil {
		return err
	}
	extent, err := c.layout(name, "counts", counts, "displs", displs, dt)
	if err != nil {
		return err
	}
	if err := c.apart(name, "counts", counts, "displs", displs); err != nil {
		return err
	}
	own := counts[c.Rank]
	if err := c.pointer(name, "send", send, own); err != nil {
		return err
	}
	if err := c.pointer(name, "recv", recv, extent); err != nil {
		return err
	}
	size := uintptr(dt.Size())
	if send == recv+uintptr(displs[c.Rank])*size {
		return nil
	}
	return c.disjoint(name, send, own*dt.Size(), recv, extent*dt.Size())
}

// ReduceScatter checks the arguments of [Communicator.ReduceScatter].
func (c *Check) ReduceScatter(send, recv uintptr, count int, dt dtype.DType, op ReduceOp) error {
	const name = "reducescatter"
	if err := c.reduction(name, count, c.WorldSize, dt, op); err != nil {
		return err
	}
	return c.parts(name, "recv", recv, "send", send, count*dt.Size(), c.Rank)
}

// AllToAll checks the arguments of [Communicator.AllToAll].
func (c *Check) AllToAll(send, recv uintptr, count int, dt dtype.DType) error {
	const name = "alltoall"
	if err := c.elements(name, count, c.WorldSize, dt); err != nil {
		return err
	}
	if err := c.pointer(name, "send", send, count); err != nil {
		return err
	}
	if err := c.pointer(name, "recv", recv, count); err != nil {
		return err
	}
	bytes := count * c.WorldSize * dt.Size()
	return c.disjoint(name, send, bytes, recv, bytes)
}

// AllToAllV checks the arguments of [Communicator.AllToAllV].
func (c *Check) AllToAllV(send uintptr, sendCounts, sendDispls []int, recv uintptr, recvCounts, recvDispls []int, dt dtype.DType) error {
	const name = "alltoallv"
	if err := c.elements(name, 0, 1, dt); err != nil {
		return err
	}
	sendExtent, err := c.layout(name, "sendCounts", sendCounts, "sendDispls", sendDispls, dt)
	if err != nil {
		return err
	}
	recvExtent, err := c.layout(name, "recvCounts", recvCounts, "recvDispls", recvDispls, dt)
	if err != nil {
		return err
	}
	if err := c.apart(name, "recvCounts", recvCounts, "recvDispls", recvDispls); err != nil {
		return err
	}
	if err := c.pointer(name, "send", send, sendExtent); err != nil {
		return err
	}
	if err := c.pointer(name, "recv", recv, recvExtent); err != nil {
		return err
	}
	if sendCounts[c.Rank] != recvCounts[c.Rank] {
		return c.Fail(name, fmt.Errorf("%w: this rank sends itself %d elements but receives %d",
			ErrArgument, sendCounts[c.Rank], recvCounts[c.Rank]))
	}
	return c.disjoint(name, send, sendExtent*dt.Size(), recv, recvExtent*dt.Size())
}

// Gather checks the arguments of [Communicator.Gather].
func (c *Check) Gather(send, recv uintptr, count int, dt dtype.DType, root int) error {
	const name = "gather"
	if err := c.elements(name, count, c.WorldSize, dt); err != nil {
		return err
	}
	if err := c.peer(name, "root", root); err != nil {
		return err
	}
	if c.Rank != root {
		return c.pointer(name, "send", send, count)
	}
	return c.parts(name, "send", send, "recv", recv, count*dt.Size(), root)
}

// Scatter checks the arguments of [Communicator.Scatter].
func (c *Check) Scatter(send, recv uintptr, count int, dt dtype.DType, root int) error {
	const name = "scatter"
	if err := c.elements(name, count, c.WorldSize, dt); err != nil {
		return err
	}
	if err := c.peer(name, "root", root); err != nil {
		return err
	}
	if c.Rank != root {
		return c.pointer(name, "recv", recv, count)
	}
	return c.parts(name, "recv", recv, "send", send, count*dt.Size(), root)
}

// Send checks the arguments of [Communicator.Send].
func (c *Check) Send(buf uintptr, count int, dt dtype.DType, dest int) error {
	return c.pointToPoint("send", "dest", buf, count, dt, dest)
}

// Recv checks the arguments of [Communicator.Recv].
func (c *Check) Recv(buf uintptr, count int, dt dtype.DType, src int) error {
	return c.pointToPoint("recv", "src", buf, count, dt, src)
}

func (c *Check) pointToPoint(name, role string, buf uintptr, count int, dt dtype.DType, rank int) error {
	if err := c.elements(name, count, 1, dt); err != nil {
		return err
	}
	if err := c.peer(name, role, rank); err != nil {
		return err
	}
	return c.pointer(name, "buf", buf, count)
}

// reduction checks count, type and operation of a reducing collective.
func (c *Check) reduction(name string, count, parts int, dt dtype.DType, op ReduceOp) error {
	if err := c.elements(name, count, parts, dt); err != nil {
		return err
	}
	if !op.Valid() {
		return c.Fail(name, fmt.Errorf("%w: %v is no reduction", ErrArgument, op))
	}
	if !op.Defined(dt) {
		return c.Fail(name, fmt.Errorf("%w: %v of %v is not defined", ErrUnsupported, op, dt))
	}
	if c.Supports != nil {
		if err := c.Supports(dt, op); err != nil {
			return c.Fail(name, err)
		}
	}
	return nil
}

// elements checks a type and a count, parts of which lie in one buffer.
func (c *Check) elements(name string, count, parts int, dt dtype.DType) error {
	if !dt.Valid() {
		return c.Fail(name, fmt.Errorf("%w: dtype %d is not valid", ErrArgument, uint8(dt)))
	}
	if count < 0 {
		return c.Fail(name, fmt.Errorf("%w: count %d is negative", ErrArgument, count))
	}
	if count > math.MaxInt/8/parts {
		return c.Fail(name, fmt.Errorf("%w: count %d overflows the address space", ErrArgument, count))
	}
	if c.SupportsType != nil {
		if err := c.SupportsType(dt); err != nil {
			return c.Fail(name, err)
		}
	}
	return nil
}

// peer checks a rank argument.
func (c *Check) peer(name, role string, rank int) error {
	if rank < 0 || rank >= c.WorldSize {
		return c.Fail(name, fmt.Errorf("%w: %s %d is not in [0, %d)", ErrArgument, role, rank, c.WorldSize))
	}
	return nil
}

// pointer checks that a buffer of count elements has an address.
func (c *Check) pointer(name, role string, p uintptr, count int) error {
	if p == 0 && count > 0 {
		return c.Fail(name, fmt.Errorf("%w: %s is nil for %d elements", ErrArgument, role, count))
	}
	return nil
}

// pair checks two buffers of one size: the same, or apart.
func (c *Check) pair(name string, send, recv uintptr, bytes int) error {
	if err := c.pointer(name, "send", send, bytes); err != nil {
		return err
	}
	if err := c.pointer(name, "recv", recv, bytes); err != nil {
		return err
	}
	if send == recv {
		return nil
	}
	return c.disjoint(name, send, bytes, recv, bytes)
}

// parts checks a buffer of one part against one of WorldSize parts: apart, or
// the former is part number own of the latter (in place).
func (c *Check) parts(name, partRole string, part uintptr, wholeRole string, whole uintptr, bytes, own int) error {
	if err := c.pointer(name, partRole, part, bytes); err != nil {
		return err
	}
	if err := c.pointer(name, wholeRole, whole, bytes); err != nil {
		return err
	}
	if part == whole+uintptr(own*bytes) {
		return nil
	}
	return c.disjoint(name, part, bytes, whole, bytes*c.WorldSize)
}

// layout checks counts and displacements of a V-collective and returns the
// number of elements that the buffer spans.
func (c *Check) layout(name, countsRole string, counts []int, displsRole string, displs []int, dt dtype.DType) (int, error) {
	if len(counts) != c.WorldSize {
		return 0, c.Fail(name, fmt.Errorf("%w: %s has %d entries for %d ranks", ErrArgument, countsRole, len(counts), c.WorldSize))
	}
	if len(displs) != c.WorldSize {
		return 0, c.Fail(name, fmt.Errorf("%w: %s has %d entries for %d ranks", ErrArgument, displsRole, len(displs), c.WorldSize))
	}
	extent := 0
	for r, n := range counts {
		d := displs[r]
		if n < 0 {
			return 0, c.Fail(name, fmt.Errorf("%w: %s[%d] = %d is negative", ErrArgument, countsRole, r, n))
		}
		if d < 0 {
			return 0, c.Fail(name, fmt.Errorf("%w: %s[%d] = %d is negative", ErrArgument, displsRole, r, d))
		}
		if n > math.MaxInt/8-d {
			return 0, c.Fail(name, fmt.Errorf("%w: %s[%d] + %s[%d] overflows the address space", ErrArgument, countsRole, r, displsRole, r))
		}
		if n > 0 {
			extent = max(extent, d+n)
		}
	}
	return extent, nil
}

// apart checks that the regions of a receive buffer do not overlap: what
// several ranks write has no defined content. Regions in the order of the ranks
// take one look at each.
func (c *Check) apart(name, countsRole string, counts []int, displsRole string, displs []int) error {
	end, ordered := 0, true
	for r, n := range counts {
		if n > 0 {
			ordered = ordered && displs[r] >= end
			end = displs[r] + n
		}
	}
	if ordered {
		return nil
	}
	for r, n := range counts {
		for s, m := range counts[:r] {
			if max(displs[r], displs[s]) < min(displs[r]+n, displs[s]+m) {
				return c.Fail(name, fmt.Errorf("%w: what ranks %d and %d send overlaps: %s %d and %d, %s %d and %d",
					ErrArgument, s, r, displsRole, displs[s], displs[r], countsRole, m, n))
			}
		}
	}
	return nil
}

// disjoint checks that two buffers do not overlap.
func (c *Check) disjoint(name string, a uintptr, aBytes int, b uintptr, bBytes int) error {
	if aBytes > 0 && bBytes > 0 && a < b+uintptr(bBytes) && b < a+uintptr(aBytes) {
		return c.Fail(name, fmt.Errorf("%w: buffers [%#x, +%d) and [%#x, +%d) overlap", ErrArgument, a, aBytes, b, bBytes))
	}
	return nil
}
