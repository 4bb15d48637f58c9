// Package nccl is the [comm.Communicator] of NVIDIA GPUs, on NCCL 2.18 or newer.
//
// The library is opened when the first communicator is made, never linked. Each
// communicator has a stream of its own on its runtime's device and submits
// there; [comm.StreamSyncOps] orders it against other streams, as package
// distributed does with the runtime's compute stream.
//
// NCCL matches messages between two ranks by order alone, so tags are ignored.
// A send or receive outside a Group holds up what its rank submits later until
// the peer's side is there.
package nccl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	goruntime "runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// closeTimeout bounds how long Close waits for pending work.
const closeTimeout = 10 * time.Second

// Comm is one rank's handle on a group of GPUs.
type Comm struct {
	comm.Check
	lib *library
	rt  *cuda.Runtime
	options
	stream *cuda.Stream
	dummy  uintptr // the element that Barrier reduces, and a byte per rank

	// There are two native communicators (ncclComm_t) of the same ranks.
	//
	// control is in NCCL's non-blocking mode, in which a deadline can end what
	// takes all ranks: creation, split, shrink. It carries no data, so a peer
	// that dies leaves nothing unfinished on it and Shrink finds it intact.
	//
	// handle, made out of control, carries the data. It is in blocking mode:
	// NCCL starts a thread for every call on a non-blocking one, which takes
	// 100 µs, and cannot be captured in a graph.
	controlMu sync.Mutex
	control   uintptr
	handle    uintptr

	group comm.Grouping

	mu      sync.Mutex // NCCL allows one call at a time on a communicator
	grouped messages   // submitted in the open group
	pending messages   // what one submission outside it consists of

	broken atomic.Pointer[error]
	gone   atomic.Bool // the native communicator is being freed
	closed atomic.Bool
}

var (
	_ comm.Communicator  = (*Comm)(nil)
	_ comm.StreamSyncOps = (*Comm)(nil)
	_ comm.Reacher       = (*Comm)(nil)
)

// call is one native call, ready to be made.
type call struct {
	name string
	fn   dl.Func
	args [8]uintptr
}

// newComm completes a communicator around its control communicator, which it
// takes over.
func newComm(ctx context.Context, lib *library, rt *cuda.Runtime, control uintptr, o options) (*Comm, error) {
	c := &Comm{lib: lib, rt: rt, control: control, options: o}
	c.Backend = "nccl"
	c.Check.Rank = int(int32(lib.out(func(p uintptr) { lib.sym.UserRank.Call(control, p) })))
	c.Check.WorldSize = int(int32(lib.out(func(p uintptr) { lib.sym.Count.Call(control, p) })))
	c.Supports = c.supports
	c.pending.c, c.grouped.c = c, c
	if err := c.init(ctx); err != nil {
		return nil, errors.Join(c.Fail("init", err), c.Close())
	}
	return c, nil
}

// init acquires what Close gives back.
func (c *Comm) init(ctx context.Context) error {
	_, greatest, err := c.rt.StreamPriorities()
	if err != nil {
		return err
	}
	if c.stream, err = c.rt.NewStream(greatest); err != nil {
		return err
	}
	if c.dummy, err = c.rt.Allocate(dummyBytes + c.WorldSize()); err != nil {
		return err
	}
	cfg := c.options.config(true)
	c.handle, err = c.lib.create(ctx, c.rt, c.control, "ncclCommSplit", func(cell uintptr) uintptr {
		return c.lib.sym.Split.Call(c.control, 0, uintptr(c.Rank()), cell, hostmem.AddrOf(cfg))
	})
	goruntime.KeepAlive(cfg)
	if err != nil {
		return err
	}
	return c.connect(ctx)
}

// connect runs first operations. NCCL connects ranks in them: such a call needs
// the peers before it returns, whatever the deadline, and allocates memory, for
// which the driver may wait for kernels of other communicators. Here all ranks
// are together anyway, and an abort from outside enforces the deadline.
func (c *Comm) connect(ctx context.Context) error {
	done := make(chan error, 1)
	go func() {
		err := c.together("init", func(m *messages) {
			for r := range c.WorldSize() {
				m.send(c.dummy, 1, r)
				m.recv(c.dummy+uintptr(dummyBytes+r), 1, r)
			}
		})
		done <- errors.Join(err, c.Barrier(ctx))
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		c.abort()
		return comm.ContextError(ctx)
	}
}

// dummyBytes is the size of the element that Barrier reduces.
const dummyBytes = 4

// Rank implements [comm.Communicator].
func (c *Comm) Rank() int { return c.Check.Rank }

