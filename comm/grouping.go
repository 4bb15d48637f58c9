package comm

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/internal/goroutine"
)

// Grouping keeps the rules of [Communicator.Group] for a backend: groups nest,
// belong to one goroutine, and are given up as a whole. The zero value is
// ready. A backend
//
//   - calls Enter first in every submission, and keeps the operation for later
//     if it reports true;
//   - calls Outside first in every method that waits (Sync, Barrier, Split);
//   - calls Refuse with the error of every submission that it turns down;
//   - implements Group by Run;
//   - calls Free when it has closed or broken.
type Grouping struct {
	owner atomic.Uintptr // the goroutine in a group, 0 if there is none

	mu    sync.Mutex
	ended sync.Cond // owner has become 0, or free has become true; uses mu
	free  bool      // nobody waits for a turn any more
	err   error     // first error in the open group
}

var errUnfinished = errors.New("the function of the group did not return")

// Enter waits until no other goroutine is in a group, and reports whether the
// caller is in its own.
func (g *Grouping) Enter() (inside bool) {
	owner := g.owner.Load()
	if owner == 0 {
		return false
	}
	if owner == goroutine.ID() {
		return true
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.await()
	return false
}

// inside reports whether the caller is in a group that it has opened itself.
func (g *Grouping) inside() bool {
	owner := g.owner.Load()
	return owner != 0 && owner == goroutine.ID()
}

// Outside returns an error wrapping [ErrArgument] if the caller is in a group
// that it has opened itself.
func (g *Grouping) Outside() error {
	if g.inside() {
		return fmt.Errorf("%w: inside a group it would wait for what has not started", ErrArgument)
	}
	return nil
}

// await waits for the end of an open group. The caller holds mu.
func (g *Grouping) await() {
	g.ended.L = &g.mu
	for g.owner.Load() != 0 && !g.free {
		g.ended.Wait()
	}
}

// Free ends all waiting for the end of a group, for good: a backend calls it
// when it has closed or broken, so that waiting calls go on and say so.
func (g *Grouping) Free() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.free = true
	g.ended.L = &g.mu
	g.ended.Broadcast()
}

// Refuse notes the error of a call: if the caller is in a group, that group is
// given up. It returns err.
func (g *Grouping) Refuse(err error) error {
	if err == nil || !g.inside() {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err == nil {
		g.err = err
	}
	return err
}

// Run runs submit inside a group. When the outermost group ends, finish is
// called: with nil to start what was kept, or with the first error to forget
// it. Run returns that error, or what finish returns. A panic of submit passes
// through, after the group was given up; so is the group around it, even if
// the panic is recovered there.
func (g *Grouping) Run(submit func() error, finish func(err error) error) (err error) {
	if g.inside() {
		err = errUnfinished
		defer func() { _ = g.Refuse(err) }()
		err = submit()
		return err
	}
	g.mu.Lock()
	g.await()
	if g.free {
		g.mu.Unlock()
		return submit() // in which every call fails
	}
	g.err = nil
	g.owner.Store(goroutine.ID())
	g.mu.Unlock()

	failure := errUnfinished
	defer func() {
		g.mu.Lock()
		if failure == nil {
			failure = g.err
		}
		g.mu.Unlock()
		err = failure
		if finished := finish(failure); err == nil {
			err = finished
		}
		g.mu.Lock()
		g.owner.Store(0)
		g.ended.Broadcast()
		g.mu.Unlock()
	}()
	failure = submit()
	return nil
}
