package commtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reference"
	"github.com/tutti-go/tutti/runtime"
)

// maxFindings is how many findings one rank reports; the rest is counted.
const maxFindings = 10

// probe is one rank's view of a running case: the communicator under test,
// memory from its runtime, and a list of what was found wrong.
type probe struct {
	*suite
	ctx  context.Context
	c    comm.Communicator
	rt   runtime.Runtime
	rank int
	size int

	found   []error
	dropped int
	stopped bool   // fatalf was called
	skipped string // why the case means nothing here
	live    []uintptr
	scratch []byte // a host copy of one buffer
}

func newProbe(ctx context.Context, s *suite, r Rank) *probe {
	return &probe{
		suite: s,
		ctx:   ctx,
		c:     r.Comm,
		rt:    r.Runtime,
		rank:  r.Comm.Rank(),
		size:  r.Comm.WorldSize(),
	}
}

// errorf records a finding and lets the rank go on.
func (p *probe) errorf(format string, args ...any) {
	if len(p.found) == maxFindings {
		p.dropped++
		return
	}
	p.found = append(p.found, fmt.Errorf("rank %d of %d: "+format, append([]any{p.rank, p.size}, args...)...))
}

// stop is what a probe panics with when the rank cannot go on.
type stop struct{}

// fatalf records a finding and ends the case on this rank.
func (p *probe) fatalf(format string, args ...any) {
	p.errorf(format, args...)
	panic(stop{})
}

// must ends the case on this rank if err is not nil: after a failure to
// communicate there is no going on in step.
func (p *probe) must(err error) {
	if err != nil {
		p.fatalf("%w", err)
	}
}

// guard runs body, which may end early by fatalf, gives the probe's memory back,
// and returns all findings.
func (p *probe) guard(body func()) (err error) {
	defer func() {
		switch v := recover(); v {
		case nil:
			err = errors.Join(p.close(), p.findings())
		case stop{}:
			p.stopped = true
			// Operations may be in flight still: leave them their memory.
			err = p.findings()
		default:
			panic(v)
		}
	}()
	body()
	return nil
}

// on runs a part of the case with c in place of the communicator under test.
func (p *probe) on(c comm.Communicator, body func(q *probe)) {
	q := newProbe(p.ctx, p.suite, Rank{Comm: c, Runtime: p.rt})
	p.adopt(q, q.guard(func() { body(q) }))
}

// adopt takes over what q, which has ended with err, has found. A wrong value does not end the case: the other ranks go
// on.
func (p *probe) adopt(q *probe, err error) {
	if q.stopped {
		p.must(err)
	}
	if err != nil {
		p.errorf("%w", err)
	}
}

// findings joins what was recorded.
func (p *probe) findings() error {
	if p.dropped > 0 {
		p.found = append(p.found, fmt.Errorf("rank %d of %d: and %d findings more", p.rank, p.size, p.dropped))
	}
	return errors.Join(p.found...)
}

// poisoned is the longest run of poison so far. All ranks of a process read it.
var poisoned atomic.Pointer[[]byte]

// poison returns n bytes of what unwritten memory holds, which must not be changed.
func poison(n int) []byte {
	if known := poisoned.Load(); known != nil && len(*known) >= n {
		return (*known)[:n]
	}
	longer := reference.Tile(poisonBlock, 0, max(n, 1<<16))
	poisoned.Store(&longer)
	return longer[:n]
}

// image composes a buffer of n bytes that starts with content, behind front bytes of poison and
// before a guard. It is valid until the next call.
func (p *probe) image(front int, content []byte, n int) []byte {
	total := front + n + guard
	if len(p.scratch) < total {
		p.scratch = make([]byte, max(total, 1<<16))
	}
	image := p.scratch[:total]
	unwritten := poison(total)
	copy(image, unwritten[:front])
	end := front + copy(image[front:], content)
	copy(image[end:], unwritten[end:])
	return image
}

// alloc puts content into device memory of this case.
func (p *probe) alloc(content []byte) uintptr {
	ptr, err := p.rt.Allocate(len(content))
	p.must(err)
	p.live = append(p.live, ptr)
	p.must(p.rt.CopyIn(ptr, content))
	return ptr
}

// free gives one allocation back.
func (p *probe) free(ptr uintptr) {
	index := slices.Index(p.live, ptr)
	p.live = slices.Delete(p.live, index, index+1)
	p.must(p.rt.Deallocate(ptr))
}

// close gives all memory back.
func (p *probe) close() error {
	var errs []error
	for _, ptr := range p.live {
		errs = append(errs, p.rt.Deallocate(ptr))
	}
	p.live = nil
	return errors.Join(errs...)
}

// awaitCopies waits until device memory holds what was copied into it: the
// communicator's stream is another one.
func (p *probe) awaitCopies() {
	p.must(p.rt.Synchronize(p.ctx))
}

// read copies n bytes out of device memory.
func (p *probe) read(ptr uintptr, n int) []byte {
	out := make([]byte, n)
	p.must(p.rt.CopyOut(out, ptr))
	return out
}

// reduces reports whether the backend does a reduction.
func (p *probe) reduces(dt dtype.DType, op comm.ReduceOp) bool {
	return op.Defined(dt) && (p.Unsupported == nil || !p.Unsupported(dt, op))
}

// exchange gathers bytes of equal length from all ranks of c.
func (p *probe) exchange(c comm.Communicator, data []byte) [][]byte {
	n := len(data)
	send := p.alloc(data)
	recv := p.alloc(make([]byte, c.WorldSize()*n))
	p.awaitCopies()
	p.must(c.AllGather(send, recv, n, dtype.U8))
	p.must(c.Sync(p.ctx))
	flat := p.read(recv, c.WorldSize()*n)
	p.free(send)
	p.free(recv)
	return slices.Collect(slices.Chunk(flat, n))
}

// split makes a communicator that a case may break or close.
func (p *probe) split(color, key int) comm.Communicator {
	c, err := p.c.Split(p.ctx, color, key)
	p.must(err)
	return c
}
