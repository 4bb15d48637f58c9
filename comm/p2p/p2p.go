// Package p2p is a [comm.Communicator] over another one of GPUs of the same
// machine (comm/nccl), from which it takes over the collectives that go faster by
// kernels that write into the memory of the other GPUs, as NVLink lets them.
//
// A rank has scratch memory that all others map, and writes what it sends into
// theirs; each waits for what lands in its own. There is no barrier and no buffer
// to register: any address works, captured in a graph or not. What a word of a
// message is tells that it has arrived: a float that is not one certain NaN, or the
// number of the operation beside 32 bits of anything else. Large messages go
// through rings of chunks, whose arrival a flag tells.
//
// Reductions accumulate in rank order, f16, bf16 and fp8 in float32 and rounded
// once, so the result has the bits that comm/local gives, on every rank, at every
// size. All element types and reductions work, also where the base has none.
//
// Kernels do not wait for ever. When the context of a Sync ends they leave, those
// of a graph too, and the error names the rank that was waited for, the operation
// and its number; so they do after a time of their own ([WithPatience]). The process
// goes on; the communicator is broken, and the base can be shrunk.
//
// What is taken over is measured when the communicator is made, agreed on by all
// ranks, and up to a size. Both submit to the base's stream.
package p2p

import (
	"context"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// MaxRanks is how many ranks a communicator can have.
const MaxRanks = maxRanks

// Option changes how New makes a communicator.
type Option func(*options)

type options struct {
	patience time.Duration
	most     int
}

// patience lets ranks be as far apart as training jobs are where one writes a checkpoint or
// compiles something, and is as long as PyTorch waits for a collective.
const patience = 10 * time.Minute

// WithPatience bounds how long a kernel waits for a peer if nobody on the host
// does: ten minutes unless set. A Sync with a context that ends sooner ends the wait
// sooner.
func WithPatience(d time.Duration) Option { return func(o *options) { o.patience = d } }

// WithLimit takes over operations up to so many bytes, instead of up to the size
// that is measured.
func WithLimit(bytes int) Option { return func(o *options) { o.most = bytes } }

// New makes a communicator of base, whose memory and streams are those of rt, and
// is collective on base. base goes on to be used through the new communicator,
// whose Close closes it too.
//
// All ranks get a communicator or all get an error: [comm.ErrUnsupported] where
// their GPUs do not reach each other's memory.
func New(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, opts ...Option) (*Comm, error) {
	if base == nil || rt == nil {
		return nil, fmt.Errorf("p2p: %w: base communicator or runtime is nil", comm.ErrArgument)
	}
	ops, ok := comm.As[streams](base)
	if !ok {
		return nil, fmt.Errorf("p2p: %w: the base communicator has no stream", comm.ErrUnsupported)
	}
	o := options{patience: patience, most: -1}
	for _, opt := range opts {
		opt(&o)
	}
	return newComm(ctx, base, ops, rt, o, nil)
}
