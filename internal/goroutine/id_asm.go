//go:build amd64 || arm64

package goroutine

// ID identifies the calling goroutine: by the address of the Go runtime's
// descriptor, which no other live goroutine has. It is only good for comparing
// with the ID of a goroutine that is alive. It is never zero.
func ID() uintptr
