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

const (
	maxShareBlocks = 256
	sharedHead     = 4096
	lengthBytes    = 16      // in front of a list
	mostShared     = 1 << 30 // bytes
)

// listHead is the kernels' struct shared_lists.
type listHead struct {
	epoch [maxShareBlocks]uint64
	//lint:ignore U1000 kernels write it
	counts, notes     [2][maxRanks]uint64
	rank, ranks, room uint64
	memory            [maxRanks]uint64
	//lint:ignore U1000 kernels write it
	closed uint32
}

// newListHead returns what is the same on all ranks and what of this one, and the size of the memory.
func newListHead(rank, ranks, n int) (h listHead, bytes int) {
	room := (n + 3) / 4 * 4
	h = listHead{rank: uint64(rank), ranks: uint64(ranks), room: uint64(room)}
	for b := range h.epoch {
		h.epoch[b] = 1
	}
	return h, sharedHead + ranks*(2*8*room+lengthBytes+8*room)
}

// lists returns where lists of n entries are in memory.
func (h *listHead) lists(memory uintptr, n int) (all []kernel.Entries) {
	room := uintptr(h.room)
	at := memory + sharedHead + 16*uintptr(h.ranks)*room
	for range h.ranks {
		all = append(all, kernel.Entries{Idx: at + lengthBytes, Val: at + lengthBytes + 4*room, N: n, Len: at})
		at += lengthBytes + 8*room
	}
	all[h.rank].Shared = memory
	return all
}

// sharedLists implements [backend.SharedLists].
type sharedLists struct {
	c      *Comm
	memory []*cuda.SharedMemory // by rank
	lists  []kernel.Entries
}

// ShareLists implements [backend.ListSharer].
func (c *Comm) ShareLists(ctx context.Context, n int) (backend.SharedLists, error) {
	const op = "share lists"
	if n < 1 {
		return nil, c.check.Fail(op, fmt.Errorf("%w: lists of %d entries", comm.ErrArgument, n))
	}
	c.entered.Add(1)
	defer c.left.Add(1)
	err := c.life.Err()
	if err != nil {
		return nil, c.check.Fail(op, err)
	}
	l, err := c.newLists(ctx, n)
	if err != nil {
		return nil, c.check.Fail(op, errors.Join(err, l.Close()))
	}
	return l, nil
}

func (c *Comm) newLists(ctx context.Context, n int) (l *sharedLists, err error) {
	rank, ranks := c.Rank(), c.WorldSize()
	l = &sharedLists{c: c, memory: make([]*cuda.SharedMemory, ranks)}
	b, err := newBootstrap(c.Communicator, c.rt)
	if err != nil {
		return l, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	head, bytes := newListHead(rank, ranks, n)
	if bytes > mostShared {
		err = fmt.Errorf("p2p: %w: %d bytes for lists of %d ranks", comm.ErrUnsupported, bytes, ranks)
	} else {
		l.memory[rank], err = c.rt.AllocateShared(bytes)
	}
	_, agreed, err := b.attachAll(ctx, hello{sizes: sizes{words: bytes}}, l.memory[rank], err, func(peer int, m *cuda.SharedMemory) { l.memory[peer] = m })
	if !agreed {
		return l, err
	}
	for r, m := range l.memory {
		head.memory[r] = uint64(m.Address())
	}
	own := l.memory[rank]
	l.lists = head.lists(own.Address(), n)
	err = b.agree(ctx, errors.Join(err,
		c.rt.Fill(own.Address(), own.Bytes(), dtype.U8, 0xff), // places are empty
		c.rt.CopyIn(own.Address(), hostmem.Bytes([]listHead{head})),
		c.rt.Fill(l.lists[rank].Len, lengthBytes, dtype.U8, 0), // not marked
		c.rt.Synchronize(ctx)))
	return l, err
}

// Lists implements [backend.SharedLists].
func (l *sharedLists) Lists() []kernel.Entries { return l.lists }

// Gather implements [backend.SharedLists].
func (l *sharedLists) Gather(own kernel.Entries) error {
	const op = "gather lists"
	c := l.c
	if err := l.checkOwn(own); err != nil {
		return c.check.Fail(op, err)
	}
	c.entered.Add(1)
	err := c.life.Err()
	if err == nil && own.Shared == 0 {
		err = c.launch(c.end.list(c.end.kernels.post, l.lists[c.end.rank].Shared, own))
	}
	if err == nil {
		err = c.launch(c.end.list(c.end.kernels.receive, l.lists[c.end.rank].Shared, own))
	}
	if err == nil {
		c.ledger.Begin(&comm.Call{Op: comm.OpAllGather})
	}
	c.leave(1)
	if err != nil {
		return c.life.Explain(op, err)
	}
	return nil
}

// checkOwn checks that own is this rank's list, or its beginning: what is beyond it are places of
// other ranks, in their memory.
func (l *sharedLists) checkOwn(own kernel.Entries) error {
	if l.lists == nil {
		return comm.ErrClosed
	}
	list := l.lists[l.c.end.rank]
	switch {
	case own.N < 0 || own.N > list.N:
		return fmt.Errorf("%w: a list of %d entries, where there is room for %d", comm.ErrArgument, own.N, list.N)
	case own.Idx != list.Idx, own.Val != list.Val,
		own.Len != 0 && own.Len != list.Len, own.Shared != 0 && own.Shared != list.Shared:
		return fmt.Errorf("%w: another list than this rank's", comm.ErrArgument)
	}
	return nil
}

// list plans a kernel that works on lists in memory, with room for as many entries as the own one.
func (p *planner) list(k *function, memory uintptr, own kernel.Entries) plan {
	blocks := min((packsOf(8*own.N)*(p.ranks-1)+2*maxWidth-1)/(2*maxWidth), p.ringBlocks, p.resident(maxWidth))
	return plan{kernel: k, blocks: max(blocks, 1), width: maxWidth, call: callParameters{
		send: uint64(memory), recv: uint64(own.Len), bytes: uint64(own.N), operation: uint32(comm.OpAllGather), root: noRank, keeper: noRank,
	}}
}

// Close implements [backend.SharedLists].
func (l *sharedLists) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), backend.DeviceTimeout)
	defer cancel()
	if err := poll.Until(ctx, l.c.drained); errors.Is(err, errInFlight) {
		return fmt.Errorf("p2p: lists: %w", err)
	} else if err != nil {
		return fmt.Errorf("p2p: lists: %w: %w", errInFlight, err)
	}
	var errs []error
	for i, m := range l.memory {
		if m != nil {
			errs = append(errs, m.Close())
		}
		l.memory[i] = nil
	}
	l.lists = nil
	return errors.Join(errs...)
}

// drained reports whether no kernel of this rank is in flight. It is an error that this cannot be
// known any more: the communicator was closed in vain, and the base has taken the stream.
func (c *Comm) drained() (bool, error) {
	if !c.streamUse.TryRLock() { // Close drains
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
