//go:build unix

package tcp

import (
	"runtime"
	"syscall"
	"time"
)

// trySend sends what a socket takes without waiting.
func trySend(fd uintptr, b []byte) (int, error) {
	for {
		n, err := syscall.Write(int(fd), b)
		switch err {
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			return 0, nil
		}
		return max(n, 0), err
	}
}

// unsentBytes is how much of what was written may wait in the kernel to be sent: what comes
// later and is urgent waits for that.
const unsentBytes = 256 << 10

// unsentOption is TCP_NOTSENT_LOWAT, by system.
var unsentOption = map[string]int{"linux": 25, "darwin": 0x201}

// tune keeps the kernel's queue short (TCP_NOTSENT_LOWAT).
func tune(socket syscall.RawConn) {
	if option, ok := unsentOption[runtime.GOOS]; ok {
		setOption(socket, option, unsentBytes)
	}
}

// userTimeout is Linux's TCP_USER_TIMEOUT.
const userTimeout = 18

// limitStuck has Linux end a connection on which the peer's kernel has acknowledged nothing for a time
// (TCP_USER_TIMEOUT).
func limitStuck(socket syscall.RawConn, d time.Duration) {
	if runtime.GOOS == "linux" {
		setOption(socket, userTimeout, int(d.Milliseconds()))
	}
}

// setOption sets an option of TCP, where the socket has it.
func setOption(socket syscall.RawConn, option, value int) {
	if socket == nil {
		return
	}
	_ = socket.Control(func(fd uintptr) {
		_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, option, value)
	})
}
