package nccl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// NCCL 2.27 and newer reads and writes the memory of the peers directly where
// all ranks registered it as a symmetric window, which saves small collectives
// the way through NCCL's own buffers.
// https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/bufferreg.html
//
// NCCL looks only at the address a collective is called with, and takes equal
// offsets on all ranks for granted: with a rank whose buffer lies elsewhere the
// result is silently wrong. So what a program allocates on its own is not
// registered behind its back. AllocateSymmetric makes windows that are equal on
// all ranks by construction, and each covers one mapping, so that no other
// buffer can lie in it.
//
// On a window NCCL always uses its kernels for windows, also at the sizes at
// which its rings are faster. So windows are registered with a third native
// communicator, and each call goes to the one that was measured to be faster;
// see tune.go.

// windowSymmetric is NCCL_WIN_COLL_SYMMETRIC.
const windowSymmetric = 1

// windows are the symmetric buffers of a communicator. Comm.mu guards all but
// the handle.
type windows struct {
	handle atomic.Uintptr // the native communicator, 0 before the first buffer
	list   []window
	faster [windowKinds][tunedSizes]bool // than without windows
}

// window is a symmetric buffer.
type window struct {
	addr   uintptr
	bytes  int
	native uintptr // ncclWindow_t, 0 for plain memory
}

// windowKind is a collective for which NCCL has kernels for windows.
type windowKind int

const (
	noWindow windowKind = iota
	windowAllReduce
	windowAllGather
	windowReduceScatter
	windowKinds
)

// reductionOnWindows returns kind if NCCL can do that reduction on windows.
func reductionOnWindows(kind windowKind, dt dtype.DType, op comm.ReduceOp) windowKind {
	if op != comm.Sum || !dt.IsFloat() || dt == dtype.F64 {
		return noWindow
	}
	return kind
}

// serve reports whether a call is to be made with windows.
func (w *windows) serve(n *call) bool {
	return len(w.list) > 0 && w.isFaster(n.kind, max(n.sendBytes, n.recvBytes)) &&
		w.cover(n.args[0], n.sendBytes) && w.cover(n.args[1], n.recvBytes)
}

// cover reports whether memory lies in a window.
func (w *windows) cover(addr uintptr, bytes int) bool {
	i, found := slices.BinarySearchFunc(w.list, addr, func(x window, addr uintptr) int { return cmp.Compare(x.addr, addr) })
	if !found {
		i-- // the last that begins before
	}
	return i >= 0 && w.list[i].native != 0 && addr+uintptr(bytes) <= w.list[i].addr+uintptr(w.list[i].bytes)
}

// add keeps a window, in the order of addresses.
func (w *windows) add(x window) {
	i, _ := slices.BinarySearchFunc(w.list, x.addr, func(x window, addr uintptr) int { return cmp.Compare(x.addr, addr) })
	w.list = slices.Insert(w.list, i, x)
}

// remove takes out the window that begins at an address.
func (w *windows) remove(addr uintptr) (window, bool) {
	i := slices.IndexFunc(w.list, func(x window) bool { return x.addr == addr })
	if i < 0 {
		return window{}, false
	}
	x := w.list[i]
	w.list = slices.Delete(w.list, i, i+1)
	return x, true
}

var _ comm.SymmetricAllocator = (*Comm)(nil)

// AllocateSymmetric implements [comm.SymmetricAllocator]. With NCCL 2.27 or
// newer, sums of floating-point numbers other than float64, and allgathers, are
// faster on such buffers at the sizes that the first call finds out: it makes
// measurements for some tenths of a second. Nothing is slower on them.
func (c *Comm) AllocateSymmetric(ctx context.Context, bytes int) (uintptr, error) {
	const op = "allocate symmetric"
	if err := c.waitable(op); err != nil {
		return 0, err
	}
	if bytes < 0 {
		return 0, c.Fail(op, fmt.Errorf("%w: %d bytes", comm.ErrArgument, bytes))
	}
	buf, err := c.allocateSymmetric(ctx, op, bytes)
	if err != nil {
		return 0, c.Fail(op, err)
	}
	return buf, nil
}

func (c *Comm) allocateSymmetric(ctx context.Context, op string, bytes int) (uintptr, error) {
	buf, err := c.rt.AllocateMapping(bytes)
	agreed := c.agree(ctx, op, bytes, err != nil)
	if err == nil {
		err = agreed
	}
	w := window{addr: buf, bytes: bytes}
	if err == nil && bytes > 0 && c.lib.sym.WindowRegister != 0 && c.WorldSize() > 1 {
		w.native, err = c.register(ctx, op, buf, bytes)
	}
	if err != nil {
		return 0, errors.Join(err, c.rt.Deallocate(buf))
	}
	if buf != 0 {
		c.mu.Lock()
		c.windows.add(w)
		c.mu.Unlock()
	}
	return buf, nil
}

