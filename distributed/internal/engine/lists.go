package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// allocate makes b hold at least bytes bytes; its content is lost when it has
// to grow.
func (e *engine) allocate(b *base.Buffer, bytes int) {
	e.do(func() error { return e.buffers.Allocate(e.rt, b, bytes) })
}

// placeSelected returns memory for the selected entries of this rank alone.
func (e *engine) placeSelected(_ context.Context, n int) kernel.Entries {
	return e.message(&e.list, n)
}

// share makes e.shared hold at least bytes bytes. It is memory for collectives, which all ranks allocate together, in
// the same step.
func (e *engine) share(ctx context.Context, bytes int) {
	if e.err != nil || bytes <= e.sharedBytes {
		return
	}
	e.check(e.unshare(ctx))
	e.do(func() (err error) {
		e.shared, err = comm.Allocate(ctx, e.c, e.rt, bytes)
		return err
	})
	if e.err == nil {
		e.sharedBytes = bytes
	}
}

// unshare frees that memory, also together. A communicator that was closed has freed it.
func (e *engine) unshare(ctx context.Context) error {
	if e.shared != nil && e.hostCopy != nil { // hostCopy may read from it
		if _, err := e.hostCopy.Read(ctx); err != nil {
			return err
		}
	}
	shared := e.shared
	e.shared = nil
	e.sharedBytes = 0
	if shared == nil {
		return nil
	}
	if err := shared.Free(ctx); !errors.Is(err, comm.ErrClosed) {
		return err
	}
	return nil
}

// peerLists are lists that ranks write into each other's memory. An exchange that gathers twice has two of them.
type peerLists struct {
	backend.SharedLists     // nil: none yet
	room                int // capacity in entries; negative: not supported
}

// shareLists allocates l with room for n entries, on all ranks together. It reports whether the lists exist.
func (e *engine) shareLists(ctx context.Context, l *peerLists, n int) bool {
	s, ok := comm.As[backend.ListSharer](e.c)
	if !ok || e.err != nil || e.coded() || e.size == 1 || l.room < 0 {
		return false
	}
	if e.listMade {
		e.err = fmt.Errorf("%w: the other ranks have the entries that this one selected in a step that was not exchanged",
			comm.ErrMismatch)
	} else if n > l.room {
		e.check(e.outgrow(ctx, l))
		if e.err != nil {
			return false
		}
		lists, err := s.ShareLists(ctx, n)
		if errors.Is(err, comm.ErrUnsupported) {
			l.room = -1
			return false
		}
		if err != nil {
			e.check(err)
			return false
		}
		*l = peerLists{lists, n}
	}
	return e.err == nil
}

// outgrow empties l. Graphs of captured steps refer to its lists, which then stay until the reducer leaves the
// communicator.
func (e *engine) outgrow(ctx context.Context, l *peerLists) error {
	if !e.captured || l.SharedLists == nil {
		return e.closeLists(ctx, l)
	}
	e.outgrown = append(e.outgrown, l.SharedLists)
	*l = peerLists{}
	return nil
}

// makes records that a kernel makes dst.
func (e *engine) makes(dst kernel.Entries) {
	e.listMade = e.listMade || e.err == nil && dst.Shared != 0
}

// gatherLists sends the lists of all ranks to every rank, like submit.
func (e *engine) gatherLists(ctx context.Context, l *peerLists, local kernel.Entries) {
	e.fence(ctx)
	e.do(func() error { return l.Gather(local) })
	e.inFlight = true
	e.listMade = e.err != nil
}

// closeLists frees them, when this rank no longer uses them.
func (e *engine) closeLists(ctx context.Context, l *peerLists) error {
	lists := l.SharedLists
	if lists == nil {
		return nil
	}
	err := e.order.HostAfterAll(ctx)
	if errors.Is(err, comm.ErrClosed) || errors.Is(err, comm.ErrBroken) { // kernels may still write to the lists
		err = e.order.HostAfterCompute(ctx)
	}
	if err != nil {
		return err
	}
	*l = peerLists{}
	e.listMade = false
	return lists.Close()
}

// freeShared is unshare when this rank may leave alone: symmetric memory is then left to the communicator's Close.
func (e *engine) freeShared(ctx context.Context, alone bool) error {
	if _, symmetric := comm.As[comm.SymmetricAllocator](e.c); alone && symmetric {
		e.shared = nil
		e.sharedBytes = 0
	}
	err := errors.Join(e.closeLists(ctx, &e.peerLists[0]), e.closeLists(ctx, &e.peerLists[1]))
	for _, lists := range e.outgrown {
		l := peerLists{SharedLists: lists}
		err = errors.Join(err, e.closeLists(ctx, &l))
	}
	e.outgrown = nil
	return errors.Join(err, e.unshare(ctx))
}

// release frees buffers[from:]; they are empty then and can grow again.
func (e *engine) release(from int) {
	e.check(e.buffers.Release(e.rt, from))
}

// listBuffer is memory of a list after its length: one word, plus padding that keeps the list aligned.
type listBuffer struct{ base.Buffer }

// headerWords is the number of words before a list.
const headerWords = 4

// message returns m's memory as a list of up to n entries. If it has to grow, it gets room for a quarter more, so that
// sizes that vary from step to step stabilize. It does not move unless it grows.
func (e *engine) message(m *listBuffer, n int) kernel.Entries {
	if words := headerWords + 2*n; words*base.WordSize > m.Bytes {
		e.allocate(&m.Buffer, (words+2*(n/4))*base.WordSize)
	}
	if m.Ptr == 0 {
		return kernel.Entries{}
	}
	return kernel.Entries{
		Idx: base.At(m.Ptr, headerWords),
		Val: base.At(m.Ptr, headerWords+n),
		N:   n,
		Len: m.Ptr,
	}
}

// exactly returns the first n entries of l, whose length is known to be n.
func exactly(l kernel.Entries, n int) kernel.Entries {
	l.N = n
	l.Len = 0
	return l
}

// part returns the entries [from, to).
func part(l kernel.Entries, from, to int) kernel.Entries {
	return kernel.Entries{
		Idx: base.At(l.Idx, from),
		Val: base.At(l.Val, from),
		N:   to - from,
	}
}
