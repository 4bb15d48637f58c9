//go:build (linux || darwin) && amd64

package dl

import "unsafe"

// frame is a call for enterC, in call_amd64.s, which knows its layout.
type frame struct {
	fn   uintptr             // address of the function
	args [maxIntArgs]uintptr // integers and pointers
}

// enterCAddress and enterEachAddress are the entries of enterC and enterEach.
var enterCAddress, enterEachAddress uintptr

// cgocall calls a C function with one argument on the system stack. It is the runtime's part of every cgo call, also
// available without cgo's tool (purego, which keeps the rest of cgo's runtime in place, does the same).
//
//go:linkname cgocall runtime.cgocall
//go:noescape
func cgocall(fn, arg unsafe.Pointer) int32

// callInt calls f by the shortest path: it avoids the argument blocks that purego takes from a pool and clears. That
// halves the time of a call, which is most of a short collective's overhead.
func callInt(f Func, args []uintptr) int32 {
	call := frame{fn: f.address}
	copy(call.args[:len(args)], args)
	return cgocall(*(*unsafe.Pointer)(unsafe.Pointer(&enterCAddress)), unsafe.Pointer(&call))
}

// callEach makes the calls of a sequence.
func callEach(s *Sequence) int32 {
	return cgocall(*(*unsafe.Pointer)(unsafe.Pointer(&enterEachAddress)), unsafe.Pointer(s))
}
