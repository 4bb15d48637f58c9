//go:build (amd64 || arm64) && !windows

package callers

// now reads the processor's own clock.
func now() Ticks
