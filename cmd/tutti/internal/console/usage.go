// Package console holds the parts that the command lines of tutti and of its laboratory share: flags and the worlds
// that they describe, tables, progress bars, directories for pictures, and output as text or JSON.
package console

import "fmt"

// UsageError marks an error as a mistake of the user: wrong flags or arguments.
type UsageError struct{ Err error }

// Error implements error.
func (e UsageError) Error() string {
	return e.Err.Error()
}

// Unwrap returns the marked error.
func (e UsageError) Unwrap() error { return e.Err }

// Usagef makes a [UsageError].
func Usagef(format string, args ...any) error {
	return UsageError{fmt.Errorf(format, args...)}
}
