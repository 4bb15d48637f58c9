package mpi

import (
	"fmt"
	"io/fs"
	"strings"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
)

// translate wraps an MPI error in the sentinel of its class.
func translate(lib *library, err *callError) error {
	sentinel, ok := lib.abi.sentinels[err.class]
	switch {
	case strings.Contains(err.text, "Too many communicators"): // MPICH, which has no class for it
		sentinel = comm.ErrExhausted
	case !ok:
		// Libraries report a lost connection in classes that do not say what has happened: other, intern, unknown.
		sentinel = comm.ErrPeerFailed
	}
	return fmt.Errorf("%w: %w", sentinel, err)
}

// errorClasses are the classes of errors that say what is wrong, by the ABI's numbers.
type errorClasses struct {
	truncate    int32   // a message is longer than its receive
	arguments   []int32 // buffer, count, type, tag, comm, rank, root, group, op, topology, dims, arg, request
	exhausted   []int32 // no_mem, no_space, quota
	permission  []int32 // access, read_only
	unsupported []int32 // unsupported_operation
}

// sentinels returns the sentinel of each class.
func (c errorClasses) sentinels() map[int32]error {
	all := map[int32]error{c.truncate: comm.ErrMismatch}
	for sentinel, classes := range map[error][]int32{
		comm.ErrArgument:    c.arguments,
		comm.ErrExhausted:   c.exhausted,
		fs.ErrPermission:    c.permission,
		comm.ErrUnsupported: c.unsupported,
	} {
		for _, class := range classes {
			all[class] = sentinel
		}
	}
	return all
}

// callError is an error code that an MPI function returned.
type callError struct {
	function string // by its name in the standard
	code     int32  // leftBehind if the call was not made
	class    int32  // of the code; the code itself where the library does not say
	text     string // the library's own
}

// Error returns the function and the library's own description in one line. MPICH's has several.
func (e *callError) Error() string {
	text := strings.ReplaceAll(strings.TrimSpace(e.text), "\n", "; ")
	return fmt.Sprintf("%s: %s (code %d)", e.function, text, e.code)
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
