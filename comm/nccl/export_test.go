package nccl

import (
	"context"
	"testing"
	"time"

	"github.com/tutti-go/tutti/internal/dl"
)

// OtherRankAborts tells a communicator that another rank has aborted, after as many
// collectives as this one has seen done and more.
func OtherRankAborts(c *Comm, rank, more int) {
	c.reporter.Abort(context.Background(), c.name, rank, "changed its mind", c.submitted.seen.Load()+uint64(more))
}

// Guarded runs calls as calls that wait for other ranks.
func Guarded(ctx context.Context, c *Comm, calls func() error) error { return c.guarded(ctx, calls) }

// Watch has leaves called when a communicator, or one that was made out of it, leaves its
// reports, aborts when it aborts, and fails before it is asked who has; each may be nil.
func Watch(c *Comm, leaves, aborts, fails func()) {
	c.reporter.mu.Lock()
	defer c.reporter.mu.Unlock()
	c.reporter.reports = watched{c.reporter.reports, leaves, aborts, fails}
}

type watched struct {
	reports
	leaves, aborts, fails func()
}

func (w watched) Leave(group string, rank int, text string) {
	if w.leaves != nil {
		w.leaves()
	}
	w.reports.Leave(group, rank, text)
}

func (w watched) Abort(ctx context.Context, group string, rank int, text string, done uint64) {
	if w.aborts != nil {
		w.aborts()
	}
	w.reports.Abort(ctx, group, rank, text, done)
}

func (w watched) Failed(group string, rank int, collectives uint64) error {
	if w.fails != nil {
		w.fails()
	}
	return w.reports.Failed(group, rank, collectives)
}

// Reported is of how many ranks of a communicator there are reports.
func Reported(c *Comm) int {
	last, _ := c.reporter.Last(context.Background(), c.name)
	return len(last)
}

// AsOfTwo has a communicator behave as if there were another rank, in another process.
func AsOfTwo(c *Comm) { c.check.WorldSize, c.oneProcess = 2, false }

// AsOfTwoGoroutines has a communicator behave as if another goroutine of this process had the
// other of two ranks.
func AsOfTwoGoroutines(c *Comm) {
	c.check.WorldSize = 2
	AmongOthers(c)
}

// UnmapWithin is how long a communicator waits in a test for threads that it does not see.
func UnmapWithin(t *testing.T, d time.Duration) {
	saved := unmapTime
	t.Cleanup(func() { unmapTime = saved })
	unmapTime = d
}

// AmongOthers has a communicator be freed as if there were other ranks in this process.
func AmongOthers(c *Comm) { c.control.shares, c.data.shares = true, true }

// WithoutNewerCalls runs f as if NCCL were version 2.18, without the calls that
// came later.
func WithoutNewerCalls(f func()) error {
	lib, err := open()
	if err != nil {
		return err
	}
	saved := lib.sym
	defer func() { lib.sym = saved }()
	s := &lib.sym
	for _, fn := range []*dl.Func{&s.Shrink, &s.AllToAll, &s.Gather, &s.Scatter, &s.WindowRegister, &s.WindowDeregister} {
		*fn = dl.Func{}
	}
	f()
	return nil
}
