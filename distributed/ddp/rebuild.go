package ddp

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
)

// rebuild fills the buckets in the order in which rank 0's gradients became ready,
// as PyTorch's DistributedDataParallel does after the first iteration. A Rebind allocates what could
// not be allocated.
func (g *Gradients) rebuild(ctx context.Context) error {
	order := make([]byte, 0, 4*len(g.step.arrived))
	for _, i := range g.step.arrived {
		order = binary.LittleEndian.AppendUint32(order, uint32(i))
	}
	// It also has the host wait for the copies out of the buckets.
	order, err := distributed.BroadcastBytes(ctx, g.rt, g.meter, order, 0)
	if err != nil {
		return err
	}
	ready, seen := make([]int, 0, len(g.gradients)), make([]bool, len(g.gradients))
	for ; len(order) >= 4; order = order[4:] {
		i := int(binary.LittleEndian.Uint32(order))
		if i >= len(seen) || seen[i] {
			break
		}
		seen[i] = true
		ready = append(ready, i)
	}
	if len(ready) != len(g.gradients) {
		return fmt.Errorf("%w: rank 0 has other gradients", comm.ErrMismatch)
	}
	before := g.arrangement
	g.arrangement = g.fillBuckets(ready)
	if err := g.configure(ctx, nil); err != nil {
		g.arrangement = before // PerBucket does not fit other buckets
		return err
	}
	if err := g.dismiss(ctx, before, false); err != nil {
		return err
	}
	return g.allocate(ctx)
}
