package mpi

import (
	"math"
	"sync"
)

// turn keeps the callers of a library apart that provides MPI_THREAD_SERIALIZED only:
// one call at a time.
type turn struct {
	taken chan struct{} // has an element during a call
	left  chan struct{} // closed when a call was left behind
	once  sync.Once     // closes left
}

// leftBehind is the result of a call that was not made since another one is left
// behind. It is no MPI error code, which are not negative.
const leftBehind = math.MinInt32

func newTurn() *turn {
	return &turn{taken: make(chan struct{}, 1), left: make(chan struct{})}
}

// leave leaves the call that has the turn behind: every later one is leftBehind. Without
// turns it does nothing.
func (t *turn) leave() {
	if t != nil {
		t.once.Do(func() { close(t.left) })
	}
}

// take waits for the turn, and reports whether it came.
func (t *turn) take() bool {
	select {
	case <-t.left:
		return false
	default:
	}
	select {
	case t.taken <- struct{}{}:
		return true
	case <-t.left:
		return false
	}
}

func (t *turn) give() { <-t.taken }
