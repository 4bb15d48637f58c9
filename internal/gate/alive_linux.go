package gate

import "golang.org/x/sys/unix"

// boundUnacknowledged ends a connection in time also while data is in flight, when Linux sends no probes.
func boundUnacknowledged(fd uintptr) {
	_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(CutOff.Milliseconds()))
}
