//go:build !amd64 || (!linux && !darwin)

package dl

import "fmt"

// callInt calls f through purego.
func callInt(f Func, args []uintptr) int32 {
	if len(args) > maxIntArgs { // as many as elsewhere
		panic(fmt.Sprintf("dl: %d arguments, at most %d can be", len(args), maxIntArgs))
	}
	return int32(f.Call(args...))
}
