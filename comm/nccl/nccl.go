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
	goruntime "runtime"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Comm is one rank's handle on a group of GPUs.
type Comm struct {
	comm.Check
	lib *library
	rt  *cuda.Runtime
	options
	own    *cuda.Stream
	stream *cuda.Stream // where calls are submitted: own, or one from UseStream
	// scratch is device memory of the communicator's own; the constants below
	// say what lies where.
	scratch uintptr

	// There are two native communicators (ncclComm_t) of the same ranks, and a
	// third for windows as soon as there are some.
	//
	// control is in NCCL's non-blocking mode, in which a deadline can end what
	// takes all ranks: creation, split, shrink. It carries no data, so a peer
	// that dies leaves nothing unfinished on it and Shrink finds it intact.
	//
	// data, made out of control, carries the data. It is in blocking mode:
	// NCCL starts a thread for every call on a non-blocking one, which takes
	// 100 µs, and cannot be captured in a graph.
	controlMu    sync.Mutex
	control      *native
	controlError error // what left control in the middle of a call
	data         *native

	group comm.Grouping

	mu      sync.Mutex // NCCL allows one call at a time on a communicator
	grouped messages   // submitted in the open group
	pending messages   // what one submission outside it consists of
	windows windows

	life    context.Context // ends when Close is called
	endLife context.CancelFunc
	broken  atomic.Pointer[error]
	drained chan struct{} // closed when a broken communicator's kernels have ended
	stuck   atomic.Bool   // or would not end
	closed  atomic.Bool

	leakAlarm goruntime.Cleanup
}

var (
	_ comm.Communicator  = (*Comm)(nil)
	_ comm.StreamSyncOps = (*Comm)(nil)
	_ comm.Reacher       = (*Comm)(nil)
)

// newComm completes a communicator around its control communicator, which it
// takes over.
func newComm(ctx context.Context, lib *library, rt *cuda.Runtime, control uintptr, o options) (*Comm, error) {
	c := &Comm{lib: lib, rt: rt, control: &native{lib: lib, rt: rt, handle: control}, options: o, drained: make(chan struct{})}
	c.life, c.endLife = context.WithCancel(context.Background())
	c.Backend = "nccl"
	c.Check.Rank = int(int32(lib.out(func(p uintptr) { lib.sym.UserRank.Call(control, p) })))
	c.Check.WorldSize = int(int32(lib.out(func(p uintptr) { lib.sym.Count.Call(control, p) })))
	c.Supports = c.supports
	c.pending.c, c.grouped.c = c, c
	c.leakAlarm = goruntime.AddCleanup(c, leaked, fmt.Sprintf("rank %d of %d on %v", c.Rank(), c.WorldSize(), rt.Device()))
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
	if c.own, err = c.rt.NewStream(greatest); err != nil {
		return err
	}
	c.stream = c.own
	if c.scratch, err = c.rt.Allocate(helloOffset + c.WorldSize()); err != nil {
		return err
	}
	if c.data, err = c.splitControl(ctx); err != nil {
		return err
	}
	return c.connect(ctx)
}

// splitControl makes a native communicator in blocking mode of all ranks.
func (c *Comm) splitControl(ctx context.Context) (*native, error) {
	handle, err := c.fromControl(ctx, true, "ncclCommSplit", func(cell, cfg uintptr) uintptr {
		return c.lib.sym.Split.Call(c.control.handle, 0, uintptr(c.Rank()), cell, cfg)
	})
	if err != nil {
		return nil, err
	}
	return &native{lib: c.lib, rt: c.rt, handle: handle}, nil
}

