package ddp

import (
	"context"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// sharded is a plain reduction that leaves each rank its shard, where that lies in the bucket.
type sharded struct{ plain }

func (s *sharded) Select(context.Context, engine.Input) error {
	b := s.b
	whole, err := b.flat.Ptr()
	if err != nil {
		return err
	}
	if padding := b.flat.Len() - b.len(); padding > 0 {
		if err := s.g.rt.Fill(whole+uintptr(b.bytes), padding, b.dt, 0); err != nil {
			return err
		}
	}
	share := b.flat.Len() / s.g.meter.WorldSize()
	shard := whole + uintptr(s.g.meter.Rank()*share*b.dt.Size())
	s.calls = append(s.calls[:0], comm.ReduceScatterCall(whole, shard, share, b.dt, s.g.reduction()))
	return nil
}

// padded returns the length of a bucket that can be cut into shards.
func (g *Gradients) padded(n int) int {
	if size := g.meter.WorldSize(); g.cfg.Shard {
		n = (n + size - 1) / size * size
	}
	return n
}

// Shards returns with [Config].Shard this rank's part of each bucket, in the order of [Gradients.Buckets]: the
// same in all steps, until a [Gradients.Rebind]. They are not to be changed.
func (g *Gradients) Shards() ([]Shard, error) {
	const op = "gradient shards"
	if !g.cfg.Shard {
		return nil, base.OpError(op, fmt.Errorf("%w: Config.Shard is not set", comm.ErrArgument))
	}
	return g.shards, g.between(op)
}

// cut makes the shards of buckets that are allocated.
func (g *Gradients) cut() error {
	if !g.cfg.Shard {
		return nil
	}
	all := make([]Shard, len(g.buckets))
	for i, b := range g.buckets {
		share := b.flat.Len() / g.meter.WorldSize()
		from := g.meter.Rank() * share
		t, err := b.flat.Slice(0, from, from+share)
		if err != nil {
			return err
		}
		all[i].Tensor = t
		offset := 0
		for _, p := range b.params {
			first := max(from, offset)
			end := min(from+share, offset+g.gradients[p].n)
			if first < end {
				all[i].Parts = append(all[i].Parts, ShardPart{p, first - offset, end - offset, first - from})
			}
			offset += g.gradients[p].n
		}
	}
	g.shards = all
	g.gathers = make([]comm.Call, len(all))
	g.norms = make([]float64, len(all))
	g.gathered = nil
	return nil
}

// Scatter copies this rank's parts of tensors like the gradients, such as the parameters, into tensors
// like the [Gradients.Shards]. It does not communicate.
func (g *Gradients) Scatter(shards, whole []*runtime.Tensor) error {
	const op = "gradient scatter"
	local, err := g.checkShards(op, shards, whole)
	if err == nil {
		err = g.checkMemory(op, whole, shards)
	}
	if err != nil {
		return err
	}
	for i, s := range local {
		if err := shards[i].Fill(0); err != nil {
			return base.OpError(op, err)
		}
		for _, p := range s.Parts {
			if err := g.copyElements(shards[i], p.Offset, whole[p.Param], p.From, p.To-p.From); err != nil {
				return base.OpError(op, err)
			}
		}
	}
	return nil
}

// Gather puts the shards of all ranks together in tensors like the gradients: the parameters, after each
// rank has updated its part of them, or a state of the optimizer, for a checkpoint that does not depend
// on the number of ranks. All ranks call it, between two steps. It overwrites what the gradients' shards
// hold; the result is ready as that of Wait is.
func (g *Gradients) Gather(ctx context.Context, whole, shards []*runtime.Tensor) error {
	const op = "gradient gather"
	local, err := g.checkShards(op, shards, whole)
	if err == nil {
		err = g.checkMemory(op, whole, nil) // the shards are read before anything is written
	}
	if err != nil {
		return err
	}
	return base.OpError(op, g.gatherShards(ctx, local, shards, whole))
}

func (g *Gradients) gatherShards(ctx context.Context, local []Shard, shards, whole []*runtime.Tensor) error {
	if err := g.agree(ctx); err != nil {
		return err
	}
	for i, s := range local {
		if err := g.copyElements(s.Tensor, 0, shards[i], 0, s.Tensor.Len()); err != nil {
			return err
		}
		shard, err := s.Tensor.Ptr()
		if err != nil {
			return err
		}
		first := shard - uintptr(g.meter.Rank()*s.Tensor.Bytes())
		g.gathers[i] = comm.AllGatherCall(shard, first, s.Tensor.Len(), s.Tensor.DType())
	}
	if err := g.order.Around(ctx, func() error { return g.meter.Group(g.gathers...) }); err != nil {
		return err
	}
	for _, b := range g.buckets {
		offset := 0
		for _, p := range b.params {
			if err := g.copyElements(whole[p], 0, b.flat, offset, g.gradients[p].n); err != nil {
				return fmt.Errorf("tensor %d: %w", p, err)
			}
			offset += g.gradients[p].n
		}
	}
	return nil
}

// ShardNorm returns the L2 norm of all averages of the last step, padding left out, the same bits on all
// ranks: to clip the update by. A gradient that was not finite on any rank makes it NaN or infinite on
// all. All ranks call it, before the shards are overwritten. The host waits.
func (g *Gradients) ShardNorm(ctx context.Context) (float64, error) {
	const op = "gradient norm"
	local, err := g.Shards()
	if err != nil {
		return 0, err
	}
	norm, err := g.shardNorm(ctx, local)
	return norm, base.OpError(op, err)
}

func (g *Gradients) shardNorm(ctx context.Context, local []Shard) (float64, error) {
	if len(local) == 0 {
		return 0, nil
	}
	kernels, err := kernel.Lookup(g.rt)
	if err == nil {
		err = g.transaction.buffers.Allocate(g.rt, &g.squares, 2*len(local)*base.WordSize)
	}
	if err != nil {
		return 0, err
	}
	for i, s := range local {
		p, err := s.Tensor.Ptr()
		if err == nil {
			err = kernels.SumSquares(p, s.Tensor.DType(), s.Tensor.Len(), base.At(g.squares.Ptr, 2*i))
		}
		if err != nil {
			return 0, err
		}
	}
	err = g.order.Around(ctx, func() error {
		return g.meter.AllReduce(g.squares.Ptr, g.squares.Ptr, len(local), dtype.F64, comm.Sum)
	})
	if err == nil {
		err = g.order.HostAfterAll(ctx)
	}
	if err != nil {
		return 0, err
	}
	sum := 0.0
	err = g.rt.CopyOut(hostmem.Bytes(g.norms), g.squares.Ptr)
	for _, s := range g.norms {
		sum += s
	}
	return math.Sqrt(sum), err
}

// checkShards checks tensors like the shards, and like the gradients.
func (g *Gradients) checkShards(op string, shards, whole []*runtime.Tensor) ([]Shard, error) {
	local, err := g.Shards()
	if err != nil {
		return nil, err
	}
	if len(shards) != len(local) || len(whole) != len(g.gradients) {
		return nil, base.OpError(op, fmt.Errorf("%w: %d shards and %d tensors, want %d and %d",
			comm.ErrArgument, len(shards), len(whole), len(local), len(g.gradients)))
	}
	for i, t := range shards {
		if err := g.reachable(t); err != nil {
			return nil, base.OpError(op, fmt.Errorf("shard %d: %w", i, err))
		}
		if like := local[i].Tensor; t.DType() != like.DType() || t.Len() != like.Len() {
			return nil, base.ShapeError(op, "shard %d has %d elements of %v, want %d of %v",
				i, t.Len(), t.DType(), like.Len(), like.DType())
		}
	}
	for i, t := range whole {
		if err := g.check(op, i, t); err != nil {
			return nil, err
		}
	}
	return local, nil
}

// checkMemory refuses tensors like the gradients, and shards, of which two share memory.
func (g *Gradients) checkMemory(op string, whole, shards []*runtime.Tensor) error {
	n := len(g.gradients)
	if g.gathered == nil {
		g.gathered = base.NewSpans(n + len(g.shards))
	}
	g.gathered.NextStep()
	for i, t := range whole {
		overlap, err := g.gathered.Place(i, t)
		if err == nil && overlap >= 0 {
			err = base.OverlapError("tensor", overlap, i)
		}
		if err != nil {
			return base.OpError(op, err)
		}
	}
	for i, t := range shards {
		overlap, err := g.gathered.Place(n+i, t)
		if err == nil && overlap >= 0 {
			err = fmt.Errorf("%w: shard %d shares memory with %s", comm.ErrArgument, i, g.shardOrTensor(overlap))
		}
		if err != nil {
			return base.OpError(op, err)
		}
	}
	return nil
}

// shardOrTensor names what checkMemory has placed.
func (g *Gradients) shardOrTensor(i int) string {
	if n := len(g.gradients); i >= n {
		return fmt.Sprintf("shard %d", i-n)
	}
	return fmt.Sprintf("tensor %d", i)
}

// copyElements copies n elements between tensors of one type.
func (g *Gradients) copyElements(dst *runtime.Tensor, to int, src *runtime.Tensor, from, n int) error {
	d, err := dst.Ptr()
	if err != nil {
		return err
	}
	s, err := src.Ptr()
	size := dst.DType().Size()
	if d, s = d+uintptr(to*size), s+uintptr(from*size); err != nil || n == 0 || d == s {
		return err
	}
	return g.rt.Copy(d, s, n*size)
}