// agree finds out whether all ranks allocated the same number of bytes.
func (c *Comm) agree(ctx context.Context, op string, bytes int, failed bool) error {
	votes := []int64{int64(bytes), -int64(bytes), 0}
	if failed {
		votes[2] = 1
	}
	if err := c.maximum(ctx, op, votes); err != nil {
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

// maximum replaces at most maxVotes numbers by their maxima over all ranks.
func (c *Comm) maximum(ctx context.Context, op string, votes []int64) error {
	at := c.scratch + voteOffset
	if err := c.rt.CopyIn(at, hostmem.Bytes(votes)); err != nil {
		return err
	}
	if err := c.submit(op, len(votes), newCall("ncclAllReduce", c.lib.sym.AllReduce,
		at, at, uintptr(len(votes)), uintptr(typeTable[dtype.I64]), opTable[comm.Max])); err != nil {
		return err
	}
	if err := c.sync(ctx, op); err != nil {
		return err
	}
	return c.rt.CopyOut(hostmem.Bytes(votes), at)
}

// register makes a window of a mapping, together with all ranks.
func (c *Comm) register(ctx context.Context, op string, buf uintptr, bytes int) (native uintptr, err error) {
	if c.windows.handle.Load() == 0 {
		if err := c.prepareWindows(ctx, op); err != nil {
			return 0, err
		}
	}
	handle := c.windows.handle.Load()
	cell := new(uint64) // NCCL writes here during the call
	err = c.guarded(ctx, func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.rt.Current(func() error {
			return c.status("ncclCommWindowRegister", handle,
				c.lib.sym.WindowRegister.Int(handle, buf, uintptr(bytes), hostmem.AddrOf(cell), windowSymmetric))
		})
	})
	if err != nil {
		return 0, c.breakDown(op, err)
	}
	return uintptr(*cell), nil
}

// prepareWindows makes the native communicator for windows, and tunes with a
// window of its own.
func (c *Comm) prepareWindows(ctx context.Context, op string) error {
	w := window{bytes: tunedBytes(tunedSizes - 1)}
	var err error
	w.addr, err = c.rt.AllocateMapping(w.bytes)
	if agreed := c.agree(ctx, op, w.bytes, err != nil); err == nil {
		err = agreed
	}
	if err != nil {
		return errors.Join(err, c.rt.Deallocate(w.addr))
	}
	handle, err := c.splitControl(ctx)
	if err != nil {
		return errors.Join(c.breakDown(op, err), c.rt.Deallocate(w.addr))
	}
	c.windows.handle.Store(handle)
	if c.gone.Load() { // another goroutine broke the communicator meanwhile
		c.inBackground("ncclCommAbort", c.windows.handle.Swap(0), c.lib.abort)
		return errors.Join(c.usable(op), c.rt.Deallocate(w.addr))
	}
	if w.native, err = c.register(ctx, op, w.addr, w.bytes); err == nil {
		err = errors.Join(c.tune(ctx, op, w.addr), c.deregister(ctx, w))
	}
	return errors.Join(err, c.rt.Deallocate(w.addr))
}

// FreeSymmetric implements [comm.SymmetricAllocator]. On a broken communicator,
// whose windows are gone with it, it only gives the memory back.
func (c *Comm) FreeSymmetric(ctx context.Context, buf uintptr) error {
	const op = "free symmetric"
	if buf == 0 {
		return nil
	}
	if c.closed.Load() {
		return c.Fail(op, comm.ErrClosed)
	}
	c.mu.Lock()
	w, known := c.windows.remove(buf)
	c.mu.Unlock()
	if !known {
		return c.Fail(op, fmt.Errorf("%w: %#x is not from AllocateSymmetric of this communicator", comm.ErrArgument, buf))
	}
	if err := errors.Join(c.deregister(ctx, w), c.rt.Deallocate(buf)); err != nil {
		return c.Fail(op, err)
	}
	return nil
}

// deregister ends a window, after all ranks are done with it.
func (c *Comm) deregister(ctx context.Context, w window) error {
	if c.broken.Load() != nil {
		return nil
	}
	if err := c.Barrier(ctx); err != nil || w.native == 0 {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	handle := c.windows.handle.Load()
	return c.rt.Current(func() error {
		return c.status("ncclCommWindowDeregister", handle, c.lib.sym.WindowDeregister.Int(handle, w.native))
	})
}
