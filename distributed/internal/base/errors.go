package base

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

// OpError names the operation that an error is of. Without an error it is nil.
func OpError(op string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("distributed: %s: %w", op, err)
}

// ClosedError is [comm.ErrClosed] of what has a communicator, which may be open.
type ClosedError string

// Error implements error.
func (name ClosedError) Error() string {
	return string(name) + " is closed"
}

// Is implements what [errors.Is] asks for.
func (ClosedError) Is(target error) bool {
	return target == comm.ErrClosed
}

// ShapeError is [runtime.ErrShape] of an operation, with a reason.
func ShapeError(op, format string, args ...any) error {
	return OpError(op, fmt.Errorf("%w: %s", runtime.ErrShape, fmt.Sprintf(format, args...)))
}

// ConfigError is [comm.ErrArgument] of a configuration, with a reason.
func ConfigError(format string, args ...any) error {
	return fmt.Errorf("distributed: config: %w: %s", comm.ErrArgument, fmt.Sprintf(format, args...))
}
