//go:build !linux

package poll

import (
	"runtime"
	"time"
)

// Sleep sleeps for d.
func Sleep(d time.Duration) { time.Sleep(d) }

// Yield lets other goroutines run, on systems without a call that lets other processes run.
func Yield() { runtime.Gosched() }
