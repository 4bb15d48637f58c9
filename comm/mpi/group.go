package mpi

import (
	"sync"

	"github.com/tutti-go/tutti/internal/goroutine"
)

// group is the state of Communicator.Group. It is guarded by engine.mu.
type group struct {
	depth  int
	owner  uintptr // goroutine that opened it
	ops    []*op   // submitted inside, not handed to the engine yet
	err    error   // first error of a call inside
	closed *sync.Cond
}

// enter waits for the end of a group of another goroutine.
func (g *group) enter() {
	if g.depth == 0 {
		return
	}
	self := goroutine.ID()
	for g.depth > 0 && g.owner != self {
		g.closed.Wait()
	}
}
