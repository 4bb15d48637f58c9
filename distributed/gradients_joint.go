package distributed

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// joint is what the buckets of a [GradientSync] share where one of them is more
// than a plain allreduce: the norm that clips them, a verdict on non-finite gradients, and
// memory.
type joint struct {
	rt      runtime.Runtime // that works on buckets
	kernels runtime.Kernels
	c       comm.Communicator
	order   order
	cfg     Config
	buffers buffers
	shared  buffer // the gradients of one sparse bucket at a time

	memory  buffer  // of what follows, all of it words
	squares uintptr // squared norms, an F64 of each gradient
	flags   uintptr // P of each bucket
	factor  uintptr // F32: what clips gradients
	least   uintptr // I32 1, the least count of a flag
	skip    uintptr // I32: how many flags are set
	skipped [1]int32
}

// newJoint configures what buckets share.
func newJoint(g *GradientSync, kernels runtime.Kernels, cfg Config) (*joint, error) {
	j := &joint{rt: g.worker(), kernels: kernels, cfg: cfg}
	if err := j.bind(g); err != nil {
		return nil, errors.Join(err, j.close())
	}
	return j, nil
}

// bind makes g's communicator that of the transaction, and allocates what there is per gradient
// and per bucket.
func (j *joint) bind(g *GradientSync) error {
	j.c, j.order = g.meter, newOrder(j.rt, g.meter)
	squares, flags := 2*len(g.lens), j.c.WorldSize()*len(g.buckets)
	words := squares + flags + 3
	if err := j.buffers.allocate(j.rt, &j.memory, words*wordSize); err != nil {
		return err
	}
	j.squares = j.memory.ptr
	j.flags = at(j.squares, squares)
	j.factor = at(j.flags, flags)
	j.least, j.skip = at(j.factor, 1), at(j.factor, 2)
	if err := j.rt.Fill(j.flags, flags, dtype.I32, 0); err != nil { // of those that look for none
		return err
	}
	return j.rt.Fill(j.least, 1, dtype.I32, 1)
}

// link has a bucket count its non-finite entries for the verdict, and follow it.
func (j *joint) link(bucket int, s *Sparse) {
	s.JoinTransaction(at(j.flags, bucket*j.c.WorldSize()), j.skip)
}

// clip returns the address of what all gradients are multiplied by, 0 if nothing
// bounds their norm.
func (j *joint) clip(ctx context.Context, gradients []*runtime.Tensor) (uintptr, error) {
	if j.cfg.ClipNorm == 0 || len(gradients) == 0 {
		return 0, nil
	}
	for i, t := range gradients {
		ptr, err := t.Ptr()
		if err == nil {
			err = j.kernels.SumSquares(ptr, t.DType(), t.Len(), at(j.squares, 2*i))
		}
		if err != nil {
			return 0, err
		}
	}
	m, share, limit := len(gradients), 1.0, j.cfg.ClipNorm/math.Sqrt(float64(j.c.WorldSize()))
	if j.cfg.Clip == ClipGlobal {
		share, limit = 1/float64(j.c.WorldSize()), j.cfg.ClipNorm
		err := j.order.commAfterCompute(ctx)
		if err == nil {
			err = j.c.AllReduce(j.squares, j.squares, m, dtype.F64, comm.Sum)
		}
		if err == nil {
			err = j.order.computeAfterComm(ctx)
		}
		if err != nil {
			return 0, err
		}
	}
	return j.factor, j.kernels.ClipFactor(j.factor, j.squares, m, share, limit)
}

// judge looks at the non-finite entries that all buckets have counted. waited: the host has
// waited for the device in this step.
func (j *joint) judge(ctx context.Context, buckets int, waited bool) (Verdict, error) {
	if j.cfg.Overflow == OverflowPass {
		return Passes, nil
	}
	// As numbers, counts have the order of their bits.
	counts := runtime.Entries{Val: j.flags, N: buckets * j.c.WorldSize()}
	if err := j.kernels.CountAbove(counts, j.least, 1, j.skip); err != nil {
		return Passes, err
	}
	if j.cfg.Overflow == OverflowDrop && j.order.streams != nil && !waited {
		return Deferred, nil
	}
	skips, err := j.skips(ctx)
	switch {
	case err != nil || !skips:
		return Passes, err
	case j.cfg.Overflow == OverflowError:
		return Skips, ErrOverflow
	}
	return Skips, nil
}

// skips has the host wait for the last verdict, and returns whether it was to skip the step.
func (j *joint) skips(ctx context.Context) (bool, error) {
	if err := j.order.hostAfterAll(ctx); err != nil {
		return false, err
	}
	err := j.rt.CopyOut(hostmem.Bytes(j.skipped[:]), j.skip)
	return j.skipped[0] != 0, err
}

// close gives the memory back, if the communicator is done with it.
func (j *joint) close() error {
	if err := j.order.settle(); err != nil {
		return err
	}
	return j.buffers.release(j.rt, 0)
}

// joinPolicies makes what the buckets share one: what a bucket leaves open follows
// the strictest of the others. whole, which has what they share, says how all are
// reduced unless each has a configuration of its own. It returns whether there is
// more to do than plain allreduces.
func joinPolicies(given, cfgs []Config, whole Config, each bool) (Config, bool, error) {
	policy, plain := whole.Overflow, whole.Plain()
	if each {
		policy, plain = OverflowPass, whole.ClipNorm == 0
	}
	for i := range cfgs {
		policy = max(policy, cfgs[i].Overflow)
		plain = plain && cfgs[i].Plain()
	}
	whole.Overflow = policy
	if len(cfgs) > 0 {
		whole.NoUndo = cfgs[0].NoUndo
	}
	if plain {
		return whole, false, nil
	}
	for i := range cfgs {
		c := &cfgs[i]
		if given[i].Overflow == 0 {
			c.Overflow = policy
		}
		if c.Overflow != policy || c.NoUndo != whole.NoUndo {
			return whole, true, fmt.Errorf("bucket %d: %w", i, configError("Overflow is %d and NoUndo %v, want %d and %v as for the other buckets",
				c.Overflow, c.NoUndo, policy, whole.NoUndo))
		}
		if c.ClipNorm != 0 && (c.ClipNorm != whole.ClipNorm || c.Clip != whole.Clip) {
			return whole, true, fmt.Errorf("bucket %d: %w", i, configError("ClipNorm is %v, want that of the whole gradient (%v), or 0", c.ClipNorm, whole.ClipNorm))
		}
		c.ClipNorm = 0 // all of them are clipped by one factor
	}
	return whole, true, nil
}