// WorldSize implements [comm.Communicator].
func (c *Comm) WorldSize() int { return c.Check.WorldSize }

// Runtime is the GPU whose memory this communicator reads and writes.
func (c *Comm) Runtime() *cuda.Runtime { return c.rt }

// CheckDevice implements [comm.Reacher].
func (c *Comm) CheckDevice(d runtime.Device) error {
	if d != c.rt.Device() {
		return fmt.Errorf("%w: this nccl communicator reaches memory of %v, not of %v; host memory goes through comm/local or comm/mpi, or is copied to the GPU first",
			comm.ErrDevice, c.rt.Device(), d)
	}
	return nil
}

// supports says which reductions NCCL has.
func (c *Comm) supports(dt dtype.DType, op comm.ReduceOp) error {
	if typeTable[dt] == unsupported {
		return fmt.Errorf("%w: NCCL does not reduce %v", comm.ErrUnsupported, dt)
	}
	if dt == dtype.FP8E4M3 || dt == dtype.FP8E5M2 {
		if c.lib.version < fp8Version {
			return fmt.Errorf("%w: NCCL %s does not reduce %v, 2.24 does", comm.ErrUnsupported, versionText(c.lib.version), dt)
		}
		if c.rt.Info().Major < 9 {
			return fmt.Errorf("%w: NCCL reduces %v on GPUs of compute capability 9.0 or newer, this one has %d.%d",
				comm.ErrUnsupported, dt, c.rt.Info().Major, c.rt.Info().Minor)
		}
		if op == comm.Avg {
			// NCCL multiplies by 1/P in the type itself, and builds for
			// several architectures refuse it; Sum and Scale do better.
			return fmt.Errorf("%w: NCCL does not average %v", comm.ErrUnsupported, dt)
		}
	}
	return nil
}

// nativeOp returns the ncclRedOp_t of a reduction. The average of one rank is
// its sum: NCCL has a kernel of its own for averages of one rank, which in
// 2.28.3 leaves the last elements of some lengths unwritten.
func (c *Comm) nativeOp(op comm.ReduceOp) uintptr {
	if c.WorldSize() == 1 && op == comm.Avg {
		op = comm.Sum
	}
	return opTable[op]
}

// AllReduce implements [comm.Communicator].
func (c *Comm) AllReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	if err := c.Check.AllReduce(send, recv, count, dt, op); err != nil {
		return c.group.Refuse(err)
	}
	return c.submit("allreduce", count, call{"ncclAllReduce", c.lib.sym.AllReduce,
		[8]uintptr{send, recv, uintptr(count), uintptr(typeTable[dt]), c.nativeOp(op), c.handle, c.stream.Handle()}})
}

// Broadcast implements [comm.Communicator].
func (c *Comm) Broadcast(buf uintptr, count int, dt dtype.DType, root int) error {
	if err := c.Check.Broadcast(buf, count, dt, root); err != nil {
		return c.group.Refuse(err)
	}
	return c.submit("broadcast", count, call{"ncclBroadcast", c.lib.sym.Broadcast,
		[8]uintptr{buf, buf, uintptr(count * dt.Size()), nativeByte, uintptr(root), c.handle, c.stream.Handle()}})
}

// Reduce implements [comm.Communicator].
func (c *Comm) Reduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp, root int) error {
	if err := c.Check.Reduce(send, recv, count, dt, op, root); err != nil {
		return c.group.Refuse(err)
	}
	return c.submit("reduce", count, call{"ncclReduce", c.lib.sym.Reduce,
		[8]uintptr{send, recv, uintptr(count), uintptr(typeTable[dt]), c.nativeOp(op), uintptr(root), c.handle, c.stream.Handle()}})
}

// AllGather implements [comm.Communicator].
func (c *Comm) AllGather(send, recv uintptr, count int, dt dtype.DType) error {
	if err := c.Check.AllGather(send, recv, count, dt); err != nil {
		return c.group.Refuse(err)
	}
	return c.submit("allgather", count, call{"ncclAllGather", c.lib.sym.AllGather,
		[8]uintptr{send, recv, uintptr(count * dt.Size()), nativeByte, c.handle, c.stream.Handle()}})
}

// ReduceScatter implements [comm.Communicator].
func (c *Comm) ReduceScatter(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	if err := c.Check.ReduceScatter(send, recv, count, dt, op); err != nil {
		return c.group.Refuse(err)
	}
	return c.submit("reducescatter", count, call{"ncclReduceScatter", c.lib.sym.ReduceScatter,
		[8]uintptr{send, recv, uintptr(count), uintptr(typeTable[dt]), c.nativeOp(op), c.handle, c.stream.Handle()}})
}

