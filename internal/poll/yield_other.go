//go:build !linux

package poll

import "runtime"

// Yield lets other goroutines run, where the system has no call that
// lets other processes do so.
func Yield() { runtime.Gosched() }
