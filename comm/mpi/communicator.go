package mpi

import (
	"fmt"
	goruntime "runtime"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/leak"
	"github.com/tutti-go/tutti/runtime"
)

// name is the name of this backend in errors.
const name = "mpi"

// communicator is the handle of one rank on a group of MPI processes. Close of the world
// leaves MPI_Finalize to [Finalize].
type communicator struct {
	*backend.Base
	e *endpoint // set by newCommunicator, not changed after
}

var (
	_ comm.Communicator     = (*communicator)(nil)
	_ backend.MemoryChecker = (*communicator)(nil)
)

func newCommunicator(e *endpoint) *communicator {
	c := &communicator{backend.New(&e.Check, &e.Life, e), e}
	mark := leak.NewMark(name, fmt.Sprintf("rank %d of %d", e.rank, e.size))
	e.leakAlarm = goruntime.AddCleanup(c, e.leaked, mark)
	return c
}

// Close implements [comm.Communicator]. It may be the last to refer to c, whose operations take a while to end.
func (c *communicator) Close() error {
	defer goruntime.KeepAlive(c)
	return c.Base.Close()
}

// FixedOrder implements [comm.FixedOrder]: the library adds in its own order.
func (c *communicator) FixedOrder() bool { return !c.e.native() }

// SharesMemory reports whether all ranks share memory, which package ddp asks.
func (c *communicator) SharesMemory() bool { return c.e.SharesMemory() }

// CheckDevice implements [backend.MemoryChecker]. Device memory needs a CUDA-aware
// library, and native collectives: this package's own reduce on the host.
func (c *communicator) CheckDevice(d runtime.Device) error {
	lib := c.e.lib
	if d.Kind == runtime.CPU || d.Kind == runtime.CUDA && lib.cuda && c.e.native() {
		return nil
	}
	reason := "this MPI library is not CUDA-aware"
	if lib.cuda {
		reason = "mpi reaches it with native collectives only (" + env.MPICollectives + "=native)"
	}
	return c.e.Check.Unreachable(
		d,
		reason+"; use the nccl backend, or stage through host memory (copy out, communicate, copy in)",
	)
}
