package distributed

import "fmt"

// TensorError is an error about one of the tensors that were passed to a call, such as a gradient of package ddp or a
// parameter of package outer. Programs that name their tensors get its index with [errors.As].
type TensorError struct {
	Role  string // what the tensors are, such as "gradient"
	Index int    // of the one, in the order in which they were passed
	Err   error  // what is wrong with it
}

// Error returns the tensor's role and index, and the text of e.Err.
func (e *TensorError) Error() string {
	return fmt.Sprintf("%s %d: %v", e.Role, e.Index, e.Err)
}

// Unwrap returns e.Err, for package errors.
func (e *TensorError) Unwrap() error { return e.Err }