// AllToAll implements [comm.Communicator].
func (c *Comm) AllToAll(send, recv uintptr, count int, dt dtype.DType) error {
	if err := c.Check.AllToAll(send, recv, count, dt); err != nil {
		return c.group.Refuse(err)
	}
	bytes := count * dt.Size()
	if c.lib.sym.AllToAll != 0 {
		return c.submit("alltoall", count, call{"ncclAlltoAll", c.lib.sym.AllToAll,
			[8]uintptr{send, recv, uintptr(bytes), nativeByte, c.handle, c.stream.Handle()}})
	}
	return c.together("alltoall", func(m *messages) {
		for r := range c.WorldSize() {
			m.send(send+uintptr(r*bytes), bytes, r)
			m.recv(recv+uintptr(r*bytes), bytes, r)
		}
	})
}

// AllGatherV implements [comm.Communicator].
func (c *Comm) AllGatherV(send, recv uintptr, counts, displs []int, dt dtype.DType) error {
	if err := c.Check.AllGatherV(send, recv, counts, displs, dt); err != nil {
		return c.group.Refuse(err)
	}
	size := dt.Size()
	return c.together("allgatherv", func(m *messages) {
		for r := range c.WorldSize() {
			to := recv + uintptr(displs[r]*size)
			if r == c.Rank() && to == send {
				continue // in place
			}
			m.send(send, counts[c.Rank()]*size, r)
			m.recv(to, counts[r]*size, r)
		}
	})
}

// AllToAllV implements [comm.Communicator].
func (c *Comm) AllToAllV(send uintptr, sendCounts, sendDispls []int, recv uintptr, recvCounts, recvDispls []int, dt dtype.DType) error {
	if err := c.Check.AllToAllV(send, sendCounts, sendDispls, recv, recvCounts, recvDispls, dt); err != nil {
		return c.group.Refuse(err)
	}
	size := dt.Size()
	return c.together("alltoallv", func(m *messages) {
		for r := range c.WorldSize() {
			m.send(send+uintptr(sendDispls[r]*size), sendCounts[r]*size, r)
			m.recv(recv+uintptr(recvDispls[r]*size), recvCounts[r]*size, r)
		}
	})
}

// Gather implements [comm.Communicator].
func (c *Comm) Gather(send, recv uintptr, count int, dt dtype.DType, root int) error {
	if err := c.Check.Gather(send, recv, count, dt, root); err != nil {
		return c.group.Refuse(err)
	}
	bytes := count * dt.Size()
	if c.lib.sym.Gather != 0 {
		return c.submit("gather", count, call{"ncclGather", c.lib.sym.Gather,
			[8]uintptr{send, recv, uintptr(bytes), nativeByte, uintptr(root), c.handle, c.stream.Handle()}})
	}
	return c.together("gather", func(m *messages) {
		if c.Rank() != root {
			m.send(send, bytes, root)
			return
		}
		m.fromAll(recv, bytes, send)
	})
}

// fromAll adds what a gather's root does.
func (m *messages) fromAll(recv uintptr, bytes int, own uintptr) {
	for r := range m.c.WorldSize() {
		to := recv + uintptr(r*bytes)
		if r == m.c.Rank() {
			if to == own {
				continue // in place
			}
			m.send(own, bytes, r)
		}
		m.recv(to, bytes, r)
	}
}

// Scatter implements [comm.Communicator].
func (c *Comm) Scatter(send, recv uintptr, count int, dt dtype.DType, root int) error {
	if err := c.Check.Scatter(send, recv, count, dt, root); err != nil {
		return c.group.Refuse(err)
	}
	bytes := count * dt.Size()
	if c.lib.sym.Scatter != 0 {
		return c.submit("scatter", count, call{"ncclScatter", c.lib.sym.Scatter,
			[8]uintptr{send, recv, uintptr(bytes), nativeByte, uintptr(root), c.handle, c.stream.Handle()}})
	}
	return c.together("scatter", func(m *messages) {
		if c.Rank() != root {
			m.recv(recv, bytes, root)
			return
		}
		m.toAll(send, bytes, recv)
	})
}

// toAll adds what a scatter's root does.
func (m *messages) toAll(send uintptr, bytes int, own uintptr) {
	for r := range m.c.WorldSize() {
		from := send + uintptr(r*bytes)
		if r == m.c.Rank() {
			if from == own {
				continue // in place
			}
			m.recv(own, bytes, r)
		}
		m.send(from, bytes, r)
	}
}

