package p2p

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/runtime/cuda"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Constants of the kernels of lists; see kernels/p2p.cu.
const (
	maxShareBlocks = 256
	sharedHead     = 4096
	lengthBytes    = 16 // in front of a list
)

// maxSharedBytes bounds the memory of a rank's lists.
const maxSharedBytes = 1 << 30

// listHead is the kernels' struct shared_lists.
type listHead struct {
	epoch [maxShareBlocks]uint64 // number of the next list plus one, by block of the kernel
	//lint:ignore U1000 kernels write it
	counts [2][maxRanks]uint64
	//lint:ignore U1000 kernels write it
	notes  [2][maxRanks]uint64
	rank   uint64           // of this process
	ranks  uint64           // of the communicator
	room   uint64           // entries of a list
	memory [maxRanks]uint64 // addresses of the shared lists, by rank
	//lint:ignore U1000 kernels write it
	closed uint32
}

// newListHead returns the head of a rank's lists without the addresses of memory, and the size of the memory.
func newListHead(rank, ranks, n int) (h listHead, bytes int) {
	room := ceilDiv(n, 4) * 4
	h = listHead{
		rank:  uint64(rank),
		ranks: uint64(ranks),
		room:  uint64(room),
	}
	for block := range h.epoch {
		h.epoch[block] = 1
	}
	wires := 2 * 8 * room
	list := lengthBytes + 8*room
	return h, sharedHead + ranks*(wires+list)
}

// lists returns the lists in memory, with room for n entries each.
func (h *listHead) lists(memory uintptr, n int) (all []kernel.Entries) {
	room := uintptr(h.room)
	start := memory + sharedHead + 16*uintptr(h.ranks)*room
	for range h.ranks {
		indices := start + lengthBytes
		all = append(all, kernel.Entries{
			Idx: indices,
			Val: indices + 4*room,
			N:   n,
			Len: start,
		})
		start += lengthBytes + 8*room
	}
	all[h.rank].Shared = memory
	return all
}

// sharedLists implements [backend.SharedLists].
type sharedLists struct {
	c      *Comm                // whose lists they are
	memory []*cuda.SharedMemory // by rank; nil until mapped, and after Close
	lists  []kernel.Entries     // by rank; nil after Close
}

// ShareLists implements [backend.ListSharer].
func (c *Comm) ShareLists(ctx context.Context, n int) (backend.SharedLists, error) {
	const op = "share lists"
	if n < 1 {
		return nil, c.check.Fail(op, fmt.Errorf("%w: lists of %d entries", comm.ErrArgument, n))
	}
	c.entered.Add(1)
	defer c.left.Add(1)
	if err := c.life.Err(); err != nil {
		return nil, c.check.Fail(op, err)
	}
	l := &sharedLists{c: c, memory: make([]*cuda.SharedMemory, c.WorldSize())}
	if err := l.attach(ctx, n); err != nil {
		return nil, c.check.Fail(op, errors.Join(err, l.Close()))
	}
	return l, nil
}

