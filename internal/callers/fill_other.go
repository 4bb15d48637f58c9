//go:build !amd64 && !arm64

package callers

import "runtime"

func fill(s *Stack) int { return runtime.Callers(2, s[:]) }
