package nccl

import (
	"context"
	"fmt"
	goruntime "runtime"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// noColor is NCCL_SPLIT_NOCOLOR.
const noColor = -1

// split is Split, by ncclCommSplit.
func (c *Comm) split(ctx context.Context, w comm.Wait) (*Comm, error) {
	through := c.submitted.addSplit()
	var child *Comm
	err := c.step(ctx, func(ctx context.Context) error {
		color, key, err := c.agreeOnGroups(ctx, w)
		if err != nil {
			return err
		}
		child, err = c.splitInto(ctx, color, key)
		return err
	})
	c.submitted.endSplit(through, err == nil)
	return child, err
}

// splitInto makes this rank's sub-communicator, nil for noColor.
func (c *Comm) splitInto(ctx context.Context, color, key int) (*Comm, error) {
	split := c.lib.sym.Split
	name := fmt.Sprintf("%d.%d", c.splits.Add(1), color)
	return c.derive(ctx, name, derivation{
		stop: c.life.Err,
		fn:   split,
		call: func(cell, cfg uintptr) uintptr {
			return split.Call(c.control.handle, uintptr(color), uintptr(key), cell, cfg)
		},
	})
}

// agreeOnGroups exchanges the ranks' colors and keys, of which NCCL takes 32 bits. It returns the number of this
// rank's group, noColor for none, and its place in the group.
func (c *Comm) agreeOnGroups(ctx context.Context, w comm.Wait) (group, place int, err error) {
	all := make([]int64, 2*c.WorldSize())
	all[2*c.Rank()] = int64(w.Color)
	all[2*c.Rank()+1] = int64(w.Key)
	if c.WorldSize() > 1 {
		if err := c.gather(ctx, all); err != nil {
			return 0, 0, err
		}
	}
	splits := make([]comm.Wait, c.WorldSize())
	for r := range splits {
		splits[r] = comm.Wait{
			Op:    comm.OpSplit,
			Color: int(all[2*r]),
			Key:   int(all[2*r+1]),
		}
	}
	for i, members := range backend.SplitGroups(splits) {
		if place := slices.Index(members, c.Rank()); place >= 0 {
			return i, place, nil
		}
	}
	return noColor, 0, nil
}

// Shrink makes a communicator of the ranks that are not excluded, so that the survivors of a failure can continue. The
// survivors, and only they, call it with the same list; ranks keep their order. It works on a communicator that was
// aborted in a collective, which must be closed afterwards, but not on one whose Split or AllocateSymmetric failed. It
// needs NCCL 2.27.
func (c *Comm) Shrink(ctx context.Context, excluded ...int) (*Comm, error) {
	const op = "shrink"
	switch {
	case !c.lib.sym.Shrink.Found():
		const format = "%w: NCCL %s has no ncclCommShrink, 2.27 does"
		return nil, c.check.Fail(op, fmt.Errorf(format, comm.ErrUnsupported, versionText(c.lib.version)))
	case c.life.Closed():
		return nil, c.check.Fail(op, comm.ErrClosed)
	case len(excluded) == 0:
		return nil, c.check.Fail(op, fmt.Errorf("%w: no rank is excluded", comm.ErrArgument))
	}
	ranks := make([]int32, len(excluded))
	for i, r := range excluded {
		if r < 0 || r >= c.WorldSize() || r == c.Rank() {
			const format = "%w: rank %d cannot be excluded by rank %d of %d"
			return nil, c.check.Fail(op, fmt.Errorf(format, comm.ErrArgument, r, c.Rank(), c.WorldSize()))
		}
		ranks[i] = int32(r)
	}
	slices.Sort(ranks)
	ranks = slices.Compact(ranks) // NCCL counts the entries
	child, err := c.derive(ctx, c.shrinks.name(ranks), derivation{
		stop: func() error {
			if c.life.Closed() { // an aborted communicator shrinks
				return comm.ErrClosed
			}
			return nil
		},
		fn: c.lib.sym.Shrink,
		call: func(cell, cfg uintptr) uintptr {
			first := hostmem.Addr(ranks)
			return c.lib.sym.Shrink.Call(c.control.handle, first, uintptr(len(ranks)), cell, cfg, shrinkAbort)
		},
	})
	goruntime.KeepAlive(ranks)
	if err == nil {
		err = c.life.Adopt(child)
	}
	if err != nil {
		return nil, c.check.Fail(op, err)
	}
	return child, nil
}

// shrinks counts the calls of Shrink for each list of excluded ranks. All survivors make the same calls with one list,
// but not necessarily with others.
type shrinks struct {
	mu     sync.Mutex     // guards the counts
	counts map[string]int // by name without the number, nil before the first; guarded by mu
}

// name returns the name of the next communicator without these ranks.
func (s *shrinks) name(excluded []int32) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.counts == nil {
		s.counts = map[string]int{}
	}
	name := fmt.Sprintf("without %v", excluded)
	s.counts[name]++
	return fmt.Sprintf("%d %s", s.counts[name], name)
}

// shrinkAbort is NCCL_SHRINK_ABORT, with which NCCL shrinks a communicator after an error.
const shrinkAbort = 1

// derive makes a sub-communicator. Its name is the same on all its ranks, and unique.
func (c *Comm) derive(ctx context.Context, name string, d derivation) (*Comm, error) {
	control, err := c.fromControl(ctx, d)
	if err != nil {
		return nil, c.fail(err)
	}
	if control == nil {
		return nil, nil
	}
	o := c.options
	o.name = fmt.Sprintf("%s/%s", c.name, name)
	rank, size := control.place()
	m := o.enroll(ctx, rank, size)
	var child *Comm
	err = m.step(ctx, func(ctx context.Context) (err error) {
		child, err = newComm(ctx, control, m, o)
		return err
	})
	return child, err
}
