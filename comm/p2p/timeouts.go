package p2p

import "time"

// All timeouts of the package and their reasons. [backend.DeviceTimeout] bounds the drain and the release in Close.
const (
	// patience bounds a kernel's wait for a peer. It equals PyTorch's timeout of a collective, and exceeds the gap
	// between ranks of a healthy job when one writes a checkpoint or compiles.
	patience = 10 * time.Minute

	// noticeTime is how long an abort waits for kernels to notice it; they need some 40 ms.
	noticeTime = 60 * time.Millisecond

	// visitTime bounds one exchange with a peer, some bytes over a local socket. It limits how long a stranger or a
	// stopped process holds a goroutine, and gives a peer on a busy host time to be scheduled.
	visitTime = 10 * time.Second
)