// Send implements [comm.Communicator]; the tag is ignored.
func (c *Comm) Send(buf uintptr, count int, dt dtype.DType, dest int, _ uint32) error {
	if err := c.Check.Send(buf, count, dt, dest); err != nil {
		return c.group.Refuse(err)
	}
	return c.together("send", func(m *messages) { m.send(buf, count*dt.Size(), dest) })
}

// Recv implements [comm.Communicator]; the tag is ignored. NCCL does not tell
// when the message has another length.
func (c *Comm) Recv(buf uintptr, count int, dt dtype.DType, src int, _ uint32) error {
	if err := c.Check.Recv(buf, count, dt, src); err != nil {
		return c.group.Refuse(err)
	}
	return c.together("recv", func(m *messages) { m.recv(buf, count*dt.Size(), src) })
}

// messages collects native calls. Sends and receives of nothing are left out,
// on both sides.
type messages struct {
	c     *Comm
	calls []call
}

func (m *messages) send(buf uintptr, bytes, dest int) {
	m.add("ncclSend", m.c.lib.sym.Send, buf, bytes, dest)
}

func (m *messages) recv(buf uintptr, bytes, src int) {
	m.add("ncclRecv", m.c.lib.sym.Recv, buf, bytes, src)
}

func (m *messages) add(name string, fn dl.Func, buf uintptr, bytes, peer int) {
	if bytes > 0 {
		m.calls = append(m.calls, call{name, fn,
			[8]uintptr{buf, uintptr(bytes), nativeByte, uintptr(peer), m.c.handle, m.c.stream.Handle()}})
	}
}

// submit makes one native call, now or when the open group ends. A call that
// moves nothing is left out, on every rank.
func (c *Comm) submit(op string, count int, native call) error {
	return c.together(op, func(m *messages) {
		if count > 0 {
			m.calls = append(m.calls, native)
		}
	})
}

// together makes the native calls that add appends as one NCCL group, or adds
// them to the group that this goroutine has open.
func (c *Comm) together(op string, add func(m *messages)) error {
	inside := c.group.Enter()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.usable(op); err != nil {
		return c.group.Refuse(err)
	}
	if inside {
		add(&c.grouped)
		return nil
	}
	add(&c.pending)
	return c.flush(op, &c.pending)
}

// Group implements [comm.Communicator].
func (c *Comm) Group(submit func() error) error {
	if err := c.usable("group"); err != nil {
		return err
	}
	return c.group.Run(submit, func(err error) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if err != nil {
			c.grouped.calls = c.grouped.calls[:0]
			return nil
		}
		return c.flush("group", &c.grouped)
	})
}

// flush makes native calls, several of them as one NCCL group, and empties the
// list.
func (c *Comm) flush(op string, m *messages) error {
	calls := m.calls
	m.calls = calls[:0]
	if len(calls) == 0 {
		return nil
	}
	if err := c.usable(op); err != nil {
		return err
	}
	// NCCL's groups belong to the OS thread; Current keeps the goroutine on it.
	err := c.rt.Current(func() error {
		if len(calls) == 1 {
			return c.native(&calls[0])
		}
		c.lib.sym.GroupStart.Call()
		var first error
		for i := range calls {
			if first = c.native(&calls[i]); first != nil {
				break
			}
		}
		return errors.Join(first, c.status("ncclGroupEnd", c.lib.sym.GroupEnd.Call()))
	})
	if err != nil {
		return c.breakDown(op, err)
	}
	return nil
}

func (c *Comm) native(n *call) error {
	a := &n.args
	return c.status(n.name, n.fn.Call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]))
}

// status turns the result of a call into an error.
func (c *Comm) status(name string, result uintptr) error {
	if s := Status(int32(result)); s != statusSuccess {
		return c.lib.newError(name, s, c.handle)
	}
	return nil
}

func (l *library) asyncError(handle uintptr) Status {
	return Status(int32(l.out(func(p uintptr) { l.sym.GetAsyncError.Call(handle, p) })))
}

// asyncErrorEvery is how many looks at the stream Sync takes for one at NCCL's
// own state, which costs more and changes rarely.
const asyncErrorEvery = 16

// Sync implements [comm.Communicator]. It watches NCCL's asynchronous error
// state; when that, or ctx, ends the wait, the communicator is aborted.
func (c *Comm) Sync(ctx context.Context) error { return c.sync(ctx, "sync") }

