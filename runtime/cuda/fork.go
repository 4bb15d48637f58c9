package cuda

import (
	"errors"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/runtime"
)

// forks are the open forks of a runtime.
type forks struct {
	mu     sync.Mutex // guards what follows; the lock of a parent comes before the locks of its forks and of pools
	all    []*Runtime // open forks; nil before the first
	frozen int        // how often
	closed bool       // there will be no others
}

// ForkStream implements [runtime.StreamForker]: a runtime of the same context. Its stream has
// the greatest priority: what is small and awaited gets its turn between the blocks of
// the large kernels of the other one.
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

// add takes a fork in, which is as frozen as the parent from then on, unless that is
// being closed.
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

// remove takes a fork out.
func (s *forks) remove(b *Runtime) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = slices.DeleteFunc(s.all, func(o *Runtime) bool { return o == b })
}

// open returns those that are there.
func (s *forks) open() []*Runtime {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.all)
}

// shut is open, after which there will be no others.
func (s *forks) shut() []*Runtime {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return slices.Clone(s.all)
}

// relatives are the runtimes that came with this one: its forks, its parent and the
// other forks of that.
func (r *Runtime) relatives() []*Runtime {
	all := r.forks.open()
	if t := r.parent; t != nil {
		all = append(append(all, t), t.forks.open()...)
	}
	return slices.DeleteFunc(all, func(o *Runtime) bool { return o == r })
}

// Freeze implements [runtime.Freezer]; it holds for forks as well.
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

// Trim implements [runtime.Freezer], also for forks. It waits at most five seconds
// for what was submitted to the streams of each, and returns nothing of those where
// that does not end.
func (r *Runtime) Trim() (released int64, err error) {
	if err := r.usable(); err != nil {
		return 0, err
	}
	released, err = r.pool.Trim()
	for _, b := range r.forks.open() {
		n, e := b.Trim()
		if errors.Is(e, runtime.ErrClosed) {
			e = nil // meanwhile
		}
		released += n
		err = errors.Join(err, e)
	}
	return released, err
}
