package nccl

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/dl"
)

// AnotherRank has a communicator share a group with another rank, and returns how that rank aborts: after as many
// collectives as this one has seen done and more.
func AnotherRank(t *testing.T, c *Comm, rank int) (abort func(more int)) {
	server := store.NewServer(store.Options{})
	join := func(rank int, status func() string) group {
		s := &session{client: server.Local(fmt.Sprint("rank ", rank))}
		return s.join(t.Context(), c.name, rank, 8, status)
	}
	if c.group != nil {
		c.group.Leave()
	}
	c.group = join(c.Rank(), c.submitted.status)
	other := join(rank, func() string { return "no call yet" })
	return func(more int) {
		other.Abort(context.Background(), "changed its mind", c.submitted.seen.Load()+uint64(more))
	}
}

// Guarded runs calls as calls that wait for other ranks.
func Guarded(ctx context.Context, c *Comm, calls func() error) error { return c.guarded(ctx, calls) }

// Watch has leaves called when a communicator leaves its group, aborts when it tells the group of its abort, and fails
// before it asks which rank has aborted; each may be nil.
func Watch(c *Comm, leaves, aborts, fails func()) {
	c.group = watched{c.group, leaves, aborts, fails}
}

type watched struct {
	group
	leaves, aborts, fails func()
}

func (w watched) Leave() {
	if w.leaves != nil {
		w.leaves()
	}
	w.group.Leave()
}

func (w watched) Abort(ctx context.Context, cause string, done uint64) string {
	if w.aborts != nil {
		w.aborts()
	}
	return w.group.Abort(ctx, cause, done)
}

func (w watched) Failed(collectives uint64) error {
	if w.fails != nil {
		w.fails()
	}
	return w.group.Failed(collectives)
}

// WindowRows returns how many rows of the table of windows a communicator uses.
func WindowRows(ctx context.Context, c *Comm) (int, error) {
	rows, err := c.tabulate(ctx)
	return len(rows), err
}

// UseWindows has a communicator use windows at the sizes at which they are faster in the world that it is of, whatever
// world it behaves as if it were of later.
func UseWindows(ctx context.Context, c *Comm) (err error) {
	c.windows.rows, err = c.tabulate(ctx)
	return err
}

// ForceWindows makes a communicator use windows wherever NCCL has kernels for them, or nowhere, and returns a function
// that reverts this.
func ForceWindows(c *Comm, use bool) (restore func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	saved := c.windows.rows
	c.windows.rows = []windowRow{}
	for _, op := range windowOps {
		if use {
			c.windows.rows = append(c.windows.rows, windowRow{op: op, ranks: maxWindowRanks, maximum: math.MaxInt})
		}
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.windows.rows = saved
	}
}

// HasWindowRow reports whether the table chooses windows.
func HasWindowRow(c *Comm, op comm.Op, bytes int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.windows.isFaster(op, bytes)
}

// AsOfTwo has a communicator behave as if there were another rank, in another process.
func AsOfTwo(c *Comm) { AsOf(c, 2) }

// AsOf has a communicator behave as if the other ones of several ranks were in other processes.
func AsOf(c *Comm, ranks int) { c.check.WorldSize, c.oneProcess = ranks, false }

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
	newer := []*dl.Func{&s.Shrink, &s.AllToAll, &s.Gather, &s.Scatter, &s.WindowRegister, &s.WindowDeregister}
	for _, fn := range newer {
		*fn = dl.Func{}
	}
	f()
	return nil
}
