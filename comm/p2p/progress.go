package p2p

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
)

// Calls of this communicator and of its base share a stream, and are made without a lock. A mark in the stream, or an
// idle stream, therefore only covers calls that began while no goroutine was in a call.

// leave ends a call, or several together, and marks the stream if somebody has asked for marks.
func (c *Comm) leave() {
	c.left.Add(1)
	if !c.marks.Due() {
		return
	}
	if !c.streamUse.TryRLock() {
		c.marks.Miss()
		return
	}
	defer c.streamUse.RUnlock()
	s := c.Stream()
	if e, quiet := c.quiet(); quiet {
		c.marks.Set(s, e)
	}
}

// quiet returns the calls begun so far, and whether no goroutine is in a call.
func (c *Comm) quiet() (backend.Extent, bool) {
	left := c.left.Load() // read before entered
	e := c.ledger.Begun()
	return e, c.entered.Load() == left
}

// Progress implements [backend.Progresser]. Captured calls count once the stream has reached later submissions.
func (a adapter) Progress() backend.Progress {
	c := a.c
	c.ledger.Done(c.marks.Reached(c.ledger.Begun, c.idle, c.unharmed))
	return c.ledger.Progress()
}

// healthy is implemented by a base that knows whether an abort, here or on another rank, may have ended work of its
// stream. Other bases count as healthy.
type healthy interface{ Healthy() bool }

// unharmed reports whether no abort is known to have ended work of the stream. A kernel that aborts says so before the
// stream continues, in memory that Release frees.
func (c *Comm) unharmed() bool {
	if !c.open() {
		return false
	}
	defer c.streamUse.RUnlock()
	base, ok := comm.As[healthy](c.Communicator)
	return !c.end.aborted() && c.life.Broken() == nil && ok && base.Healthy()
}

// idle returns the calls begun so far, if all are complete.
func (c *Comm) idle() (backend.Extent, bool) {
	if !c.open() {
		return backend.Extent{}, false
	}
	defer c.streamUse.RUnlock()
	e, quiet := c.quiet()
	return e, quiet && c.Stream().Idle() // an idle stream may be an earlier one that was closed
}

// open reports whether Release has not begun to free; it cannot begin before streamUse is released.
func (c *Comm) open() bool {
	if !c.streamUse.TryRLock() {
		return false
	}
	if c.end.isShut() {
		c.streamUse.RUnlock()
		return false
	}
	return true
}
