//go:build linux || darwin || freebsd || netbsd

package dl

import (
	"runtime"

	"github.com/ebitengine/purego"
)

// open loads a library with its symbols visible to libraries loaded later: plugins of an MPI library look for its
// symbols in the global scope.
//
// The loader keeps the reason of a failure per thread, and purego reads it in a second call.
func open(name string) (uintptr, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_GLOBAL)
}

// lookup finds a symbol. The reason of a failure is per thread, too.
func lookup(handle uintptr, symbol string) (uintptr, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return purego.Dlsym(handle, symbol)
}
