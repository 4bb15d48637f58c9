package p2p

import "time"

// All times of the package, and why they are what they are. [backend.DeviceTimeout] bounds the drain and the release in
// Close.
const (
	// patience bounds a kernel's wait for a peer. It is longer than ranks of a healthy job are apart when one writes a
	// checkpoint or compiles something, and as long as PyTorch waits for a collective.
	patience = 10 * time.Minute

	// noticeTime is how long an abort waits for kernels to notice it, which takes them some 40 ms.
	noticeTime = 60 * time.Millisecond

	// visitTime bounds one exchange with a peer, some bytes over a local socket. A stranger or a stopped process
	// keeps a goroutine no longer, and a peer on a busy host has time to be scheduled.
	visitTime = 10 * time.Second
)
