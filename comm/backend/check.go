package backend

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// Check is the argument check that every backend runs before a native call,
// so that the same misuse gives the same error on each of them. A valid call
// costs a few comparisons and no allocation.
//
// The zero value of Supports accepts everything that [reductions.Op.Defined]
// does.
type Check struct {
	Backend   string // its name, with which errors begin
	Rank      int    // in the communicator
	WorldSize int    // number of ranks
	// Supports, if set, returns an error wrapping [comm.ErrUnsupported] for a
	// reduction that this backend cannot do. It is asked after the checks that
	// are the same everywhere.
	Supports func(dt dtype.DType, op comm.ReduceOp) error
	// SupportsType, if set, returns an error wrapping [comm.ErrUnsupported] for an
	// element type that this backend cannot carry at all.
	SupportsType func(dt dtype.DType) error
}

// Fail wraps err in an [*comm.OpError] of this rank, unless it already is one.
func (c *Check) Fail(op string, err error) error {
	if _, ok := err.(*comm.OpError); ok {
		return err
	}
	return &comm.OpError{
		Backend: c.Backend,
		Op:      op,
		Rank:    c.Rank,
		Err:     err,
	}
}

// Unreachable returns the error of a [MemoryChecker] for memory of d; advice names the memory that it can access, or a
// remedy.
func (c *Check) Unreachable(d runtime.Device, advice string) error {
	return c.Fail("check device", fmt.Errorf("%w: memory of %v: %s", comm.ErrDevice, d, advice))
}

func (c *Check) fail(op comm.Op, err error) error { return c.Fail(op.String(), err) }

// wrong returns the error of an argument.
func (c *Check) wrong(op comm.Op, format string, values ...any) error {
	return c.fail(op, fmt.Errorf("%w: "+format, append([]any{comm.ErrArgument}, values...)...))
}

// Call checks the arguments of a call.
func (c *Check) Call(x *comm.Call) error {
	if !x.Op.MovesData() {
		return c.wrong(x.Op, "%v does not move data", x.Op)
	}
	parts := 1 // of Count elements in the larger buffer
	switch x.Op {
	case comm.OpAllGather, comm.OpReduceScatter, comm.OpAllToAll, comm.OpGather, comm.OpScatter:
		parts = c.WorldSize
	}
	if err := c.elements(x.Op, x.Count, parts, x.DType); err != nil {
		return err
	}
	if x.Op.Reduces() {
		if err := c.reduction(x.Op, x.DType, x.Reduce); err != nil {
			return err
		}
	}
	bytes := x.Bytes()
	switch x.Op {
	case comm.OpAllReduce:
		return c.pair(x.Op, x.Send, x.Recv, bytes)
	case comm.OpAllGather:
		return c.parts(x.Op, "send", x.Send, "recv", x.Recv, bytes, c.Rank)
	case comm.OpReduceScatter:
		return c.parts(x.Op, "recv", x.Recv, "send", x.Send, bytes, c.Rank)
	case comm.OpAllToAll:
		return c.allToAll(x.Op, x.Send, x.Recv, bytes)
	case comm.OpAllGatherV:
		return c.allGatherV(x)
	case comm.OpAllToAllV:
		return c.allToAllV(x)
	case comm.OpSend:
		return c.message(x.Op, "dest", x.Send, x)
	case comm.OpRecv:
		return c.message(x.Op, "src", x.Recv, x)
	}
	if err := c.peer(x.Op, "root", x.Peer); err != nil {
		return err
	}
	isRoot := c.Rank == x.Peer
	switch x.Op {
	case comm.OpBroadcast:
		if x.Send != x.Recv {
			return c.wrong(x.Op, "send and recv are not the same buffer")
		}
		return c.pointer(x.Op, "buf", x.Recv, x.Count)
	case comm.OpReduce:
		if isRoot {
			return c.pair(x.Op, x.Send, x.Recv, bytes)
		}
	case comm.OpGather:
		if isRoot {
			return c.parts(x.Op, "send", x.Send, "recv", x.Recv, bytes, x.Peer)
		}
	case comm.OpScatter:
		if isRoot {
			return c.parts(x.Op, "recv", x.Recv, "send", x.Send, bytes, x.Peer)
		}
		return c.pointer(x.Op, "recv", x.Recv, x.Count)
	}
	return c.pointer(x.Op, "send", x.Send, x.Count)
}

