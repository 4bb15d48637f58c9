package sparse

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/runtime"
)

// allocate makes b hold at least bytes bytes; its content is lost when it has
// to grow.
func (e *engine) allocate(b *base.Buffer, bytes int) {
	e.do(func() error { return e.buffers.Allocate(e.rt, b, bytes) })
}

// placeSelected returns memory for the selected entries of this rank alone.
func (e *engine) placeSelected(_ context.Context, n int) runtime.Entries {
	return e.message(&e.list, n)
}

// share makes e.shared hold at least bytes bytes: memory for collectives, which
// all ranks make together, in the same step.
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

// unshare gives that memory back, together as well. A communicator that was closed
// has freed it.
func (e *engine) unshare(ctx context.Context) error {
	if e.shared != nil && e.notice != nil { // which may be a copy of that
		if _, err := e.notice.Read(ctx); err != nil {
			return err
		}
	}
	shared := e.shared
	e.shared, e.sharedBytes = nil, 0
	if shared == nil {
		return nil
	}
	if err := shared.Free(ctx); !errors.Is(err, comm.ErrClosed) {
		return err
	}
	return nil
}

// leaveShared is unshare where the ranks may not do it together, because this one
// goes alone: symmetric memory is left to the communicator's Close then.
func (e *engine) leaveShared(ctx context.Context, alone bool) error {
	if _, symmetric := comm.As[comm.SymmetricAllocator](e.c); alone && symmetric {
		e.shared, e.sharedBytes = nil, 0
	}
	return e.unshare(ctx)
}

// release gives buffers[from:] back; they are empty then and grow again.
func (e *engine) release(from int) { e.check(e.buffers.Release(e.rt, from)) }

// message is memory of a list, its length in front: a word, and as many more as keep what follows
// aligned.
type message struct{ base.Buffer }

// headerWords is the length of what is in front of a list.
const headerWords = 4

// message returns m's memory as a list of up to n entries, with room for a
// quarter more if it has to grow (so that sizes that vary from step to step
// settle). It does not move as long as it does not grow.
func (e *engine) message(m *message, n int) runtime.Entries {
	if words := headerWords + 2*n; words*base.WordSize > m.Bytes {
		e.allocate(&m.Buffer, (words+2*(n/4))*base.WordSize)
	}
	if m.Ptr == 0 {
		return runtime.Entries{}
	}
	return runtime.Entries{Idx: base.At(m.Ptr, headerWords), Val: base.At(m.Ptr, headerWords+n), N: n, Len: m.Ptr}
}

// exactly returns l where its length is known to be n: the first n entries.
func exactly(l runtime.Entries, n int) runtime.Entries {
	l.N, l.Len = n, 0
	return l
}

// part returns the entries [from, to).
func part(l runtime.Entries, from, to int) runtime.Entries {
	return runtime.Entries{Idx: base.At(l.Idx, from), Val: base.At(l.Val, from), N: to - from}
}
