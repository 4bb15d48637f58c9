// Package window is the contract of memory of the host that devices of several processes access.
package window

import (
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
)

// Opener is implemented by runtimes of devices that access memory of the host which other processes access, too.
type Opener interface {
	// OpenWindow gives the device access to memory, which is not on the Go heap and stays until the window is closed.
	// The error wraps runtime.ErrUnsupported if the device cannot access it.
	OpenWindow(memory []byte) (Window, error)
}

// Window is memory of the host with its own queues of work on a device: copies to the memory, copies from it, and
// reductions. Its methods submit work, and return before that is done. They do not change what the other processes see
// of the memory until the work is done. A Window belongs to one goroutine at a time.
type Window interface {
	// Begin makes later work of the window wait for the work submitted to the compute stream so far.
	Begin() error
	// CopyOut copies device memory to a part of the window, behind the earlier copies to the window and the earlier
	// reductions.
	CopyOut(dst []byte, src uintptr) error
	// CopyIn copies a part of the window to device memory, behind the earlier copies from the window.
	CopyIn(dst uintptr, src []byte) error
	// Reduce reduces arrays of the device's memory or the window, in their order, behind the earlier reductions. The
	// result has the bits that the contract of comm.Communicator prescribes. There are at least two operands and at most
	// [MaxOperands]. dst is in device memory, and may be an operand.
	Reduce(dst uintptr, operands []uintptr, n int, dt dtype.DType, op reductions.Op) error
	// Wait waits until all work of the window is done.
	Wait() error
	// Close waits for the work, and takes the access away. Closing twice is fine.
	Close() error
}

// MaxOperands is how many arrays [Window.Reduce] reduces at most.
const MaxOperands = 16
