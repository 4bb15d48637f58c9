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
// the native communicator.
type windows struct {
	native atomic.Pointer[native] // nil before the first buffer
	list   []window
	faster [windowKinds][tunedSizes]bool // than without windows
}

// window is a symmetric buffer.
type window struct {
	addr   uintptr
	bytes  int
	handle uintptr // ncclWindow_t, 0 for plain memory
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

// serve reports whether a call is to be made with windows. All ranks have to
// come to the same answer, so it depends on nothing that differs between them,
// such as the address of a rank's own part of a buffer.
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
	return i >= 0 && w.list[i].handle != 0 && addr+uintptr(bytes) <= w.list[i].addr+uintptr(w.list[i].bytes)
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
// measurements for some tenths of a second, on float32. At other sizes they are
// plain memory.
//
// NCCL cannot end kernels on windows whose peer died: Sync then returns at its
// deadline as always, but its error says that the GPU still waits, and only a
// new process can use it again.
func (c *Comm) AllocateSymmetric(ctx context.Context, bytes int) (uintptr, error) {
	const op = "allocate symmetric"
	if err := c.waitable(op); err != nil {
		return 0, err
	}
	if bytes < 0 {
		return 0, c.Fail(op, fmt.Errorf("%w: %d bytes", comm.ErrArgument, bytes))
	}
	w, err := c.newWindow(ctx, op, bytes, c.prepareWindows)
	if err != nil {
		return 0, c.Fail(op, err)
	}
	if w.addr != 0 {
		c.mu.Lock()
		c.windows.add(w)
		c.mu.Unlock()
	}
	return w.addr, nil
}

// newWindow allocates memory on all ranks and registers it, after prepare.
func (c *Comm) newWindow(ctx context.Context, op string, bytes int, prepare func(ctx context.Context, op string) error) (window, error) {
	addr, err := c.rt.AllocateMapping(bytes)
	if agreed := c.agree(ctx, op, bytes, err != nil); err == nil {
		err = agreed
	}
	w := window{addr: addr, bytes: bytes}
	if err == nil && bytes > 0 && c.lib.sym.WindowRegister.Found() && c.WorldSize() > 1 {
		if err = prepare(ctx, op); err == nil {
			w.handle, err = c.register(ctx, op, w)
		}
	}
	if err != nil {
		return window{}, errors.Join(err, c.freeWindow(w))
	}
	return w, nil
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
	// Copies wait for the compute stream, which may wait for a peer; this wait
	// ends with ctx.
	if err := c.rt.Synchronize(ctx); err != nil {
		return err
	}
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
func (c *Comm) register(ctx context.Context, op string, w window) (handle uintptr, err error) {
	on := c.windows.native.Load()
	cell := new(uint64) // NCCL writes here
	err = c.guarded(ctx, func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !on.enter() {
			return comm.ErrBroken
		}
		defer on.leave()
		return c.rt.Current(func() error {
			return c.status("ncclCommWindowRegister", on.handle,
				c.lib.sym.WindowRegister.Int(on.handle, w.addr, uintptr(w.bytes), hostmem.AddrOf(cell), windowSymmetric))
		})
	})
	if err != nil {
		c.lib.abandon(cell)
		return 0, c.breakDown(op, err)
	}
	return uintptr(*cell), nil
}

// prepareWindows makes the native communicator for windows, if there is none,
// and tunes it on a window of its own.
func (c *Comm) prepareWindows(ctx context.Context, op string) error {
	if c.windows.native.Load() != nil {
		return nil
	}
	w, err := c.newWindow(ctx, op, tunedBytes(tunedSizes-1), c.splitForWindows)
	if err != nil {
		return err
	}
	return errors.Join(c.tune(ctx, op, w.addr), c.deregister(ctx, w), c.freeWindow(w))
}

func (c *Comm) splitForWindows(ctx context.Context, op string) error {
	made, err := c.splitControl(ctx)
	if err != nil {
		return c.breakDown(op, err)
	}
	c.windows.native.Store(made)
	if c.broken.Load() != nil { // another goroutine broke the communicator meanwhile
		made.abort()
		return c.sound(op)
	}
	return nil
}

// FreeSymmetric implements [comm.SymmetricAllocator]. On a broken communicator,
// whose windows are gone with it, it only gives the memory back.
func (c *Comm) FreeSymmetric(ctx context.Context, buf uintptr) error {
	const op = "free symmetric"
	if buf == 0 {
		return nil
	}
	if err := c.group.Outside(); err != nil {
		return c.group.Refuse(c.Fail(op, err))
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
	if err := errors.Join(c.deregister(ctx, w), c.freeWindow(w)); err != nil {
		return c.Fail(op, err)
	}
	return nil
}

// deregister ends a window, after all ranks are done with it.
func (c *Comm) deregister(ctx context.Context, w window) error {
	if c.broken.Load() != nil {
		return nil
	}
	if err := c.Barrier(ctx); err != nil || w.handle == 0 {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	on := c.windows.native.Load()
	if !on.enter() {
		return nil
	}
	defer on.leave()
	return c.rt.Current(func() error {
		return c.status("ncclCommWindowDeregister", on.handle, c.lib.sym.WindowDeregister.Int(on.handle, w.handle))
	})
}
