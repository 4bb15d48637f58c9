//go:build !linux

package poll

import (
	"runtime"
	"time"
)

// Sleep sleeps for d.
func Sleep(d time.Duration) { time.Sleep(d) }

// Yield lets other goroutines run, where the system has no call that
// lets other processes do so.
func Yield() { runtime.Gosched() }
