//go:build !linux

package mpi

import "runtime"

// yieldProcessor lets other goroutines run, where the system has no call that
// lets other processes do so.
func yieldProcessor() { runtime.Gosched() }
