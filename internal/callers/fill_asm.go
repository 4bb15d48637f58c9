//go:build amd64 || arm64

package callers

// fill follows the frame pointers within the goroutine's stack and returns how
// many return addresses it found, and the address of its g.
//
//go:noescape
func fill(s *Stack) (n int, goroutine uintptr)
