package p2p

import (
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/internal/marks"
)

// progress is how far this rank's calls have come, its own and those of the base, which
// share a stream. They are not made under a lock: what the stream is to say, or is asked
// for, is what was made at a time at which nobody was in a call.
type progress struct {
	marks marks.Marks
	looks sync.RWMutex // held by who asks or marks the stream, or looks at what kernels tell, and to close it

	mu      sync.Mutex
	begun   backend.Extent // that were made
	settled backend.Extent // waits have seen it done
	calling int            // calls under way
}

// enter begins a call, or several together.
func (p *progress) enter() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calling++
}

// leave ends what enter has begun. It counts the calls unless they were refused, and marks the
// stream now and then.
func (c *Comm) leave(err error, calls backend.Extent) {
	p := &c.progress
	p.mu.Lock()
	p.calling--
	if err == nil {
		p.begun = backend.Extent{Collectives: p.begun.Collectives + calls.Collectives, Messages: p.begun.Messages + calls.Messages}
	}
	p.mu.Unlock()
	if !p.marks.Due(int(calls.Collectives+calls.Messages)) || !p.looks.TryRLock() {
		return
	}
	defer p.looks.RUnlock()
	s := c.current()
	if e, quiet := p.quiet(); quiet {
		p.marks.Set(s, e)
	}
}

// extentOf counts a call.
func extentOf(op comm.Op) backend.Extent {
	if op.Message() {
		return backend.Extent{Messages: 1}
	}
	return backend.Extent{Collectives: 1}
}

// quiet returns what was made, if nobody is in a call.
func (p *progress) quiet() (backend.Extent, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.begun, p.calling == 0
}

func (p *progress) soFar() backend.Extent {
	e, _ := p.quiet()
	return e
}

// waited counts a wait that has ended well, and what it has seen done: all that was made
// before, but for a Split.
func (p *progress) waited(op comm.Op, before backend.Extent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if op == comm.OpSplit {
		before.Messages = p.settled.Messages
	}
	if op != comm.OpSync {
		alone := p.begun.Collectives == before.Collectives
		p.begun.Collectives++
		if op == comm.OpSplit && p.settled.Collectives != before.Collectives {
			return // it is not the first one that is not known to be done
		}
		if alone {
			before.Collectives++
		}
	}
	p.settled = p.settled.Max(before)
}

// Progress implements [comm.Progresser]. What is captured counts when the stream has
// come to what was submitted behind it.
func (c *Comm) Progress() comm.Progress {
	p := &c.progress
	done := p.marks.Reached(p.soFar, c.idle, c.unharmed)
	p.mu.Lock()
	defer p.mu.Unlock()
	done = done.Max(p.settled)
	return comm.Progress{
		Collectives: comm.Count{Submitted: p.begun.Collectives, Done: done.Collectives},
		Messages:    comm.Count{Submitted: p.begun.Messages, Done: done.Messages},
	}
}

// healthy is implemented by a base that knows whether an abort, here or on another rank,
// may have ended what its stream has to do. Of any other nothing is known.
type healthy interface{ Healthy() bool }

// unharmed reports whether nothing is known to have ended what the stream has to do. A
// kernel that gives up says so before the stream goes on, in memory that Close gives back.
func (c *Comm) unharmed() bool {
	if !c.open() {
		return false
	}
	defer c.progress.looks.RUnlock()
	base, ok := comm.As[healthy](c.Communicator)
	return c.here.awaited() == "" && c.sound() == nil && ok && base.Healthy()
}

// idle returns what was made if all that is done.
func (c *Comm) idle() (backend.Extent, bool) {
	if !c.open() {
		return backend.Extent{}, false
	}
	defer c.progress.looks.RUnlock()
	e, quiet := c.progress.quiet()
	return e, quiet && c.current().Idle() // the one of before may be idle, and gone
}

// open reports whether Close has not begun to give anything back. If so it does not
// before looks is released.
func (c *Comm) open() bool {
	p := &c.progress
	if !p.looks.TryRLock() {
		return false
	}
	if c.closed.Load() {
		p.looks.RUnlock()
		return false
	}
	return true
}
