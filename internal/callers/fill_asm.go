//go:build amd64 || arm64

package callers

// fill follows the frame pointers within the goroutine's stack and returns how
// many return addresses it found.
//
//go:noescape
func fill(s *Stack) int
