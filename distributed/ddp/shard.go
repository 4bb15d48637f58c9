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

// Shards are this rank's parts of the averages, with [Config].Shard. They are the same in all steps until a
// [Gradients.Rebind], after which [Gradients.Shards] returns others.
type Shards struct {
	// Buckets has a shard of each bucket, in the order of [Gradients.Buckets]. Do not modify it.
	Buckets []Shard

	g       *Gradients  // whose buckets these are of
	gathers []comm.Call // one of each bucket, reused
	spans   *base.Spans // where tensors of Gather and Scatter are; nil: none were passed yet
	squares base.Buffer // of the averages, an F64 of each bucket; empty before the first Norm
	norms   []float64   // squares on the host
}

// Shards returns this rank's part of each bucket. It returns [comm.ErrArgument] without [Config].Shard, and in the
// middle of a step.
func (g *Gradients) Shards() (*Shards, error) {
	const op = "gradient shards"
	if !g.cfg.Shard {
		return nil, base.OpError(op, fmt.Errorf("%w: Config.Shard is not set", comm.ErrArgument))
	}
	return g.shards, g.between(op)
}

// usable reports why the shards cannot be used now.
func (s *Shards) usable(op string) error {
	if err := s.g.between(op); err != nil {
		return err
	}
	if s != s.g.shards {
		return base.OpError(op, fmt.Errorf("%w: shards from before a Rebind, want those of Gradients.Shards",
			comm.ErrArgument))
	}
	return nil
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
	g.shards = &Shards{
		Buckets: all,
		g:       g,
		gathers: make([]comm.Call, len(all)),
		norms:   make([]float64, len(all)),
	}
	return nil
}

// Scatter copies this rank's parts of tensors like the gradients, such as the parameters, into tensors
// like those of the shards. It does not communicate.
func (s *Shards) Scatter(shards, whole []*runtime.Tensor) error {
	const op = "gradient scatter"
	if err := s.check(op, shards, whole); err != nil {
		return err
	}
	if err := s.checkMemory(op, whole, shards); err != nil {
		return err
	}
	return base.OpError(op, s.scatter(shards, whole))
}

func (s *Shards) scatter(shards, whole []*runtime.Tensor) error {
	for i, shard := range s.Buckets {
		if err := shards[i].Fill(0); err != nil {
			return err
		}
		for _, p := range shard.Parts {
			if err := s.g.copyElements(shards[i], p.Offset, whole[p.Param], p.From, p.To-p.From); err != nil {
				return err
			}
		}
	}
	return nil
}

// Gather gathers the shards of all ranks into tensors like the gradients. Use it for the parameters, after each rank
// has updated its part of them, or for the optimizer's state, so that a checkpoint does not depend on the number of
// ranks. All ranks call it, between two steps. It overwrites the gradients' shards. The result is ready as after
// [Gradients.Wait].
func (s *Shards) Gather(ctx context.Context, whole, shards []*runtime.Tensor) error {
	const op = "gradient gather"
	if err := s.check(op, shards, whole); err != nil {
		return err
	}
	// The shards are read before anything is written, so that they may share memory.
	if err := s.checkMemory(op, whole, nil); err != nil {
		return err
	}
	return base.OpError(op, s.gather(ctx, whole, shards))
}

