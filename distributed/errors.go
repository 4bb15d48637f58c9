package distributed

import "fmt"

// TensorError is an error that concerns one of several tensors that a call was given, such as a gradient of package
// ddp or a parameter of package outer. Programs that have names for them find its number with [errors.As].
type TensorError struct {
	Role  string // what the tensors are, such as "gradient"
	Index int    // of the one, in the order in which they were passed
	Err   error
}

// Error says which tensor it concerns, and what.
func (e *TensorError) Error() string {
	return fmt.Sprintf("%s %d: %v", e.Role, e.Index, e.Err)
}

// Unwrap returns e.Err, for package errors.
func (e *TensorError) Unwrap() error { return e.Err }
