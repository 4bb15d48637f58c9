package tcp

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// roundTrip is the shortest of a connection's packets. Kernels answer these, so that processes that wait for a
// processor do not lengthen it.
func roundTrip(socket syscall.RawConn) (d time.Duration, ok bool) {
	if socket == nil {
		return 0, false
	}
	_ = socket.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		if ok = err == nil && info.Min_rtt != ^uint32(0); ok {
			d = time.Duration(info.Min_rtt) * time.Microsecond
		}
	})
	return d, ok
}
