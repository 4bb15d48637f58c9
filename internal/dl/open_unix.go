//go:build linux || darwin || freebsd || netbsd

package dl

import "github.com/ebitengine/purego"

// open loads a library with its symbols visible to libraries loaded later:
// plugins of an MPI library look for its symbols in the global scope.
func open(name string) (uintptr, error) {
	return purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_GLOBAL)
}

func lookup(handle uintptr, symbol string) (uintptr, error) {
	return purego.Dlsym(handle, symbol)
}
