package p2p_test

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/p2p"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// A communicator of GPUs whose smaller collectives go over peer memory.
func ExampleNew() {
	overPeerMemory := func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) (comm.Communicator, error) {
		c, err := p2p.New(ctx, base, rt) // base: a communicator of comm/nccl on rt
		if err != nil {
			return nil, err
		}
		return c, nil
	}
	_ = overPeerMemory
}

// A communicator whose reductions have the same bits on every machine: all of them go over peer memory. Other
// operations may go to the communicator below. It needs GPUs, so it is not run here.
func ExampleNewFixedOrder() {
	sameBits := func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) (*p2p.Comm, error) {
		return p2p.NewFixedOrder(ctx, base, rt)
	}
	_ = sameBits
}
