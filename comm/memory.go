package comm

import (
	"context"

	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// MemoryChecker is implemented by communicators that reach only some memory; see
// [CheckDevice].
type MemoryChecker interface {
	// CheckDevice returns an error wrapping [ErrDevice] for memory that the
	// communicator cannot read and write, naming what would help.
	CheckDevice(d runtime.Device) error
}

// CheckDevice returns an error wrapping [ErrDevice] if c, or a communicator that
// it wraps, is a [MemoryChecker] that does not reach memory of d. Code that knows the
// device of a buffer (package distributed) asks before it communicates.
func CheckDevice(c Communicator, d runtime.Device) error {
	if r, ok := As[MemoryChecker](c); ok {
		return r.CheckDevice(d)
	}
	return nil
}

// Rounder is implemented by communicators that sum up rounded values in one operation. It is
// optional: the same is done by calls of AllToAll and AllGather between kernels.
type Rounder interface {
	// AllReduceRounded submits, as AllReduce does, the sums over all ranks of src.N F32 values, which
	// travel in a codec: those at src.X, or with src.Grad the sums that [kernel.Source] says. They are cut into as many
	// pieces as there are ranks, each of N/WorldSize elements rounded up, the last ones shorter. A rank rounds the
	// pieces of all others, adds up its own, as it is, and theirs of it, rounded, in the order
	// of the ranks to 0, and rounds the sums, which are the result on all ranks; with Avg, divided by their number afterwards, by
	// a product with 1/WorldSize. With src.Take what a rank's roundings lose is written to src.X; otherwise X stays as it
	// is, and no gradient is added to it. The sums do not overlap src, but may be at its Grad if that is F32.
	//
	// [ErrUnsupported], before anything is sent and on all ranks alike, means that there is no such operation: op is Sum or
	// Avg, and src.Keep 0, as what it is to keep would be lost where a rank aborts midway.
	AllReduceRounded(src kernel.Source, sums uintptr, codec kernel.Codec, op ReduceOp) error
}

// ListSharer is implemented by communicators whose ranks write lists of entries into each other's memory. It
// is optional: the same is done by AllGather of lists with room for as many entries as there may be.
type ListSharer interface {
	// ShareLists makes memory for the lists of all ranks, of up to n entries each. It is collective: all ranks
	// pass the same n. [ErrUnsupported], on all ranks alike, means that there is none.
	ShareLists(ctx context.Context, n int) (SharedLists, error)
}

// SharedLists is memory for a list of each rank, which is gathered again and again.
type SharedLists interface {
	// Lists returns where the lists are, in rank order: each has room for n entries, and its length on the
	// device, and [kernel.Entries].Shared of this rank's is set. All but that are written by Gather. They stay until
	// this rank makes its next list. The word behind a length is a mark, 0 at first: where a rank has set that of its own
	// list, the others find 1 with the list.
	Lists() []kernel.Entries
	// Gather submits, as AllGather does, what makes the lists of all ranks known to every rank. own is this rank's
	// list, or its beginning. If own.Shared is set, the kernel that made the list has written it to the other ranks;
	// otherwise Gather does. Each list that is written so is gathered once.
	Gather(own kernel.Entries) error
	// Close gives the memory back. It is not collective. Nothing of this rank may use the lists any more.
	Close() error
}

// SymmetricAllocator is implemented by communicators that have faster
// collectives on memory which all ranks allocate together; see [Allocate].
//
// Such a buffer is used symmetrically: every rank passes the same part of the
// same buffer to a collective, as it would pass the same count. A rank that
// passes another part, or another buffer, makes the result undefined on all.
type SymmetricAllocator interface {
	// AllocateSymmetric returns memory of the communicator's device, which is
	// collective: all ranks ask for the same number of bytes, otherwise all get
	// [ErrMismatch]. When a rank has no memory left, all of them fail. Zero
	// bytes give address 0.
	AllocateSymmetric(ctx context.Context, bytes int) (uintptr, error)
	// FreeSymmetric waits for all ranks, and gives a buffer back. It is
	// collective: all ranks free their buffers in the same order. Close frees
	// what is left; a rank that aborts alone leaves it to that, because its
	// peers may be calling something else.
	FreeSymmetric(ctx context.Context, buf uintptr) error
}

// Buffer is memory for communication; see [Allocate].
type Buffer struct {
	Ptr       uintptr // 0 for no bytes, and when it was freed
	rt        runtime.Runtime
	symmetric SymmetricAllocator // nil: it is rt's
}

// Allocate returns memory for collectives of c: symmetric memory if c, or a
// communicator that it wraps, has such ([SymmetricAllocator]), otherwise rt's,
// which c reaches. It is collective where there is symmetric memory, so all ranks
// call it together, with the same number of bytes.
func Allocate(ctx context.Context, c Communicator, rt runtime.Runtime, bytes int) (*Buffer, error) {
	b := &Buffer{rt: rt}
	var err error
	if a, ok := As[SymmetricAllocator](c); ok {
		b.symmetric = a
		b.Ptr, err = a.AllocateSymmetric(ctx, bytes)
	} else {
		b.Ptr, err = rt.Allocate(bytes)
	}
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Free gives the memory back. It is collective if Allocate was. Freeing twice is
// fine.
func (b *Buffer) Free(ctx context.Context) error {
	ptr := b.Ptr
	b.Ptr = 0
	switch {
	case ptr == 0:
		return nil
	case b.symmetric != nil:
		return b.symmetric.FreeSymmetric(ctx, ptr)
	}
	return b.rt.Deallocate(ptr)
}