// Group checks the calls of a group, and that none of its messages, which are not ordered, writes memory that another
// message uses.
func (c *Check) Group(calls []comm.Call) error {
	messages := 0
	for i := range calls {
		if err := c.Call(&calls[i]); err != nil {
			return err
		}
		if calls[i].Op.Message() {
			messages++
		}
	}
	if messages < 2 {
		return nil
	}
	a, b := conflict(calls, messages)
	if a == nil {
		return nil
	}
	return c.Fail(opGroup, fmt.Errorf("%w: buffers of two messages of one group overlap: %v, %v",
		comm.ErrArgument, *a, *b))
}

// conflict finds two messages that use the same memory, at least one of them
// writing it.
func conflict(calls []comm.Call, messages int) (a, b *comm.Call) {
	// In order of addresses, only the earlier message that ends latest matters. A few messages are sorted in place.
	var few [16]*comm.Call
	list := few[:0]
	if messages > len(few) {
		list = make([]*comm.Call, 0, messages)
	}
	for i := range calls {
		if calls[i].Op.Message() && calls[i].Count > 0 {
			list = append(list, &calls[i])
		}
	}
	slices.SortFunc(list, func(x, y *comm.Call) int {
		startX, _ := messageMemory(x)
		startY, _ := messageMemory(y)
		return cmp.Compare(startX, startY)
	})
	var farthest, written *comm.Call // of all messages, and of those that write
	for _, x := range list {
		start, _ := messageMemory(x)
		against := written
		if x.Op == comm.OpRecv {
			against = farthest
		}
		if against != nil {
			if _, reaches := messageMemory(against); start < reaches {
				return against, x
			}
		}
		farthest = farther(farthest, x)
		if x.Op == comm.OpRecv {
			written = farther(written, x)
		}
	}
	return nil, nil
}

// farther returns the one of two messages whose memory ends later; a may be nil.
func farther(a, b *comm.Call) *comm.Call {
	if a != nil {
		_, aEnd := messageMemory(a)
		if _, bEnd := messageMemory(b); aEnd >= bEnd {
			return a
		}
	}
	return b
}

func (c *Check) allGatherV(x *comm.Call) error {
	extent, err := c.extent(x.Op, "counts", x.RecvCounts, "displs", x.RecvDispls)
	if err != nil {
		return err
	}
	count := x.RecvCounts[c.Rank] // of this rank
	if err := c.pointer(x.Op, "send", x.Send, count); err != nil {
		return err
	}
	if err := c.pointer(x.Op, "recv", x.Recv, extent); err != nil {
		return err
	}
	size := x.DType.Size()
	inPlace := x.Send == x.Recv+uintptr(x.RecvDispls[c.Rank]*size)
	if inOrder(x.RecvCounts, x.RecvDispls) && (inPlace || disjointMemory(x.Send, count*size, x.Recv, extent*size)) {
		return nil
	}
	sends := 1 // the same memory for all
	if inPlace {
		sends = 0
	}
	return c.regions(x, sends)
}

func (c *Check) allToAll(op comm.Op, send, recv uintptr, bytes int) error {
	if err := c.pointer(op, "send", send, bytes); err != nil {
		return err
	}
	if err := c.pointer(op, "recv", recv, bytes); err != nil {
		return err
	}
	return c.disjoint(op, send, bytes*c.WorldSize, recv, bytes*c.WorldSize)
}

