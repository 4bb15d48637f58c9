package nccl

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
)

// OtherRankGivesUp tells a communicator that another rank has given up, after as many
// collectives as this one has seen done and more.
func OtherRankGivesUp(c *Comm, rank, more int) {
	c.reporter.GiveUp(context.Background(), c.name, rank, "changed its mind", c.submitted.seenDone()+uint64(more))
}

// AsAProcess has a communicator behave as one of ranks that are a process each.
func AsAProcess(c *Comm) { c.oneProcess = false }

// Guarded runs calls as those that wait for other ranks.
func Guarded(ctx context.Context, c *Comm, calls func() error) error { return c.guarded(ctx, calls) }

// OnLeave has f called when a communicator leaves its reports.
func OnLeave(c *Comm, f func()) {
	c.reporter.mu.Lock()
	defer c.reporter.mu.Unlock()
	c.reporter.Reports = watched{c.reporter.Reports, f}
}

type watched struct {
	comm.Reports
	leaves func()
}

func (w watched) Leave(group string, rank int, text string) {
	w.leaves()
	w.Reports.Leave(group, rank, text)
}

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
