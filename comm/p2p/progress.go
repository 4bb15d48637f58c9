package p2p

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
)

// Calls of this communicator and of its base share a stream, and are not made under a lock. So
// a mark in the stream, or an idle stream, tells of the calls that were begun at a time at which
// no goroutine was in a call.

// leave ends a call, or several together, and marks the stream now and then.
func (c *Comm) leave(calls int) {
	c.left.Add(1)
	if !c.marks.Due(calls) || !c.streamUse.TryRLock() {
		return
	}
	defer c.streamUse.RUnlock()
	s := c.Stream()
	if e, quiet := c.quiet(); quiet {
		c.marks.Set(s, e)
	}
}

// quiet returns the calls that were begun, and whether no goroutine is in a call.
func (c *Comm) quiet() (backend.Extent, bool) {
	left := c.left.Load() // before, and entered after
	e := c.ledger.Begun()
	return e, c.entered.Load() == left
}

// Progress implements [backend.Progresser]. Captured calls count when the stream has
// come to what was submitted behind them.
func (a adapter) Progress() backend.Progress {
	c := a.c
	c.ledger.Done(c.marks.Reached(c.ledger.Begun, c.idle, c.unharmed))
	return c.ledger.Progress()
}

// healthy is implemented by a base that knows whether an abort, here or on another rank,
// may have ended what its stream has to do. Of any other base nothing is known.
type healthy interface{ Healthy() bool }

// unharmed reports whether nothing is known to have ended what the stream has to do. A
// kernel that aborts says so before the stream goes on, in memory that Release frees.
func (c *Comm) unharmed() bool {
	if !c.open() {
		return false
	}
	defer c.streamUse.RUnlock()
	base, ok := comm.As[healthy](c.Communicator)
	return !c.end.aborted() && c.life.Broken() == nil && ok && base.Healthy()
}

// idle returns the calls that were begun, if all are done.
func (c *Comm) idle() (backend.Extent, bool) {
	if !c.open() {
		return backend.Extent{}, false
	}
	defer c.streamUse.RUnlock()
	e, quiet := c.quiet()
	return e, quiet && c.Stream().Idle() // an earlier stream may be idle, and gone
}

// open reports whether Release has freed nothing yet, and does not before streamUse is released.
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
