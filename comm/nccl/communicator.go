package nccl

import (
	"context"
	"errors"
	"fmt"
	"os"
	goruntime "runtime"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/internal/marks"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Comm is one rank's handle on a group of GPUs.
//
// Sync and Barrier watch NCCL's asynchronous error state; when that, or their
// context, ends the wait, the communicator is aborted, and buffers are the
// caller's again when they return. That does not reach kernels on symmetric
// buffers, see [Comm.AllocateSymmetric]. Split's colors and keys must fit in 32 bits.
//
// The abort on one rank ends kernels of the others with wrong results, of which NCCL
// tells them nothing. So a rank that gives up lets the others know first
// ([rendezvous.Reports]), and their Sync and Barrier are [comm.ErrPeerFailed], with the
// cause. Graphs are not looked into: with some ([cuda.Stream.Capture]), that holds for
// whatever was done before as well. The end of rank 0's process, through which they learn
// it, is a failure of what that has not closed. They do not learn it where they have no
// connection to rank 0, for which creation waits a second at most, or have it no more, as
// parts without rank 0; and of replays of graphs that others captured, on a stream of
// [Comm.UseStream].
type Comm struct {
	calls
	check backend.Check
	lib   *library
	rt    *cuda.Runtime
	options
	own    *cuda.Stream
	looks  sync.RWMutex // held by who asks or orders stream, to change it, and to close own
	stream *cuda.Stream // where calls are submitted: own, or one from UseStream
	mark   mark
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
	control control
	data    *native

	mu        sync.Mutex // NCCL allows one call at a time on a communicator
	plan      plan       // the submission that is being made
	submitted *submissions
	windows   windows
	marks     marks.Marks

	state
	parent    *Comm // nil if it was not made out of another
	splits    atomic.Int64
	shrinks   shrinks
	children  children
	leakAlarm goruntime.Cleanup
}

// calls keeps the field of [backend.Calls] to this package.
type calls = backend.Calls

var (
	_ comm.Communicator       = (*Comm)(nil)
	_ comm.StreamSyncOps      = (*Comm)(nil)
	_ comm.StreamOrder        = (*Comm)(nil)
	_ comm.Reacher            = (*Comm)(nil)
	_ comm.SymmetricAllocator = (*Comm)(nil)
	_ comm.Progresser         = (*Comm)(nil)
)

// newComm completes a communicator around its control communicator, which it
// takes over.
func newComm(ctx context.Context, control *native, o options) (*Comm, error) {
	lib, rt, handle := control.lib, control.rt, control.handle
	c := &Comm{lib: lib, rt: rt, options: o, submitted: &submissions{group: o.name}}
	c.life, c.end = context.WithCancel(context.Background())
	c.check = backend.Check{
		Backend:   "nccl",
		Rank:      int(int32(lib.out(func(p uintptr) { lib.sym.UserRank.Call(handle, p) }))),
		WorldSize: int(int32(lib.out(func(p uintptr) { lib.sym.Count.Call(handle, p) }))),
		Supports:  c.supports,
	}
	c.submitted.rank, c.submitted.size = c.check.Rank, c.check.WorldSize
	c.calls = backend.NewCalls(&c.check, door{c})
	c.control.native = control
	name, reporter, submitted := fmt.Sprintf("rank %d of %d on %v", c.Rank(), c.WorldSize(), rt.Device()), c.reporter, c.submitted
	c.leakAlarm = goruntime.AddCleanup(c, func(name string) { leaked(name, reporter, submitted) }, name)
	if c.reporter != nil {
		c.reporter.add(c.submitted)
	}
	if err := c.init(ctx); err != nil {
		return nil, errors.Join(c.explain("init", err), c.Close())
	}
	c.submitted.forget() // what users submit counts
	return c, nil
}

// sharesProcess reports whether other ranks are in this process and have mappings of their
// own of this one's memory. Without cuMem they use the very memory that it gives up.
func (o options) sharesProcess(size int) bool {
	return o.oneProcess && size > 1 && os.Getenv("NCCL_CUMEM_ENABLE") != "0"
}

// explain wraps the error of an operation, if there is one.
func (c *Comm) explain(op string, err error) error {
	if err == nil {
		return nil
	}
	return c.check.Fail(op, err)
}

// What lies where in scratch, in bytes.
const (
	barrierOffset = 0                       // the int32 that Barrier reduces
	voteOffset    = 8                       // what maximum reduces
	maxVotes      = 2 * tunedSizes          // of int64
	helloOffset   = voteOffset + 8*maxVotes // a byte per rank, received in connect
)

// Runtime is the GPU whose memory this communicator reads and writes.
func (c *Comm) Runtime() *cuda.Runtime { return c.rt }

// CheckDevice implements [comm.Reacher].
func (c *Comm) CheckDevice(d runtime.Device) error {
	if d != c.rt.Device() {
		return c.check.Unreachable(d, fmt.Sprintf("this communicator reaches that of %v; host memory goes through comm/local or comm/mpi, or is copied to the GPU first",
			c.rt.Device()))
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