func (c *Check) allToAllV(x *comm.Call) error {
	sendExtent, err := c.extent(x.Op, "sendCounts", x.SendCounts, "sendDispls", x.SendDispls)
	if err != nil {
		return err
	}
	recvExtent, err := c.extent(x.Op, "recvCounts", x.RecvCounts, "recvDispls", x.RecvDispls)
	if err != nil {
		return err
	}
	if err := c.pointer(x.Op, "send", x.Send, sendExtent); err != nil {
		return err
	}
	if err := c.pointer(x.Op, "recv", x.Recv, recvExtent); err != nil {
		return err
	}
	if sent, received := x.SendCounts[c.Rank], x.RecvCounts[c.Rank]; sent != received {
		return c.wrong(x.Op, "this rank sends itself %d elements but receives %d", sent, received)
	}
	size := x.DType.Size()
	if inOrder(x.RecvCounts, x.RecvDispls) && disjointMemory(x.Send, sendExtent*size, x.Recv, recvExtent*size) {
		return nil
	}
	return c.regions(x, c.WorldSize)
}

func (c *Check) message(op comm.Op, role string, buf uintptr, x *comm.Call) error {
	if err := c.peer(op, role, x.Peer); err != nil {
		return err
	}
	return c.pointer(op, "buf", buf, x.Count)
}

// reduction checks the reduction of a reducing collective.
func (c *Check) reduction(op comm.Op, dt dtype.DType, r comm.ReduceOp) error {
	if !r.Valid() {
		return c.wrong(op, "%v is no reduction", r)
	}
	if !r.Defined(dt) {
		return c.fail(op, fmt.Errorf("%w: %v of %v is not defined", comm.ErrUnsupported, r, dt))
	}
	if c.Supports != nil {
		if err := c.Supports(dt, r); err != nil {
			return c.fail(op, err)
		}
	}
	return nil
}

// elements checks a type and a count, parts of which lie in one buffer.
func (c *Check) elements(op comm.Op, count, parts int, dt dtype.DType) error {
	if !dt.Valid() {
		return c.wrong(op, "dtype %d is not valid", uint8(dt))
	}
	if count < 0 {
		return c.wrong(op, "count %d is negative", count)
	}
	if count > math.MaxInt/8/parts {
		return c.wrong(op, "count %d overflows the address space", count)
	}
	if c.SupportsType != nil {
		if err := c.SupportsType(dt); err != nil {
			return c.fail(op, err)
		}
	}
	return nil
}

// peer checks a rank argument.
func (c *Check) peer(op comm.Op, role string, rank int) error {
	if rank < 0 || rank >= c.WorldSize {
		return c.wrong(op, "%s %d is not in [0, %d)", role, rank, c.WorldSize)
	}
	return nil
}

// pointer checks that a buffer of count elements has an address.
func (c *Check) pointer(op comm.Op, role string, p uintptr, count int) error {
	if p == 0 && count > 0 {
		return c.wrong(op, "%s is nil for %d elements", role, count)
	}
	return nil
}

// pair checks two buffers of one size: the same, or disjoint.
func (c *Check) pair(op comm.Op, send, recv uintptr, bytes int) error {
	if err := c.pointer(op, "send", send, bytes); err != nil {
		return err
	}
	if err := c.pointer(op, "recv", recv, bytes); err != nil {
		return err
	}
	if send == recv {
		return nil
	}
	return c.disjoint(op, send, bytes, recv, bytes)
}

// parts checks a buffer of one part against one of WorldSize parts: disjoint, or
// the former is the part with that number of the latter (in place).
func (c *Check) parts(
	op comm.Op, partRole string, part uintptr, wholeRole string, whole uintptr, bytes, number int,
) error {
	if err := c.pointer(op, partRole, part, bytes); err != nil {
		return err
	}
	if err := c.pointer(op, wholeRole, whole, bytes); err != nil {
		return err
	}
	if part == whole+uintptr(number*bytes) {
		return nil
	}
	return c.disjoint(op, part, bytes, whole, bytes*c.WorldSize)
}

