package backend

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Parent is implemented by communicators that know their sub-communicators, as all that [New] makes do.
// [comm.CloseAll] and [comm.AbortAll] use it.
type Parent interface {
	// SubCommunicators returns the open sub-communicators, and theirs, each after its own sub-communicators.
	SubCommunicators() []comm.Communicator
}

// MemoryChecker is implemented by communicators that cannot access all memory; see [comm.CheckDevice].
type MemoryChecker interface {
	// CheckDevice returns an error wrapping [comm.ErrDevice] for memory that the communicator cannot access, and names
	// a remedy.
	CheckDevice(d runtime.Device) error
}

// Progress is the progress of one rank's operations.
type Progress struct {
	Collectives Count // collectives that move data, and Barrier and Split
	Messages    Count // sends and receives
}

// Count is the number of operations that a rank has submitted, and the number of leading ones that are complete.
type Count struct{ Submitted, Done uint64 }

// Progresser is implemented by communicators that know which of their operations are done
// before a wait returns. A flight recorder (comm/record) shows it.
//
// A decorator that issues its own calls must also implement Progresser. A zero Progress
// means "unknown".
type Progresser interface {
	// Progress does not wait; at most it queries whether a device is idle. Every call, Barrier and Split counts once,
	// in the order of submission. An operation is complete when this rank may read its result.
	Progress() Progress
}

// Rounder is implemented by communicators that sum rounded values in one operation. It is optional: AllToAll and
// AllGather between kernels give the same result.
type Rounder interface {
	// AllReduceRounded submits, as AllReduce does, the sums over all ranks of src.N F32
	// values, which travel in a codec. The values are those at src.X or, with src.Grad, the
	// sums that [kernel.Source] describes. They are cut into as many pieces as there are
	// ranks, each of N/WorldSize elements rounded up, the last ones shorter.
	//
	// A rank rounds its values of all pieces but its own. It adds up the values of its
	// piece: its own unrounded, those of the others rounded, in the order of the ranks, to 0.
	// It rounds the sums, which are the result on all ranks. With Avg the rounded sums are
	// multiplied by 1/WorldSize.
	//
	// With src.Take the errors of a rank's roundings are written to src.X; otherwise X stays
	// as it is, and no gradient is added to it. The sums do not overlap src, but may be at
	// its Grad if that is F32.
	//
	// [comm.ErrUnsupported], before anything is sent and on all ranks alike, means that there
	// is no such operation: op is Sum or Avg, and src.Keep 0, as the values to keep would be
	// lost where a rank aborts midway.
	AllReduceRounded(src kernel.Source, sums uintptr, codec kernel.Codec, op comm.ReduceOp) error
}

// ListSharer is implemented by communicators whose ranks write lists of entries into each other's memory. It is
// optional: AllGather of lists with room for the maximum number of entries gives the same result.
type ListSharer interface {
	// ShareLists allocates memory for the lists of all ranks, of up to n entries each. It is collective: all ranks
	// must pass the same n. It returns [comm.ErrUnsupported] on all ranks alike if there is no such memory.
	ShareLists(ctx context.Context, n int) (SharedLists, error)
}

// SharedLists is memory for a list of each rank, which can be gathered repeatedly.
type SharedLists interface {
	// Lists returns where the lists are, in rank order: each has room for n entries, and its
	// length on the device. [kernel.Entries].Shared of this rank's list is set. The lists
	// of the other ranks are written by Gather, and stay until this rank makes its next list.
	// The word after a length is a mark, 0 at first: where a rank has set the mark of its list,
	// the others find 1 with the list.
	Lists() []kernel.Entries
	// Gather submits, as AllGather does, the exchange that makes the lists of all ranks known
	// to every rank. list is this rank's list, or its beginning. If list.Shared is set, the
	// kernel that made the list has written it to the other ranks; otherwise Gather does.
	// Each list that a kernel has written so is gathered once.
	Gather(list kernel.Entries) error
	// Close frees the memory. It is not collective. Nothing on this rank may use the lists afterwards.
	Close() error
}
