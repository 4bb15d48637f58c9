//go:build !linux

package poll

import (
	"runtime"
	"time"
)

// pause sleeps for d.
func pause(d time.Duration) { time.Sleep(d) }

// Yield lets other goroutines run, where the system has no call that
// lets other processes do so.
func Yield() { runtime.Gosched() }
