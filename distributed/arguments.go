package distributed

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

// sameStream checks that other's memory may take part in work on rt's: an order
// knows the compute stream of one runtime only, and two runtimes of one GPU may
// have a stream each.
func sameStream(rt, other runtime.Runtime) error {
	if rt.Device() != other.Device() {
		return fmt.Errorf("%w: %v and %v", runtime.ErrDevice, rt.Device(), other.Device())
	}
	if rt.ComputeStream() != other.ComputeStream() {
		return fmt.Errorf("%w: two runtimes of %v, whose compute streams nothing puts into an order", runtime.ErrDevice, rt.Device())
	}
	return nil
}

// checkComm checks that there is a communicator.
func checkComm(c comm.Communicator) error {
	if c == nil {
		return fmt.Errorf("%w: communicator is nil", comm.ErrArgument)
	}
	return nil
}
