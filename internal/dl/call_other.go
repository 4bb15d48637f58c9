//go:build !amd64 || (!linux && !darwin)

package dl

// callInt calls f through purego.
func callInt(f Func, args []uintptr) int32 { return int32(f.Call(args...)) }
