package nccl

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// windowSymmetric is NCCL_WIN_COLL_SYMMETRIC.
const windowSymmetric = 1

// AllocateSymmetric implements [comm.SymmetricAllocator]. With NCCL 2.27 or newer, allgathers and sums of
// floating-point numbers other than float64 use such buffers directly at the sizes at which that is faster. A table
// has these sizes for up to eight GPUs connected by NVLink. At other sizes, and elsewhere, the buffers are plain
// memory.
//
// NCCL cannot abort kernels on windows when a peer has died. Sync still returns at its deadline, with an error that
// says that the GPU waits, and only a new process can use the GPU again.
func (c *Comm) AllocateSymmetric(ctx context.Context, bytes int) (uintptr, error) {
	const op = "allocate symmetric"
	if err := c.life.Err(); err != nil {
		return 0, c.check.Fail(op, err)
	}
	if bytes < 0 {
		return 0, c.check.Fail(op, fmt.Errorf("%w: %d bytes", comm.ErrArgument, bytes))
	}
	var w window
	err := c.step(ctx, func(ctx context.Context) (err error) {
		w, err = c.newWindow(ctx, bytes)
		return err
	})
	if err != nil {
		return 0, c.check.Fail(op, err)
	}
	if w.addr != 0 {
		c.mu.Lock()
		c.windows.add(w)
		c.mu.Unlock()
	}
	return w.addr, nil
}

// newWindow allocates memory on all ranks, and registers it.
func (c *Comm) newWindow(ctx context.Context, bytes int) (window, error) {
	addr, err := c.rt.AllocateMapping(bytes)
	if agreed := c.agree(ctx, bytes, err != nil); err == nil {
		err = agreed
	}
	if err != nil {
		return window{}, errors.Join(err, c.rt.Deallocate(addr)) // no other rank refers to it
	}
	w := window{addr: addr, bytes: bytes}
	if bytes > 0 && c.lib.sym.WindowRegister.Found() && c.WorldSize() > 1 {
		var faster bool
		faster, err = c.prepareWindows(ctx)
		if faster && err == nil {
			w.handle, err = c.register(ctx, w)
		}
	}
	if err != nil {
		return window{}, errors.Join(err, c.freeWindow(w))
	}
	return w, nil
}

// agree returns an error unless all ranks allocated the same number of bytes.
func (c *Comm) agree(ctx context.Context, bytes int, failed bool) error {
	votes := []int64{int64(bytes), -int64(bytes), 0}
	if failed {
		votes[2] = 1
	}
	if err := c.maximum(ctx, votes); err != nil {
		return err
	}
	switch {
	case votes[2] != 0:
		return fmt.Errorf("%w: a rank has no memory for %d bytes", comm.ErrPeerFailed, bytes)
	case votes[0] != -votes[1]:
		return fmt.Errorf("%w: between %d and %d bytes were asked for", comm.ErrMismatch, -votes[1], votes[0])
	}
	return nil
}

// maximum replaces up to maxVotes numbers by their maxima over all ranks.
func (c *Comm) maximum(ctx context.Context, votes []int64) error {
	cells := c.scratch + voteOffset
	x := comm.AllReduceCall(cells, cells, len(votes), dtype.I64, comm.Max)
	return c.exchange(ctx, &x, votes, cells)
}

// gather replaces all numbers except this rank's by the numbers of the other ranks. There are two for each rank.
func (c *Comm) gather(ctx context.Context, numbers []int64) error {
	cells := c.scratch + uintptr(gatherOffset(c.WorldSize()))
	share := len(numbers) / c.WorldSize()
	part := cells + uintptr(8*share*c.Rank())
	x := comm.AllGatherCall(part, cells, share, dtype.I64)
	return c.exchange(ctx, &x, numbers, cells)
}

