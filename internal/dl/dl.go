// Package dl opens shared libraries at run time and calls their functions,
// without cgo: a thin layer over github.com/ebitengine/purego that adds what
// the backends share (candidates tried in order, an error that lists them all,
// tables of symbols).
//
// A package that wraps a library declares a struct of [Func] and [Data] fields
// and fills it with [Library.Bind]:
//
//	type api struct {
//		Init    dl.Func `sym:"MPI_Init_thread"`
//		InitBig dl.Func `sym:"MPI_Bcast_c,optional"`
//		World   dl.Data `sym:"ompi_mpi_comm_world"`
//	}
//
// Functions take and return integers and pointers only; purego's calling
// convention for those is the platform's own. A call costs 0.05 to 0.1 µs and
// allocates nothing (see the benchmarks and the tests of this package).
package dl

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"

	"github.com/ebitengine/purego"
)

// Func is a C function, found or not.
type Func struct {
	address uintptr // 0 if the library lacks it
	name    string  // of the symbol
}

// Name returns the function's name in the library's documentation: its symbol, without the version that some libraries
// append ("_v2").
func (f Func) Name() string { return f.name }

// As returns the function under another name: the name of the operation of a call, such as the kernel that it
// launches.
func (f Func) As(name string) Func {
	return Func{f.address, name}
}

// Found reports whether the library has the function. Other functions must not be called.
func (f Func) Found() bool { return f.address != 0 }

// Call calls the function with integer or pointer arguments (at most 24) and
// returns its result register. Narrower results occupy the low bits; see
// [Func.Int].
//
// An address among the arguments must stay valid for as long as the library
// uses it: memory outside the Go heap, or heap memory that the caller keeps
// alive and the library does not keep beyond the call.
func (f Func) Call(args ...uintptr) uintptr {
	// purego makes its argument list escape. Copying to a recycled list keeps the caller's on the stack.
	block := blocks.Get().(*[maxArgs]uintptr)
	list := block[:len(args)]
	copy(list, args)
	r, _, _ := purego.SyscallN(f.address, list...)
	blocks.Put(block)
	return r
}

// maxArgs bounds the argument list of Call. The longest list of a wrapped library has 22 words: a 128-byte structure,
// passed by value on the stack, after six registers.
const maxArgs = 24

// maxIntArgs bounds the argument list of Int.
const maxIntArgs = 16

var blocks = sync.Pool{New: func() any { return new([maxArgs]uintptr) }}

// Int is Call for a function that returns a C int or enum and takes at most 16 arguments. It is faster than Call.
func (f Func) Int(args ...uintptr) int32 {
	return callInt(f, args)
}

// Data is the address of a variable that a library exports; 0 means that the library lacks it.
type Data uintptr

// Library is an open shared library. It stays open: C libraries with threads
// and exit handlers do not survive being unloaded.
type Library struct {
	name   string  // the candidate that was opened
	handle uintptr // of the system's loader
}

// Open opens the first of the candidates (file names that the system's loader looks up, or paths) that it can. The
// error lists every candidate with the loader's reason; adjacent ones with the same reason share it.
func Open(candidates ...string) (*Library, error) {
	var tried strings.Builder
	previous := ""
	for _, name := range candidates {
		handle, err := open(name)
		if err == nil {
			return &Library{name: name, handle: handle}, nil
		}
		reason := strings.TrimPrefix(err.Error(), name+": ") // glibc begins with the name
		switch {
		case tried.Len() == 0:
		case reason == previous:
			tried.WriteString(", ")
		default:
			fmt.Fprintf(&tried, " (%s), ", previous)
		}
		tried.WriteString(name)
		previous = reason
	}
	if tried.Len() == 0 {
		return nil, errors.New("no candidates")
	}
	return nil, fmt.Errorf("tried %s (%s)", tried.String(), previous)
}

// Name is the candidate under which the library was opened.
func (l *Library) Name() string { return l.name }

// Lookup returns the address of a symbol, and whether the library has it.
func (l *Library) Lookup(symbol string) (uintptr, bool) {
	address, err := lookup(l.handle, symbol)
	return address, err == nil && address != 0
}

// Bind sets the [Func] and [Data] fields of *table with a `sym:"name"` tag to these symbols. A symbol marked
// `sym:"name,optional"` may be missing. The error names the library and the first missing symbols, and says how many
// more there are.
func (l *Library) Bind(table any) error {
	v := reflect.ValueOf(table)
	if v.Kind() != reflect.Pointer || v.Elem().Kind() != reflect.Struct {
		return fmt.Errorf("dl: Bind wants a pointer to a struct, got %T", table)
	}
	v = v.Elem()
	var missing []string
	for i := range v.NumField() {
		tag, ok := v.Type().Field(i).Tag.Lookup("sym")
		if !ok {
			continue
		}
		name, flags, _ := strings.Cut(tag, ",")
		address, found := l.Lookup(name)
		if !found && flags != "optional" {
			missing = append(missing, name)
		}
		if !set(v.Field(i), Func{address, unversioned(name)}) {
			return fmt.Errorf("dl: field %s of %T is no exported Func or Data", v.Type().Field(i).Name, table)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%s lacks %s", l.name, listed(missing))
	}
	return nil
}

// set stores a symbol in an exported field of type Func or Data.
func set(field reflect.Value, symbol Func) bool {
	if !field.CanSet() {
		return false
	}
	switch field := field.Addr().Interface().(type) {
	case *Func:
		*field = symbol
	case *Data:
		*field = Data(symbol.address)
	default:
		return false
	}
	return true
}

// unversioned cuts a version such as "_v2" off a symbol.
func unversioned(symbol string) string {
	i := strings.LastIndex(symbol, "_v")
	if i < 0 || len(symbol) == i+2 || strings.Trim(symbol[i+2:], "0123456789") != "" {
		return symbol
	}
	return symbol[:i]
}

// mostListed is the number of symbols that an error names: a wrong file lacks all of them.
const mostListed = 3

// listed joins names, at most mostListed of them.
func listed(names []string) string {
	if unlisted := len(names) - mostListed; unlisted > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:mostListed], ", "), unlisted)
	}
	return strings.Join(names, ", ")
}
