// Package hostmem is the one place where a uintptr becomes a pointer.
//
// The rest of this module passes host memory around as uintptr, like device memory, and comes here to access it. These
// rules make that sound:
//
//   - An address given to [Slice] is in memory that the Go garbage collector neither moves nor frees while the slice
//     is in use: memory mapped outside the Go heap (runtime/cpu), memory of a C library, or Go memory that the caller
//     keeps alive ([Addr] and a later runtime.KeepAlive).
//   - Addresses inside Go's stack are never used, because stacks move: [Addr] and [AddrOf] make their arguments escape
//     to the heap.
package hostmem

import "unsafe"

// Slice returns the n elements of type T that start at address p.
// It returns nil for n == 0, whatever p is.
func Slice[T any](p uintptr, n int) []T {
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*T)(pointer(p)), n)
}

// Addr returns the address of the first element of s, 0 for an empty slice without backing memory. The caller must
// keep s alive while the address is used.
func Addr[T any](s []T) uintptr {
	return address(unsafe.Pointer(unsafe.SliceData(s)))
}

// AddrOf returns the address of a value. The caller must keep it alive while the address is used.
func AddrOf[T any](p *T) uintptr {
	return address(unsafe.Pointer(p))
}

// CString returns a copy of the zero-terminated string at p, "" for p == 0.
func CString(p uintptr) string {
	if p == 0 {
		return ""
	}
	n := 0
	for *(*byte)(pointer(p + uintptr(n))) != 0 {
		n++
	}
	return string(Slice[byte](p, n))
}

// Bytes returns the memory of s as bytes; both share it.
func Bytes[T any](s []T) []byte {
	if len(s) == 0 {
		return nil
	}
	var t T
	return unsafe.Slice(
		(*byte)(unsafe.Pointer(unsafe.SliceData(s))),
		len(s)*int(unsafe.Sizeof(t)),
	)
}

// pointer turns an address into a pointer. The address is reinterpreted
// instead of converted because the compiler's unsafe-pointer rules (and go
// vet) know only memory that Go itself allocated.
func pointer(p uintptr) unsafe.Pointer {
	return *(*unsafe.Pointer)(unsafe.Pointer(&p))
}

// address is the inverse. The value that p points to escapes to the heap, where it does not move: the compiler cannot
// know that never is false.
func address(p unsafe.Pointer) uintptr {
	if never {
		sink = p
	}
	return uintptr(p)
}

var (
	never bool
	//lint:ignore U1000 storing to it is what it is for
	sink unsafe.Pointer
)