// attach allocates the memory of this rank and maps the memory of all others.
func (l *sharedLists) attach(ctx context.Context, n int) (err error) {
	c := l.c
	b, err := newBootstrap(c.Communicator, c.rt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	head, bytes := newListHead(c.Rank(), c.WorldSize(), n)
	memory, err := c.allocateLists(bytes)
	l.memory[c.Rank()] = memory
	// Ranks compare the number of entries by these sizes.
	h := hello{sizes: sizes{words: bytes}}
	_, agreed, err := b.attachAll(ctx, h, memory, err, func(peer int, m *cuda.SharedMemory) {
		l.memory[peer] = m
	})
	if !agreed {
		return err
	}
	for rank, m := range l.memory {
		head.memory[rank] = uint64(m.Address())
	}
	l.lists = head.lists(memory.Address(), n)
	return b.agree(ctx, errors.Join(err,
		c.rt.Fill(memory.Address(), memory.Bytes(), dtype.U8, 0xff), // places are empty
		c.rt.CopyIn(memory.Address(), hostmem.Bytes([]listHead{head})),
		c.rt.Fill(l.lists[c.Rank()].Len, lengthBytes, dtype.U8, 0), // not marked
		c.rt.Synchronize(ctx)))
}

// allocateLists allocates the memory for lists.
func (c *Comm) allocateLists(bytes int) (*cuda.SharedMemory, error) {
	if bytes > maxSharedBytes {
		return nil, fmt.Errorf("p2p: %w: %d bytes for lists of %d ranks", comm.ErrUnsupported, bytes, c.WorldSize())
	}
	return c.rt.AllocateShared(bytes)
}

// Lists implements [backend.SharedLists].
func (l *sharedLists) Lists() []kernel.Entries {
	return l.lists
}

// Gather implements [backend.SharedLists].
func (l *sharedLists) Gather(list kernel.Entries) error {
	const op = "gather lists"
	if err := l.check(list); err != nil {
		return l.c.check.Fail(op, err)
	}
	if err := l.submit(list); err != nil {
		return l.c.life.Explain(op, err)
	}
	return nil
}

// submit launches the kernel that receives the peers' lists. Before it, a kernel writes this rank's list to the peers,
// unless the kernel that made the list did so.
func (l *sharedLists) submit(list kernel.Entries) error {
	c := l.c
	c.entered.Add(1)
	defer c.leave()
	if err := c.life.Err(); err != nil {
		return err
	}
	memory := l.lists[c.end.rank].Shared
	if list.Shared == 0 {
		if err := c.launch(c.end.list(c.end.kernels.post, memory, list)); err != nil {
			return err
		}
	}
	if err := c.launch(c.end.list(c.end.kernels.receive, memory, list)); err != nil {
		return err
	}
	c.ledger.Begin(&comm.Call{Op: comm.OpAllGather})
	return nil
}

// check checks that a list is this rank's, or a prefix of it: the memory after it holds the lists of other ranks.
func (l *sharedLists) check(list kernel.Entries) error {
	if l.lists == nil {
		return comm.ErrClosed
	}
	local := l.lists[l.c.end.rank]
	if list.N < 0 || list.N > local.N {
		return fmt.Errorf("%w: a list of %d entries, where there is room for %d", comm.ErrArgument, list.N, local.N)
	}
	whole := list // with the entries that the kernel may drop
	whole.N = local.N
	if whole.Len == 0 {
		whole.Len = local.Len
	}
	if whole.Shared == 0 {
		whole.Shared = local.Shared
	}
	if whole != local {
		return fmt.Errorf("%w: another list than this rank's", comm.ErrArgument)
	}
	return nil
}

// list plans a kernel for lists in memory with as much room as the given list.
func (p *planner) list(k *function, memory uintptr, list kernel.Entries) plan {
	packs := packsOf(8*list.N) * (p.ranks - 1)
	blocks := min(ceilDiv(packs, 2*maxWidth), p.ringBlocks, p.resident(maxWidth))
	return plan{
		kernel: k,
		blocks: max(blocks, 1),
		width:  maxWidth,
		call: callParameters{
			send:      uint64(memory),
			recv:      uint64(list.Len),
			bytes:     uint64(list.N),
			operation: uint32(comm.OpAllGather),
			root:      noRank,
			keeper:    noRank,
		},
	}
}

// Close implements [backend.SharedLists].
func (l *sharedLists) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), backend.DeviceTimeout)
	defer cancel()
	err := poll.Until(ctx, l.c.drained)
	if errors.Is(err, errInFlight) {
		return fmt.Errorf("p2p: lists: %w", err)
	}
	if err != nil {
		return fmt.Errorf("p2p: lists: %w: %w", errInFlight, err)
	}
	var errs []error
	for rank, m := range l.memory {
		if m != nil {
			errs = append(errs, m.Close())
		}
		l.memory[rank] = nil
	}
	l.lists = nil
	return errors.Join(errs...)
}

// drained reports whether no kernel of this rank is in flight. It returns an error if that cannot be known any more:
// the communicator was closed without draining, and the base has closed the stream.
func (c *Comm) drained() (bool, error) {
	if !c.streamUse.TryRLock() { // Close is draining
		return false, nil
	}
	defer c.streamUse.RUnlock()
	switch c.end.phase.Load() {
	case drained:
		return true, nil
	case shut:
		return false, errInFlight
	}
	return c.Stream().Done()
}