// extent checks counts and displacements of a V-collective, and returns the number of elements that the buffer spans.
func (c *Check) extent(op comm.Op, countsRole string, counts []int, displsRole string, displs []int) (int, error) {
	if len(counts) != c.WorldSize {
		return 0, c.wrong(op, "%s has length %d, want %d", countsRole, len(counts), c.WorldSize)
	}
	if len(displs) != c.WorldSize {
		return 0, c.wrong(op, "%s has length %d, want %d", displsRole, len(displs), c.WorldSize)
	}
	extent := 0
	for r, n := range counts {
		d := displs[r]
		if n < 0 {
			return 0, c.wrong(op, "%s[%d] = %d is negative", countsRole, r, n)
		}
		if d < 0 {
			return 0, c.wrong(op, "%s[%d] = %d is negative", displsRole, r, d)
		}
		if n > math.MaxInt/8-d {
			return 0, c.wrong(op, "%s[%d] + %s[%d] overflows the address space", countsRole, r, displsRole, r)
		}
		if n > 0 {
			extent = max(extent, d+n)
		}
	}
	return extent, nil
}

// inOrder reports whether the regions of a buffer follow each other in the order of the ranks, so that none overlap.
func inOrder(counts, displs []int) bool {
	end := 0
	for r, n := range counts {
		if n == 0 {
			continue
		}
		if displs[r] < end {
			return false
		}
		end = displs[r] + n
	}
	return true
}

// regions checks that no region of a V-collective that is received overlaps another one, received or sent: memory
// that several ranks write has no defined content. It looks at those that are sent to the first sends ranks.
func (c *Check) regions(x *comm.Call, sends int) error {
	size := x.DType.Size()
	parts := make([]comm.Call, 0, sends+c.WorldSize) // in which a message is a region
	for r := range sends {
		address, bytes, _ := x.SendPart(c.Rank, r)
		parts = append(parts, comm.SendCall(address, bytes/size, x.DType, r, 0))
	}
	for r := range c.WorldSize {
		address, bytes, _ := x.RecvPart(c.Rank, r)
		parts = append(parts, comm.RecvCall(address, bytes/size, x.DType, r, 0))
	}
	a, b := conflict(parts, len(parts))
	if a == nil {
		return nil
	}
	if a.Op == b.Op {
		return c.wrong(x.Op, "what ranks %d and %d send overlaps: %s, %s",
			min(a.Peer, b.Peer), max(a.Peer, b.Peer), regionText(x, a), regionText(x, b))
	}
	return c.wrong(x.Op, "%s and %s overlap", regionText(x, a), regionText(x, b))
}

// regionText says which elements of a buffer of a V-collective a part is.
func regionText(x, part *comm.Call) string {
	role := "recv"
	base := x.Recv
	if part.Op == comm.OpSend {
		role = "send"
		base = x.Send
	}
	start, _ := messageMemory(part)
	first := int(start-base) / x.DType.Size()
	return fmt.Sprintf("%s[%d:%d]", role, first, first+part.Count)
}

// disjointMemory reports whether two buffers have no byte in common.
func disjointMemory(a uintptr, aBytes int, b uintptr, bBytes int) bool {
	return aBytes == 0 || bBytes == 0 || a >= b+uintptr(bBytes) || b >= a+uintptr(aBytes)
}

// disjoint checks that two buffers do not overlap.
func (c *Check) disjoint(op comm.Op, a uintptr, aBytes int, b uintptr, bBytes int) error {
	if !disjointMemory(a, aBytes, b, bBytes) {
		return c.wrong(op, "buffers [%#x, +%d) and [%#x, +%d) overlap", a, aBytes, b, bBytes)
	}
	return nil
}