func (c *Comm) sync(ctx context.Context, op string) error {
	if err := c.waitable(op); err != nil {
		return err
	}
	looks := 0
	err := poll.Until(ctx, func() (bool, error) {
		if looks%asyncErrorEvery == 0 {
			if s := c.lib.asyncError(c.handle); s != statusSuccess {
				return false, c.lib.newError("ncclCommGetAsyncError", s, c.handle)
			}
		}
		looks++
		return c.stream.Done()
	})
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return c.breakDown(op, comm.ContextError(ctx))
	}
	return c.breakDown(op, err)
}

// Barrier implements [comm.Communicator]: an allreduce of one element, because
// NCCL returns at once for none.
func (c *Comm) Barrier(ctx context.Context) error {
	if err := c.waitable("barrier"); err != nil {
		return err
	}
	if err := c.submit("barrier", 1, call{"ncclAllReduce", c.lib.sym.AllReduce,
		[8]uintptr{c.dummy, c.dummy, 1, uintptr(typeTable[dtype.I32]), opTable[comm.Max], c.handle, c.stream.Handle()}}); err != nil {
		return err
	}
	return c.sync(ctx, "barrier")
}

// waitable reports why the caller cannot wait now.
func (c *Comm) waitable(op string) error {
	if err := c.group.Outside(); err != nil {
		return c.group.Refuse(c.Fail(op, err))
	}
	return c.usable(op)
}

// usable reports why nothing can be submitted any more.
func (c *Comm) usable(op string) error {
	if c.closed.Load() {
		return c.Fail(op, comm.ErrClosed)
	}
	if cause := c.broken.Load(); cause != nil {
		return c.Fail(op, fmt.Errorf("%w: %w", comm.ErrBroken, *cause))
	}
	return nil
}

// breakDown marks the communicator as broken and aborts its work, so that
// nothing waits for a peer that will not come. The control communicator lives
// on for Shrink.
func (c *Comm) breakDown(op string, cause error) error {
	if c.broken.CompareAndSwap(nil, &cause) {
		c.group.Free()
		c.abort()
	}
	return c.Fail(op, cause)
}

// abort ends the working communicator, once: kernels that wait for peers stop.
// It may be called while another goroutine is inside a call, which then fails.
func (c *Comm) abort() {
	if c.gone.CompareAndSwap(false, true) {
		c.inBackground("ncclCommAbort", func() Status { return Status(int32(c.lib.sym.Abort.Call(c.handle))) })
	}
}

// inBackground makes a call that frees the native communicator. The last rank
// of a process to do so frees the memory of all of them, on every GPU, and the
// driver lets that wait for the kernels there. These may be waiting for this
// very rank to join them in the next collective of another communicator, so
// the rank must not wait for the call.
func (c *Comm) inBackground(name string, free func() Status) {
	c.rt.Background(func() {
		err := c.rt.Current(func() error {
			// Afterwards the handle may not be asked for its state any more.
			if s := free(); s != statusSuccess && s != statusInProgress {
				return c.lib.newError(name, s, 0)
			}
			return nil
		})
		if err != nil {
			slog.Error("nccl: communicator not freed", "rank", c.Rank(), "err", err)
		}
	})
}

// Close implements [comm.Communicator].
func (c *Comm) Close() error {
	if !c.closed.CompareAndSwap(false, true) {
		return nil
	}
	c.group.Free()
	if c.broken.Load() == nil && c.handle != 0 {
		c.finish()
	}
	c.controlMu.Lock()
	defer c.controlMu.Unlock()
	c.inBackground("ncclCommAbort", func() Status { return Status(int32(c.lib.sym.Abort.Call(c.control))) })
	var errs []error
	if c.dummy != 0 {
		errs = append(errs, c.rt.Deallocate(c.dummy))
	}
	if c.stream != nil {
		errs = append(errs, c.stream.Close())
	}
	if err := errors.Join(errs...); err != nil {
		return c.Fail("close", err)
	}
	return nil
}

// finish gives pending work a bounded time, and frees the working
// communicator.
func (c *Comm) finish() {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if err := c.stream.Synchronize(ctx); err != nil {
		slog.Error("nccl: closed with work pending", "rank", c.Rank(), "err", err)
		c.abort()
		return
	}
	if c.gone.CompareAndSwap(false, true) {
		c.inBackground("ncclCommDestroy", func() Status {
			if s := Status(int32(c.lib.sym.Finalize.Call(c.handle))); s != statusSuccess {
				return s
			}
			return Status(int32(c.lib.sym.Destroy.Call(c.handle)))
		})
	}
}
