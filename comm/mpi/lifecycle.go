package mpi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// closeTimeout bounds how long Close waits for pending operations.
const closeTimeout = 5 * time.Second

// duplicate makes a communicator of the same ranks, so that messages of
// collectives never meet those of users. It is collective. Native collectives
// need none, and other programs would not take part.
func (s *state) duplicate(pub uintptr) (uintptr, error) {
	if s.native {
		return pub, nil
	}
	out := newCells()
	defer out.free()
	if err := s.lib.must("MPI_Comm_dup", s.lib.CommDup, pub, out.at(0)); err != nil {
		return 0, err
	}
	return s.lib.handle(out, 0), nil
}

// wrap makes a communicator of an MPI communicator and its duplicate.
func (s *state) wrap(pub, inner uintptr) (*communicator, error) {
	lib := s.lib
	out := newCells()
	defer out.free()
	for _, handle := range []uintptr{pub, inner} {
		err := lib.must("MPI_Comm_set_errhandler", lib.CommSetErrhandler, handle, lib.handles.errorsReturn)
		if err != nil {
			return nil, err
		}
	}
	if err := lib.must("MPI_Comm_rank", lib.CommRank, pub, out.at(0)); err != nil {
		return nil, err
	}
	if err := lib.must("MPI_Comm_size", lib.CommSize, pub, out.at(1)); err != nil {
		return nil, err
	}
	rank, size := int(out.int32(0)), int(out.int32(1))
	c := &communicator{
		engine: engine{
			lib: lib, rank: rank, size: size, pub: pub, inner: inner, native: s.native,
			table:   requests{handleSize: lib.abi.handleSize, statusSize: lib.abi.statusSize},
			inboxes: make([]inbox, size),
		},
		check: comm.Check{Backend: backend, Rank: rank, WorldSize: size},
		state: s,
	}
	if s.native {
		c.check.Supports = nativeSupports
	}
	s.progress.add(&c.engine)
	return c, nil
}

// Split implements [comm.Communicator] with MPI_Comm_split, after a barrier
// that ctx can end: the call itself cannot be interrupted. When ctx ends during
// the call all the same, because a rank died in it, Split returns and leaves
// the call behind.
func (c *communicator) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	const name = "split"
	if err := c.group.Outside(); err != nil {
		return nil, c.group.Refuse(c.check.Fail(name, err))
	}
	if color > math.MaxInt32 || key > math.MaxInt32 || key < math.MinInt32 {
		return nil, c.check.Fail(name, fmt.Errorf("%w: color %d or key %d is no 32-bit number", comm.ErrArgument, color, key))
	}
	if err := c.Barrier(ctx); err != nil {
		return nil, err
	}
	type result struct {
		c   *communicator
		err error
	}
	done := make(chan result, 1)
	go func() {
		split, err := c.split(color, key)
		done <- result{split, err}
	}()
	select {
	case r := <-done:
		if r.err != nil {
			return nil, c.check.Fail(name, r.err)
		}
		if r.c == nil {
			return nil, nil
		}
		return r.c, nil
	case <-ctx.Done():
		c.mu.Lock()
		defer c.mu.Unlock()
		return nil, c.fail(name, comm.ContextError(ctx))
	}
}

// split calls MPI_Comm_split and wraps the result, nil for a negative color.
func (c *communicator) split(color, key int) (*communicator, error) {
	lib := c.lib
	mpiColor := int32(max(color, -1))
	if mpiColor < 0 {
		mpiColor = lib.abi.undefined
	}
	out := newCells()
	defer out.free()
	err := lib.must("MPI_Comm_split", lib.CommSplit, c.pub, uintptr(mpiColor), uintptr(int32(key)), out.at(0))
	if err != nil || color < 0 {
		return nil, err
	}
	pub := lib.handle(out, 0)
	inner, err := c.state.duplicate(pub)
	if err != nil {
		return nil, err
	}
	split, err := c.state.wrap(pub, inner)
	if err != nil {
		return nil, err
	}
	c.state.mu.Lock()
	defer c.state.mu.Unlock()
	c.state.splits = append(c.state.splits, split)
	return split, nil
}

// Close implements [comm.Communicator]. The MPI communicators are freed unless
// operations are left pending. Closing the world waits for its operations and
// makes it unusable, but leaves MPI_Finalize to [Finalize].
func (c *communicator) Close() error {
	_ = c.shut()
	if c.world {
		return nil
	}
	s := c.state
	s.mu.Lock()
	defer s.mu.Unlock()
	s.splits = slices.DeleteFunc(s.splits, func(other *communicator) bool { return other == c })
	return nil
}

// shut waits for pending operations, closes the communicator and frees what
// can be freed. It returns why operations are left pending, also if that was
// found before.
func (c *communicator) shut() error {
	c.group.Free()
	c.mu.Lock()
	if c.closed {
		defer c.mu.Unlock()
		return c.broken
	}
	c.closed = true
	broken := c.broken
	c.mu.Unlock()

	if broken == nil {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		broken = c.wait(ctx, "close")
	}
	c.state.progress.remove(&c.engine)
	if broken != nil {
		c.mu.Lock()
		pending := len(c.active) + len(c.waiting)
		c.mu.Unlock()
		slog.Warn("mpi: communicator closed with operations pending", "rank", c.rank, "operations", pending, "cause", broken)
		return broken
	}
	return c.release()
}

// release frees the memory and the MPI communicators of an idle communicator.
// The standard calls MPI_Comm_free collective, but has it implemented locally;
// a library that waits for the others is not waited for.
func (c *communicator) release() error {
	c.table.release()
	c.scratch.release()
	for _, o := range c.free {
		_ = host.Deallocate(o.vectors)
	}
	for i := range c.inboxes {
		for _, p := range c.inboxes[i].stash {
			_ = host.Deallocate(p.memory)
		}
	}
	done := make(chan error, 1)
	go func() {
		var err error
		if c.inner != c.pub {
			err = c.freeHandle(c.inner)
		}
		done <- errors.Join(err, c.freeHandle(c.pub))
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(closeTimeout):
		slog.Warn("mpi: MPI_Comm_free did not come back", "rank", c.rank)
		return nil
	}
}

// freeHandle calls MPI_Comm_free, which wants the address of the handle.
func (c *communicator) freeHandle(handle uintptr) error {
	if handle == c.lib.handles.world {
		return nil
	}
	cell := newCells()
	defer cell.free()
	cell.set(0, handle)
	return c.lib.must("MPI_Comm_free", c.lib.CommFree, cell.at(0))
}

// firstLine returns the first line of a version text, shortened.
func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	if len(line) > 120 {
		line = line[:120]
	}
	return strings.Join(strings.Fields(line), " ")
}