// exchange makes a call in place on numbers, which it copies to device memory.
func (c *Comm) exchange(ctx context.Context, x *comm.Call, numbers []int64, cells uintptr) error {
	// Copies wait for the compute stream, which may wait for a peer. This wait ends with ctx.
	err := c.rt.Synchronize(ctx)
	if err == nil {
		err = c.rt.CopyIn(cells, hostmem.Bytes(numbers))
	}
	if err != nil { // the peers continue with the collective below
		if ctx.Err() != nil {
			err = waitError(ctx)
		}
		return c.fail(err)
	}
	if err := c.submit(ctx, x, c.data); err != nil {
		return err
	}
	if err := c.sync(ctx); err != nil {
		return err
	}
	if err := c.rt.CopyOut(hostmem.Bytes(numbers), cells); err != nil {
		return c.fail(err) // the peers rely on the outcome
	}
	return nil
}

// register makes a mapping a window, collectively.
func (c *Comm) register(ctx context.Context, w window) (handle uintptr, err error) {
	n := c.windows.native.Load()
	cell := new(uint64) // NCCL writes here
	err = c.guarded(ctx, func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !n.enter() {
			return comm.ErrBroken
		}
		defer n.leave()
		return c.rt.Current(func() error {
			register := c.lib.sym.WindowRegister
			result := register.Int(n.handle, w.addr, uintptr(w.bytes), hostmem.AddrOf(cell), windowSymmetric)
			return c.status(register, n.handle, result)
		})
	})
	if err != nil {
		c.lib.abandon(cell)
		return 0, c.fail(err)
	}
	return uintptr(*cell), nil
}

// prepareWindows reports whether windows are faster at any size, and if so makes the native communicator for them,
// unless it exists. Buffers that no call uses are not registered.
func (c *Comm) prepareWindows(ctx context.Context) (faster bool, err error) {
	if c.windows.native.Load() != nil {
		return true, nil
	}
	c.mu.Lock()
	rows := c.windows.rows
	c.mu.Unlock()
	if rows == nil {
		rows, err = c.tabulate(ctx)
		if err != nil {
			return false, err
		}
		c.mu.Lock()
		c.windows.rows = rows
		c.mu.Unlock()
	}
	if len(rows) == 0 {
		return false, nil
	}
	made, err := c.splitControl(ctx)
	if err != nil {
		return false, c.fail(err)
	}
	c.windows.native.Store(made)
	if err := c.life.Err(); err != nil { // another goroutine aborted or closed the communicator in the meantime
		made.abort(0)
		return false, err
	}
	return true, nil
}

// FreeSymmetric implements [comm.SymmetricAllocator]. An aborted communicator has no windows left, so only the memory
// is freed.
func (c *Comm) FreeSymmetric(ctx context.Context, buf uintptr) error {
	const op = "free symmetric"
	if buf == 0 {
		return nil
	}
	if c.life.Closed() {
		return c.check.Fail(op, comm.ErrClosed)
	}
	_ = c.fail(c.life.Broken()) // after the abort
	c.mu.Lock()
	w, known := c.windows.remove(buf)
	c.mu.Unlock()
	if !known {
		const format = "%w: %#x is not from AllocateSymmetric of this communicator"
		return c.check.Fail(op, fmt.Errorf(format, comm.ErrArgument, buf))
	}
	return c.explain(op, errors.Join(c.deregister(ctx, w), c.freeWindow(w)))
}

// deregister ends a window once no rank uses it.
func (c *Comm) deregister(ctx context.Context, w window) error {
	if c.life.Broken() != nil {
		return nil
	}
	if err := c.barrier(ctx); err != nil || w.handle == 0 {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.windows.native.Load()
	if !n.enter() {
		return nil
	}
	defer n.leave()
	end := func() error {
		deregister := c.lib.sym.WindowDeregister
		return c.status(deregister, n.handle, deregister.Int(n.handle, w.handle))
	}
	var err error
	c.rt.CurrentToFree(func() {
		if n.shares { // NCCL unmaps the memory of all ranks, as does the call of every other rank
			err = c.rt.Unmapping(end)
			return
		}
		err = end()
	})
	return err
}
