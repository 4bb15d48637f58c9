package comm

import "github.com/tutti-go/tutti/runtime"

// Reacher is implemented by communicators that reach only some memory.
// CheckDevice returns an error wrapping [ErrDevice] for memory that they
// cannot read and write, naming what would help. Code that knows the device of
// a buffer (package distributed) asks before it communicates; a communicator
// without this method takes anything.
type Reacher interface {
	CheckDevice(d runtime.Device) error
}
