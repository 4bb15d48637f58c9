package cuda

import (
	"errors"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/runtime"
)

// forks are the open forks of a runtime.
type forks struct {
	mu     sync.Mutex // guards the fields below; a parent's lock comes before the locks of its forks and of pools
	all    []*Runtime // open forks; nil before the first
	frozen int        // nesting depth of Freeze
	closed bool       // no more forks can be added
}

// ForkStream implements [runtime.StreamForker]: a runtime of the same context. Its stream has the highest priority, so
// that small, urgent work runs between the blocks of the parent's large kernels.
func (r *Runtime) ForkStream() (runtime.Runtime, error) {
	opts := []Option{func(o *options) { o.first = true }}
	if r.lent {
		opts = append(opts, WithContext(r.ctx))
	}
	if err := r.usable(); err != nil {
		return nil, err
	}
	b, err := Open(r.index, opts...)
	if err != nil {
		return nil, err
	}
	b.parent = r
	if !r.forks.add(b) {
		return nil, errors.Join(r.errClosed(), b.Close())
	}
	return b, nil
}

// add adds a fork, and freezes it as often as the parent, unless the parent is being closed.
func (s *forks) add(b *Runtime) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	for range s.frozen {
		b.Freeze()
	}
	s.all = append(s.all, b)
	return true
}

// remove removes a fork.
func (s *forks) remove(b *Runtime) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = slices.DeleteFunc(s.all, func(o *Runtime) bool { return o == b })
}

// open returns the open forks.
func (s *forks) open() []*Runtime {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.all)
}

// shut is open, and keeps forks from being added afterwards.
func (s *forks) shut() []*Runtime {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return slices.Clone(s.all)
}

// relatives returns the runtimes that share this one's context by forking: its forks, its parent and the parent's
// other forks.
func (r *Runtime) relatives() []*Runtime {
	all := r.forks.open()
	if t := r.parent; t != nil {
		all = append(append(all, t), t.forks.open()...)
	}
	return slices.DeleteFunc(all, func(o *Runtime) bool { return o == r })
}

// Freeze implements [runtime.Freezer]; it also freezes forks.
func (r *Runtime) Freeze() {
	s := &r.forks
	s.mu.Lock()
	defer s.mu.Unlock()
	s.frozen++
	r.pool.Freeze()
	for _, b := range s.all {
		b.Freeze()
	}
}

// Unfreeze implements [runtime.Freezer].
func (r *Runtime) Unfreeze() {
	s := &r.forks
	s.mu.Lock()
	defer s.mu.Unlock()
	s.frozen = max(s.frozen-1, 0)
	r.pool.Unfreeze()
	for _, b := range s.all {
		b.Unfreeze()
	}
}

// Trim implements [runtime.Freezer], also for forks. It waits at most five seconds for the work of each one's streams.
// If the work does not end, it returns none of that runtime's memory.
func (r *Runtime) Trim() (released int64, err error) {
	if err := r.usable(); err != nil {
		return 0, err
	}
	released, err = r.pool.Trim()
	for _, b := range r.forks.open() {
		n, e := b.Trim()
		if errors.Is(e, runtime.ErrClosed) {
			e = nil // closed in the meantime
		}
		released += n
		err = errors.Join(err, e)
	}
	return released, err
}
