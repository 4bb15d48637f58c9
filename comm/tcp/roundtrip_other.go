//go:build !linux

package tcp

import (
	"syscall"
	"time"
)

func roundTrip(syscall.RawConn) (time.Duration, bool) { return 0, false }
