package distributed

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/runtime"
)

// joint is what the buckets of a [GradientSync] share where one of them is more
// than a plain allreduce: the norm that clips them, a verdict on overflows, and
// memory. Its engine is that of a tensor of which nothing is reduced, with the
// numbers of the verdict.
type joint struct {
	*engine
	memory buffer // squared norms, an F64 of each gradient, then flags, P of each bucket
	flags  uintptr
	shared buffer // the gradients of one sparse bucket at a time
}

// newJoint configures what buckets share.
func newJoint(g *GradientSync, kernels runtime.Kernels, cfg Config) (*joint, error) {
	e, err := newEngine(g.worker(), kernels, g.meter, 0, cfg)
	j := &joint{engine: e}
	if err == nil {
		err = j.place(g)
	}
	if err != nil {
		return nil, errors.Join(err, j.close())
	}
	return j, nil
}

// place allocates what there is per gradient and per bucket.
func (j *joint) place(g *GradientSync) error {
	squares, flags := 2*len(g.lens), j.size*len(g.buckets)
	j.allocate(&j.memory, (squares+flags)*wordSize)
	j.flags = at(j.memory.ptr, squares)
	j.fill(j.flags, flags) // of those that look for none
	j.set(numBracket, 1)   // the smallest count
	return j.err
}

// link has a bucket count its overflows for the verdict, and follow it.
func (j *joint) link(bucket int, s *Sparse) {
	s.flags = at(j.flags, bucket*j.size)
	s.skip, s.skips = j.at(j.overflows), 1
	s.agreed = true // [GradientSync.agree] does it for all buckets at once
}

// clip returns the address of what all gradients are multiplied by, 0 if nothing
// bounds their norm.
func (j *joint) clip(ctx context.Context, gradients []*runtime.Tensor) uintptr {
	if j.cfg.ClipNorm == 0 || len(gradients) == 0 {
		return 0
	}
	squares := j.memory.ptr
	for i, t := range gradients {
		ptr, err := t.Ptr()
		if j.check(err); j.err == nil {
			j.check(j.kernels.SumSquares(ptr, t.DType(), t.Len(), at(squares, 2*i)))
		}
	}
	return j.clipFactor(ctx, squares, len(gradients))
}

// judge looks at the overflows that all buckets have counted. waited: the host has
// waited for the device in this step.
func (j *joint) judge(ctx context.Context, buckets int, waited bool) verdict {
	if j.err != nil || j.cfg.Overflow == OverflowPass {
		return passes
	}
	// As numbers, counts have the order of their bits.
	counts := runtime.Entries{Val: j.flags, N: buckets * j.size}
	j.check(j.kernels.CountAbove(counts, j.at(numBracket), 1, j.at(j.overflows)))
	switch {
	case j.cfg.Overflow == OverflowDrop && j.order.streams != nil && !waited:
		return open
	case !j.overflowed(ctx):
		return passes
	case j.cfg.Overflow == OverflowError:
		j.check(ErrOverflow)
	}
	return overflow
}

// joinPolicies makes what the buckets share one: what a bucket leaves open follows
// the strictest of the others. whole, which has what they share, says how all are
// reduced unless each has a configuration of its own. It returns whether there is
// more to do than plain allreduces.
func joinPolicies(given, cfgs []Config, whole Config, each bool) (Config, bool, error) {
	policy, plain := whole.Overflow, whole.plain()
	if each {
		policy, plain = OverflowPass, whole.ClipNorm == 0
	}
	for i := range cfgs {
		policy = max(policy, cfgs[i].Overflow)
		plain = plain && cfgs[i].plain()
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
		if given[i].Overflow == overflowUnset {
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
