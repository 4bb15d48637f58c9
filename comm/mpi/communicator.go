package mpi

import (
	"context"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/runtime"
)

// backend is the name of this backend in errors.
const name = "mpi"

// communicator is the handle of one rank on a group of MPI processes.
type communicator struct {
	backend.Calls
	e *endpoint
}

var (
	_ comm.Communicator = (*communicator)(nil)
	_ comm.Reacher      = (*communicator)(nil)
	_ comm.Progresser   = (*communicator)(nil)
)

func newCommunicator(e *endpoint) *communicator {
	return &communicator{backend.NewCalls(&e.check, e), e}
}

// Close implements [comm.Communicator]. The MPI communicators are freed when all
// ranks have closed theirs, unless operations are left in flight. Closing the world
// waits for its operations and makes it unusable, but leaves MPI_Finalize to
// [Finalize].
func (c *communicator) Close() error {
	_ = c.e.close(context.Background())
	return nil
}

// Err implements [comm.Communicator].
func (c *communicator) Err() error { return c.e.Usable() }

// Abort implements [comm.Communicator]. With interop the other ranks are not notified.
func (c *communicator) Abort(cause error) { c.e.abort(cause) }

// SubCommunicators implements [comm.Parent].
func (c *communicator) SubCommunicators() (open []comm.Communicator) {
	for _, e := range c.e.state.descendants(c.e) {
		open = append(open, newCommunicator(e))
	}
	slices.Reverse(open) // a parent's comes before its own sub-communicators'
	return open
}

// Progress implements [comm.Progresser].
func (c *communicator) Progress() comm.Progress { return c.e.Progress() }

// CheckDevice implements [comm.Reacher]. Device memory needs a CUDA-aware
// library, and native collectives: this package's own reduce on the host.
func (c *communicator) CheckDevice(d runtime.Device) error {
	lib := c.e.lib
	if d.Kind == runtime.CPU || d.Kind == runtime.CUDA && lib.cuda && c.e.native() {
		return nil
	}
	reason := "this MPI library is not CUDA-aware"
	if lib.cuda {
		reason = "mpi reaches it with native collectives only (" + CollectivesVariable + "=native)"
	}
	return c.e.check.Unreachable(d, reason+"; use the nccl backend, or stage through host memory (copy out, communicate, copy in)")
}
