//go:build !amd64 && !arm64

package hostmem

// Own does nothing on this processor.
func Own(uintptr) {}