func (s *Shards) gather(ctx context.Context, whole, shards []*runtime.Tensor) error {
	g := s.g
	if err := g.agree(ctx); err != nil {
		return err
	}
	for i, shard := range s.Buckets {
		t := shard.Tensor
		if err := g.copyElements(t, 0, shards[i], 0, t.Len()); err != nil {
			return err
		}
		ptr, err := t.Ptr()
		if err != nil {
			return err
		}
		bucket := ptr - uintptr(g.meter.Rank()*t.Bytes())
		s.gathers[i] = comm.AllGatherCall(ptr, bucket, t.Len(), t.DType())
	}
	if err := g.order.Around(ctx, func() error {
		return g.meter.Group(s.gathers...)
	}); err != nil {
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

// Norm returns the L2 norm of all averages of the last step, without padding and bit-identical on all ranks, to clip
// the update. If a gradient on any rank is not finite, the norm is NaN or infinite on all. All ranks call Norm before
// the shards are overwritten. The host waits. With [Config].Reproducible, Norm computes it from the integers, which it
// allgathers, and it has the same value for any number of ranks.
func (s *Shards) Norm(ctx context.Context) (float64, error) {
	const op = "gradient norm"
	if err := s.usable(op); err != nil {
		return 0, err
	}
	norm, err := s.norm(ctx)
	return norm, base.OpError(op, err)
}

func (s *Shards) norm(ctx context.Context) (float64, error) {
	if len(s.Buckets) == 0 {
		return 0, nil
	}
	g := s.g
	if g.cfg.Reproducible > 0 {
		return g.fixedNorm(ctx)
	}
	kernels, err := kernel.Lookup(g.rt)
	if err != nil {
		return 0, err
	}
	if err := g.transaction.buffers.Allocate(g.rt, &s.squares, 2*len(s.Buckets)*base.WordSize); err != nil {
		return 0, err
	}
	for i, shard := range s.Buckets {
		ptr, err := shard.Tensor.Ptr()
		if err != nil {
			return 0, err
		}
		square := base.At(s.squares.Ptr, 2*i)
		if err := kernels.SumSquares(ptr, shard.Tensor.DType(), shard.Tensor.Len(), square); err != nil {
			return 0, err
		}
	}
	err = g.order.Around(ctx, func() error {
		return g.meter.AllReduce(s.squares.Ptr, s.squares.Ptr, len(s.Buckets), dtype.F64, comm.Sum)
	})
	if err != nil {
		return 0, err
	}
	if err := g.order.HostAfterAll(ctx); err != nil {
		return 0, err
	}
	if err := g.rt.CopyOut(hostmem.Bytes(s.norms), s.squares.Ptr); err != nil {
		return 0, err
	}
	sum := 0.0
	for _, square := range s.norms {
		sum += square
	}
	return math.Sqrt(sum), nil
}

// check refuses tensors that are not like the shards, or like the gradients.
func (s *Shards) check(op string, shards, whole []*runtime.Tensor) error {
	if err := s.usable(op); err != nil {
		return err
	}
	g := s.g
	if len(shards) != len(s.Buckets) || len(whole) != len(g.gradients) {
		return base.OpError(op, fmt.Errorf("%w: %d shards and %d tensors, want %d and %d",
			comm.ErrArgument, len(shards), len(whole), len(s.Buckets), len(g.gradients)))
	}
	for i, t := range shards {
		if err := g.reachable(t); err != nil {
			return base.OpError(op, fmt.Errorf("shard %d: %w", i, err))
		}
		like := s.Buckets[i].Tensor
		if t.DType() != like.DType() || t.Len() != like.Len() {
			return base.ShapeError(op, "shard %d has %d elements of %v, want %d of %v",
				i, t.Len(), t.DType(), like.Len(), like.DType())
		}
	}
	for i, t := range whole {
		if err := g.check(op, i, t); err != nil {
			return err
		}
	}
	return nil
}

// checkMemory refuses tensors like the gradients, and shards, of which two share memory.
func (s *Shards) checkMemory(op string, whole, shards []*runtime.Tensor) error {
	n := len(s.g.gradients)
	if s.spans == nil {
		s.spans = base.NewSpans(n + len(s.Buckets))
	}
	s.spans.NextStep()
	for i, t := range whole {
		overlap, err := s.spans.Place(i, t)
		if err != nil {
			return base.OpError(op, err)
		}
		if overlap >= 0 {
			return base.OpError(op, base.OverlapError("tensor", overlap, i))
		}
	}
	for i, t := range shards {
		overlap, err := s.spans.Place(n+i, t)
		if err != nil {
			return base.OpError(op, err)
		}
		if overlap >= 0 {
			return base.OpError(op, fmt.Errorf("%w: shard %d shares memory with %s",
				comm.ErrArgument, i, s.describe(overlap)))
		}
	}
	return nil
}

// describe names what checkMemory has placed.
func (s *Shards) describe(i int) string {
	if n := len(s.g.gradients); i >= n {
		return fmt.Sprintf("shard %d", i-n)
	}
	return fmt.Sprintf("tensor %d", i)
}

// copyElements copies n elements between tensors of one type.
func (g *Gradients) copyElements(dst *runtime.Tensor, to int, src *runtime.Tensor, from, n int) error {
	target, err := dst.Ptr()
	if err != nil {
		return err
	}
	source, err := src.Ptr()
	if err != nil {
		return err
	}
	size := dst.DType().Size()
	target += uintptr(to * size)
	source += uintptr(from * size)
	if n == 0 || target == source {
		return nil
	}
	return g.rt.Copy(target, source, n*size)
}
