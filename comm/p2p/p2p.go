// Package p2p speeds up collectives between the GPUs of one machine: wrap their communicator (comm/nccl) with [New].
// Collectives that gain by it run as kernels that write into the other GPUs' memory; all others go to the base
// communicator.
//
// Each rank has scratch memory that all others map. A rank writes its data into its peers' scratch memory, and waits
// for theirs in its own. There is no barrier and no buffer to register: any address works, captured in a graph or not.
// The value of a word shows whether it has arrived: it is a float other than one reserved NaN, or 32 bits next to the
// number of the operation. Large messages go through rings of chunks, each with a flag.
//
// Reductions accumulate in rank order, f16, bf16 and fp8 in float32 and rounded once, so the result has the bits of
// comm/local on every rank and at every size. All element types and reductions work, even if the base lacks them.
//
// Kernels do not wait forever. They abort when the context of a Sync ends, including kernels of graphs, or after they
// have waited ten minutes for a peer. They tell the kernels of the other ranks, which abort as well. These ranks get
// [comm.ErrPeerFailed], unless the context of their Sync has ended too. The error names the missing rank, the
// operation and its number, and the rank that aborted first. The process continues: the communicator is aborted, and
// the base can be shrunk.
//
// Operations of one communicator must not overlap on the GPU: results would be wrong, and kernels do not order
// themselves. [cuda.Graph.Launch] orders a graph with the communicator's stream. A program that captures by other
// means launches its graphs on that stream, or orders its own stream with it.
//
// For each kind of operation, a table has the size up to which it is faster than the base, by the number of ranks and
// the slowest link between their GPUs ([Comm.HandOver]). Both submit to the base's stream. Calls of a Group go to the
// base, which starts them together, except calls that the base lacks. To use peer memory, make a call outside a Group.
//
// # How it is written
//
//   - p2p.go: what a program calls; connect.go, bootstrap.go: how ranks agree and map each other's memory, which
//     fdserver_*.go hands over
//   - offload.go: the table of sizes; plan.go: the kernels of a call; scratch.go: the layout of scratch memory
//   - library.go, kernels.go, parameters.go: the kernels of kernels/p2p.cu and their arguments
//   - submit.go, wait.go, progress.go: calls from submission to Sync, and aborts; lists.go: lists for sparse gradients
//   - endpoint.go: a rank; split.go: sub-communicators; communicator.go: what the user sees
//   - timeouts.go: all times
package p2p

import (
	"context"
	"fmt"
	"os"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// MaxRanks is the largest number of ranks of a communicator.
const MaxRanks = maxRanks

// order is a value of TUTTI_P2P_ORDER.
type order string

const (
	byTable order = ""
	fixed   order = "fixed"
)

// New makes a communicator over base, whose memory and streams belong to rt. It is collective on base. Afterwards base
// is used through the new communicator, whose Close closes it too.
//
// All ranks get a communicator or all get an error: [comm.ErrUnsupported] if GPUs cannot access each other's memory.
// The environment variable TUTTI_P2P_ORDER chooses the order of reductions. If it is "fixed", New is [NewFixedOrder].
// If it is not set, reductions that a table leaves to the base have the base's order. Another value is an error.
func New(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) (*Comm, error) {
	o := order(os.Getenv(env.P2POrder))
	if o != byTable && o != fixed {
		return nil, fmt.Errorf("p2p: %w: %s is %q, want %s or nothing", comm.ErrArgument, env.P2POrder, o, fixed)
	}
	return newOver(ctx, base, rt, o)
}

// NewFixedOrder is New for a communicator whose reductions keep the order contract of [comm.Communicator]. All of them
// go over peer memory, at every size and in groups too; none go to the base, which adds in other orders. The same
// holds for its sub-communicators, so Split returns [comm.ErrUnsupported] if New's would return the base's. If one
// rank calls NewFixedOrder, the order is fixed on all ranks.
func NewFixedOrder(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) (*Comm, error) {
	return newOver(ctx, base, rt, fixed)
}

func newOver(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, o order) (*Comm, error) {
	if base == nil || rt == nil {
		return nil, fmt.Errorf("p2p: %w: base communicator or runtime is nil", comm.ErrArgument)
	}
	ops, ok := comm.As[streams](base)
	if !ok {
		return nil, fmt.Errorf("p2p: %w: the base communicator has no stream", comm.ErrUnsupported)
	}
	return newComm(ctx, base, ops, rt, o)
}