// fromControl makes a native communicator out of control. A call that does not
// end leaves control in the middle of it, of no use for another.
func (c *Comm) fromControl(ctx context.Context, blocking bool, name string, call func(cell, cfg uintptr) uintptr) (handle uintptr, err error) {
	ctx, cancel := c.untilClosed(ctx)
	defer cancel()
	c.controlMu.Lock()
	defer c.controlMu.Unlock()
	switch {
	case c.life.Err() != nil:
		return 0, comm.ErrClosed
	case c.controlError != nil:
		return 0, fmt.Errorf("%w: the communicator cannot make others since one of them failed: %w", comm.ErrBroken, c.controlError)
	}
	cfg := c.options.config(blocking)
	handle, err = c.lib.create(ctx, c.rt, c.control.handle, name, func(cell uintptr) uintptr {
		return call(cell, hostmem.AddrOf(cfg))
	})
	goruntime.KeepAlive(cfg)
	c.controlError = err
	return handle, err
}

// connect runs first operations. NCCL connects ranks in them, for each pair and
// for each of its algorithms: such a call needs the peers before it returns,
// whatever the deadline, and allocates memory, for which the driver may wait for
// kernels of other communicators. Here all ranks are together anyway, and an
// abort from outside enforces the deadline.
func (c *Comm) connect(ctx context.Context) error {
	// Earlier owners of scratch may have work pending.
	if err := c.own.WaitFor(c.rt.Stream()); err != nil {
		return err
	}
	err := c.guarded(ctx, func() error {
		err := c.together("init", func(m *messages) {
			for r := range c.WorldSize() {
				m.send(c.scratch, 1, r)
				m.recv(c.scratch+uintptr(helloOffset+r), 1, r)
			}
		})
		return errors.Join(err, c.Barrier(ctx))
	})
	if err != nil {
		return c.breakDown("init", err)
	}
	if c.oneProcess {
		return nil // a rank does not die alone, and there would be more to free
	}
	return c.connectAlgorithms(ctx)
}

// connectAlgorithms runs what makes NCCL connect all its algorithms.
func (c *Comm) connectAlgorithms(ctx context.Context) error {
	buf, err := c.rt.AllocateMapping(connectBytes[len(connectBytes)-1])
	if err != nil {
		return err
	}
	if err := c.own.WaitFor(c.rt.Stream()); err != nil {
		return errors.Join(err, c.rt.Deallocate(buf))
	}
	err = c.guarded(ctx, func() error {
		var err error
		for _, bytes := range connectBytes {
			part := bytes / c.WorldSize() / dtype.F32.Size() * dtype.F32.Size()
			own := buf + uintptr(c.Rank()*part)
			for _, n := range []call{
				c.allReduce(buf, buf, bytes/dtype.F32.Size(), dtype.F32, comm.Sum),
				c.reduceScatter(buf, own, part/dtype.F32.Size(), dtype.F32, comm.Sum),
				c.allGather(own, buf, part),
				c.broadcast(buf, bytes, 0),
				c.reduce(buf, buf, bytes/dtype.F32.Size(), dtype.F32, comm.Sum, 0),
			} {
				if err == nil {
					err = c.submit("init", part, n)
				}
			}
		}
		return errors.Join(err, c.Barrier(ctx))
	})
	if err != nil {
		err = c.breakDown("init", err) // nothing of this rank writes to the buffer any more
	}
	return errors.Join(err, c.freeWindow(window{addr: buf}))
}

// connectBytes are sizes for which NCCL chooses different algorithms.
var connectBytes = []int{256, 256 << 10, 32 << 20}

// guarded runs native calls that do not return before the peers made theirs,
// and ends them by an abort from outside when ctx ends first, or Close is called.
func (c *Comm) guarded(ctx context.Context, calls func() error) error {
	ctx, cancel := c.untilClosed(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- calls() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		c.abort()
		return comm.ContextError(ctx)
	}
}

// What lies where in scratch, in bytes.
const (
	barrierOffset = 0                       // the int32 that Barrier reduces
	voteOffset    = 8                       // what maximum reduces
	maxVotes      = 2 * tunedSizes          // of int64
	helloOffset   = voteOffset + 8*maxVotes // a byte per rank, received in connect
)

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
