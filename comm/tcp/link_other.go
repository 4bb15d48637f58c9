//go:build !unix

package tcp

import (
	"syscall"
	"time"
)

// trySend leaves sending to the writer.
func trySend(uintptr, []byte) (int, error) { return 0, nil }

func tune(syscall.RawConn) {}

func limitStuck(syscall.RawConn, time.Duration) {}
