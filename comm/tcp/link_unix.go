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

// tune keeps the kernel's queue short (TCP_NOTSENT_LOWAT).
func tune(socket syscall.RawConn) {
	option, ok := map[string]int{"linux": 25, "darwin": 0x201}[runtime.GOOS]
	if ok && socket != nil {
		_ = socket.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, option, unsentBytes) })
	}
}

// bound has Linux end a connection on which nothing of what was sent is acknowledged for so long (TCP_USER_TIMEOUT).
func bound(socket syscall.RawConn, d time.Duration) {
	if runtime.GOOS == "linux" && socket != nil {
		_ = socket.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, 18, int(d.Milliseconds())) })
	}
}
