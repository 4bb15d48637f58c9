package base

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

// OpError adds the name of the operation to an error. A nil error stays nil.
func OpError(op string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("distributed: %s: %w", op, err)
}

// ClosedError is [comm.ErrClosed] of an object with a communicator, which may still be open.
type ClosedError string

// Error implements error.
func (name ClosedError) Error() string {
	return string(name) + " is closed"
}

// Is implements [errors.Is].
func (ClosedError) Is(target error) bool {
	return target == comm.ErrClosed
}

// ShapeError returns [runtime.ErrShape] for an operation, with a reason.
func ShapeError(op, format string, args ...any) error {
	return OpError(op, fmt.Errorf("%w: %s", runtime.ErrShape, fmt.Sprintf(format, args...)))
}

// ConfigError returns [comm.ErrArgument] for a configuration, with a reason.
func ConfigError(format string, args ...any) error {
	return fmt.Errorf("distributed: config: %w: %s", comm.ErrArgument, fmt.Sprintf(format, args...))
}
