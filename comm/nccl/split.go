package nccl

import (
	"context"
	"fmt"
	"math"
	goruntime "runtime"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// noColor is NCCL_SPLIT_NOCOLOR.
const noColor = -1

// split is Split, by ncclCommSplit. Colors and keys must fit in 32 bits.
func (c *Comm) split(ctx context.Context, w comm.Wait) (*Comm, error) {
	color, key := w.Color, w.Key
	if color > math.MaxInt32 || key > math.MaxInt32 || key < math.MinInt32 {
		return nil, fmt.Errorf("%w: color %d or key %d does not fit in 32 bits", comm.ErrArgument, color, key)
	}
	defer c.submitted.endSplit(c.submitted.addSplit())
	wait, _ := c.submitted.begin()
	var done extent
	defer func() { c.submitted.end(done) }()
	child, err := c.derive(ctx, c.life.Err, fmt.Sprintf("%d.%d", c.splits.Add(1), color), c.lib.sym.Split, func(cell, cfg uintptr) uintptr {
		return c.lib.sym.Split.Call(c.control.handle, uintptr(max(color, noColor)), uintptr(key), cell, cfg)
	})
	if err == nil {
		done = c.submitted.last(wait)
	}
	return child, err
}

// Shrink makes a communicator of the ranks that are not excluded, so that the
// survivors of a failure go on. The survivors, and only they, call it with the
// same list; ranks keep their order. It works on a communicator that was aborted in a
// collective, which is to be closed afterwards, but not on one whose Split
// or AllocateSymmetric failed. It needs NCCL 2.27.
func (c *Comm) Shrink(ctx context.Context, excluded ...int) (*Comm, error) {
	const op = "shrink"
	switch {
	case !c.lib.sym.Shrink.Found():
		return nil, c.check.Fail(op, fmt.Errorf("%w: NCCL %s has no ncclCommShrink, 2.27 does", comm.ErrUnsupported, versionText(c.lib.version)))
	case c.life.Closed():
		return nil, c.check.Fail(op, comm.ErrClosed)
	case len(excluded) == 0:
		return nil, c.check.Fail(op, fmt.Errorf("%w: no rank is excluded", comm.ErrArgument))
	}
	ranks := make([]int32, len(excluded))
	for i, r := range excluded {
		if r < 0 || r >= c.WorldSize() || r == c.Rank() {
			return nil, c.check.Fail(op, fmt.Errorf("%w: rank %d cannot be excluded by rank %d of %d", comm.ErrArgument, r, c.Rank(), c.WorldSize()))
		}
		ranks[i] = int32(r)
	}
	slices.Sort(ranks)
	ranks = slices.Compact(ranks) // NCCL counts the entries
	closed := func() error {      // it may be aborted
		if c.life.Closed() {
			return comm.ErrClosed
		}
		return nil
	}
	child, err := c.derive(ctx, closed, c.shrinks.name(ranks), c.lib.sym.Shrink, func(cell, cfg uintptr) uintptr {
		return c.lib.sym.Shrink.Call(c.control.handle, hostmem.Addr(ranks), uintptr(len(ranks)), cell, cfg, shrinkAbort)
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

// shrinks counts the calls of Shrink for each list of excluded ranks. All survivors make the
// same calls with one list, but not necessarily with others.
type shrinks struct {
	mu      sync.Mutex
	without map[string]int
}

// name returns the name of the next communicator without these ranks.
func (s *shrinks) name(excluded []int32) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.without == nil {
		s.without = map[string]int{}
	}
	without := fmt.Sprintf("without %v", excluded)
	s.without[without]++
	return fmt.Sprintf("%d %s", s.without[without], without)
}

// shrinkAbort is NCCL_SHRINK_ABORT, with which NCCL shrinks a communicator that saw an error.
const shrinkAbort = 1

// derive makes a sub-communicator, unless stop returns an error before. Its name is the same on
// all its ranks, and unique.
func (c *Comm) derive(ctx context.Context, stop func() error, name string, fn dl.Func, call func(cell, cfg uintptr) uintptr) (*Comm, error) {
	control, err := c.fromControl(ctx, stop, false, fn, call)
	if err != nil {
		return nil, c.fail(err)
	}
	if control == nil {
		return nil, nil
	}
	o := c.options
	o.name = fmt.Sprintf("%s/%s", c.name, name)
	return newComm(ctx, control, o)
}
