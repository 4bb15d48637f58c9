package nccl

import (
	"cmp"
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
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/leak"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Comm is one rank's handle on a group of GPUs.
//
// Sync and Barrier watch NCCL's asynchronous error state. If an error or their context ends the wait, the communicator
// is aborted, and buffers belong to the caller again when they return. The abort does not reach kernels on symmetric
// buffers, see [Comm.AllocateSymmetric]. Other kernels in flight end one after the other: an abort takes up to 3 s
// plus 200 ms for each call, 30 s at most. Split's colors and keys must fit in 32 bits.
//
// When one rank aborts, kernels of the others end with wrong results, and NCCL reports no error there. A rank
// therefore tells its peers over the job's store before it aborts, and their waits return [comm.ErrPeerFailed] with the
// cause: Sync and Barrier, and also creation, Split and AllocateSymmetric, in which NCCL waits for all ranks. Replays
// of graphs are not counted: after a capture ([cuda.Stream.Capture]) Sync and Barrier return that error even if the
// peer's part was complete. Ranks learn of aborts through rank 0: if rank 0's process exits, its open communicators
// fail everywhere. Some ranks do not learn of an abort: a rank without a connection to rank 0 (creation waits 5 s at
// most for it), ranks of a sub-communicator without rank 0 after rank 0 has exited, and a rank that replays graphs that
// others captured on a stream of [Comm.UseStream].
type Comm struct {
	*backend.Base
	check backend.Check // of arguments; set when the communicator is made, never changed
	life  backend.Life  // locks itself
	lib   *library      // of the process
	rt    *cuda.Runtime // the rank's GPU
	options

	created  *cuda.Stream // made by init
	streamMu sync.RWMutex // held for reading to query or order stream, for writing to change it and to close created
	stream   *cuda.Stream // where calls are submitted: created, or one from UseStream; guarded by streamMu
	mark     mark         // orders streams; locks itself
	// scratch is device memory of the communicator, with the layout below.
	scratch uintptr

	// There are two native communicators (ncclComm_t) of the same ranks, and a third once there are windows.
	//
	// control is in NCCL's non-blocking mode, in which a deadline can end calls that need all ranks: creation, split
	// and shrink. It carries no data, so a peer that dies leaves nothing unfinished on it, and Shrink finds it intact.
	//
	// data, split from control, carries the data. It is in blocking mode: in non-blocking mode NCCL starts a thread
	// for each call, which takes 100 µs and cannot be captured in a graph.
	control control
	data    *native

	mu      sync.Mutex  // held during a call of a native communicator: NCCL allows one at a time
	plan    plan        // of the current submission; guarded by mu
	counts  bool        // calls are the user's: creation is complete; set before the communicator is returned
	windows windows     // guarded by mu, except the native communicator
	marks   marks.Marks // locks itself

	membership             // never changed
	told       sync.Once   // sets answers
	answers    string      // states of the other ranks; set by told
	stuck      atomic.Bool // kernels of this rank continue after the abort
	released   atomic.Bool // Release has begun

	splits    atomic.Int64      // calls of Split
	shrinks   shrinks           // calls of Shrink; locks itself
	leakAlarm goruntime.Cleanup // stopped by Close
}

var (
	_ comm.Communicator       = (*Comm)(nil)
	_ comm.StreamSyncOps      = (*Comm)(nil)
	_ comm.StreamOrder        = (*Comm)(nil)
	_ backend.MemoryChecker   = (*Comm)(nil)
	_ comm.SymmetricAllocator = (*Comm)(nil)
	_ backend.Progresser      = (*Comm)(nil)
)

// newComm makes a communicator around its control communicator and a membership, and takes ownership of both.
func newComm(ctx context.Context, control *native, m membership, o options) (*Comm, error) {
	rt := control.rt
	rank, size := control.place()
	c := &Comm{
		lib:        control.lib,
		rt:         rt,
		options:    o,
		membership: m,
	}
	c.life.Timeout = backend.DeviceTimeout
	c.check = backend.Check{
		Backend:   "nccl",
		Rank:      rank,
		WorldSize: size,
		Supports:  c.supports,
	}
	c.Base = backend.New(&c.check, &c.life, adapter{c})
	c.control.native = control
	group := c.group // not c.group: the cleanup would keep c alive
	mark := leak.NewMark("nccl", fmt.Sprintf("rank %d of %d on %v", c.Rank(), c.WorldSize(), rt.Device()))
	c.leakAlarm = goruntime.AddCleanup(c, func(mark *leak.Mark) { leaked(mark, group) }, mark)
	if err := c.init(ctx); err != nil {
		c.Abort(err)
		return nil, errors.Join(c.explain("init", err), c.Close())
	}
	c.counts = true
	return c, nil
}

// sharesProcess reports whether other ranks in this process map this rank's memory separately. Without cuMem they use
// the very memory that it frees.
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

// The layout of scratch, in bytes.
const (
	barrierOffset = 0                       // the int32 that Barrier reduces
	voteOffset    = 8                       // reduced by maximum
	maxVotes      = maxWindowRanks          // of int64
	helloOffset   = voteOffset + 8*maxVotes // a byte per rank, received in connect
)

// gatherOffset is the offset of two int64 for each rank, which gather collects.
func gatherOffset(ranks int) int { return helloOffset + (ranks+7)/8*8 }

// Runtime is the GPU whose memory this communicator reads and writes.
func (c *Comm) Runtime() *cuda.Runtime { return c.rt }

// FixedOrder implements [comm.FixedOrder]: NCCL's order of additions depends on the message's size, the version and
// the machine.
func (c *Comm) FixedOrder() bool { return false }

// RunName tells the flight records of this run from those of others. A process may have several worlds of its
// goroutines, so they have their own names. Ranks of several processes have the name that their launcher or their job
// gives them, and otherwise one of this world.
func (c *Comm) RunName() string {
	if c.oneProcess {
		return c.run
	}
	return cmp.Or(dump.RunName(os.Getenv), c.run)
}

// CheckDevice implements [backend.MemoryChecker].
func (c *Comm) CheckDevice(d runtime.Device) error {
	if d == c.rt.Device() {
		return nil
	}
	const advice = "host memory goes through comm/local or comm/mpi, or is copied to the GPU first"
	return c.check.Unreachable(d, fmt.Sprintf("this communicator reaches the memory of %v; %s", c.rt.Device(), advice))
}

// supports reports whether NCCL has a reduction.
func (c *Comm) supports(dt dtype.DType, op comm.ReduceOp) error {
	if typeTable[dt] == unsupported {
		return fmt.Errorf("%w: NCCL does not reduce %v", comm.ErrUnsupported, dt)
	}
	if dt == dtype.FP8E4M3 || dt == dtype.FP8E5M2 {
		return c.supportsFP8(dt, op)
	}
	return nil
}

// supportsFP8 is supports for types of eight bits.
func (c *Comm) supportsFP8(dt dtype.DType, op comm.ReduceOp) error {
	info := c.rt.Info()
	switch {
	case c.lib.version < fp8Version:
		version := versionText(c.lib.version)
		return fmt.Errorf("%w: NCCL %s does not reduce %v, 2.24 does", comm.ErrUnsupported, version, dt)
	case info.Major < fp8Capability:
		return fmt.Errorf("%w: NCCL reduces %v on GPUs of compute capability %d.0 or newer, this one has %d.%d",
			comm.ErrUnsupported, dt, fp8Capability, info.Major, info.Minor)
	case op == comm.Avg:
		// NCCL multiplies by 1/P in the type itself, and builds for several architectures refuse it; Sum and Scale are
		// more accurate.
		return fmt.Errorf("%w: NCCL does not average %v", comm.ErrUnsupported, dt)
	}
	return nil
}
