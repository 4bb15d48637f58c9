package mpi

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
)

// translate wraps an MPI error in the sentinel of its class.
func translate(lib *library, err *callError) error {
	sentinel := comm.ErrPeerFailed
	if err.class == lib.abi.errTruncate {
		sentinel = comm.ErrMismatch
	}
	return fmt.Errorf("%w: %w", sentinel, err)
}

// callError is an error code that an MPI function returned.
type callError struct {
	function string
	code     int32
	class    int32
	text     string
}

// Error returns the function and the library's own description.
func (e *callError) Error() string {
	return fmt.Sprintf("%s: %s (code %d)", e.function, e.text, e.code)
}

// error describes an error code in the library's words (MPI_Error_string).
func (l *library) error(f dl.Func, code int32) *callError {
	out := newCells()
	defer out.free()
	e := &callError{
		function: f.Name(),
		code:     code,
		class:    code,
	}
	if code == leftBehind {
		e.text = "the library allows one call at a time, and one was left behind when its context ended"
		return e
	}
	if l.call(l.ErrorClass, uintptr(code), out.addr(0)) == success {
		e.class = out.int32(0)
	}
	e.text = l.text(func(buffer, length uintptr) int32 {
		return l.call(l.ErrorString, uintptr(code), buffer, length)
	})
	return e
}
