// Package noop is the communicator of a single rank: what a program that is
// written for many ranks uses when it runs alone.
//
// It keeps the whole contract of [comm.Communicator]. A collective whose
// buffers differ copies, by means of the [runtime.Runtime] that owns the
// memory, so it works on a GPU as well; one in place costs only the checks. A
// message to oneself is copied when both its ends are there, in whichever
// order they come.
package noop

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"os"
	goruntime "runtime"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/leak"
	"github.com/tutti-go/tutti/internal/queue"
	"github.com/tutti-go/tutti/runtime"
)

const name = "noop"

// communicator is the handle of a world of one.
type communicator struct {
	*backend.Base
	r *rank // the backend, which does not refer to it
}

// rank is its only rank.
type rank struct {
	rt    runtime.Runtime // whose memory calls are for
	check backend.Check   // of arguments
	life  backend.Life    // sound, aborted or closed
	run   string          // names it in flight records; never changed

	leakAlarm goruntime.Cleanup // reports a communicator that was lost without Close, which stops it

	mu       sync.Mutex             // guards the fields below
	waiting  waiting                // messages without a partner, and what comes after them; guarded by mu
	messages queue.Keyed[*deferred] // of those that wait, by tag: sends or receives, never both of one; guarded by mu
	calls    backend.Progress       // Done is up to when nothing was waiting; guarded by mu
	changed  chan struct{}          // closed when nothing waits; nil if nobody waits for that; guarded by mu
}

// New returns a communicator of one rank for memory of rt.
func New(rt runtime.Runtime) comm.Communicator {
	r := &rank{rt: rt, check: backend.Check{Backend: name, WorldSize: 1}, run: rand.Text()}
	if rt.Device().Kind != runtime.CPU {
		r.life.Timeout = backend.DeviceTimeout
	}
	c := &communicator{backend.New(&r.check, &r.life, r), r}
	mark := leak.NewMark(name, "rank 0 of 1, with messages that nobody received or sent")
	r.leakAlarm = goruntime.AddCleanup(c, func(mark *leak.Mark) { r.leaked(mark) }, mark)
	return c
}

// leaked runs when a communicator was garbage collected without Close. That loses messages that wait, and nothing
// otherwise: programs make a communicator of one rank for what gets another one later, as elastic members do.
func (r *rank) leaked(mark *leak.Mark) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.waiting.first() != nil {
		mark.Report()
	}
}

// Close implements [comm.Communicator]. It may be the last to refer to c, which is not forgotten while Close drains.
func (c *communicator) Close() error {
	defer goruntime.KeepAlive(c)
	return c.Base.Close()
}

// RunName tells the flight records of this run from those of others: by the name that the process has from a launcher
// or the ranks of its job, and otherwise by one of this communicator.
func (c *communicator) RunName() string { return cmp.Or(dump.RunName(os.Getenv), c.r.run) }

// CheckDevice implements [backend.MemoryChecker].
func (c *communicator) CheckDevice(d runtime.Device) error {
	if device := c.r.rt.Device(); d != device {
		return c.r.check.Unreachable(d, fmt.Sprintf("this communicator was made for %v", device))
	}
	return nil
}

// Progress implements [backend.Progresser]. It does not know whether copies of a device are done.
func (r *rank) Progress() backend.Progress {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rt.Device().Kind != runtime.CPU {
		return backend.Progress{}
	}
	return r.calls
}

// Abort implements [backend.Backend].
func (r *rank) Abort(ctx context.Context, _ error) {
	r.mu.Lock()
	r.waiting.clear()
	r.messages = queue.Keyed[*deferred]{}
	r.announce()
	r.mu.Unlock()
	_ = r.rt.Synchronize(ctx) // of copies that were started
}

// Release implements [backend.Backend]. There is nothing to free.
func (r *rank) Release(context.Context) error {
	r.leakAlarm.Stop()
	return nil
}
