package backend

import "time"

// The time that [Base.Close] gives the operations in flight, and then Release, on the host
// and on devices, where the kernels of a whole step may be queued; and the time of
// [Backend.Abort], which adds to the deadline of the wait that failed. A Close with all three
// ends within the 30 s that Slurm and Kubernetes leave a process that is told to end.
const (
	HostTimeout   = 5 * time.Second
	DeviceTimeout = 10 * time.Second
	AbortTimeout  = 3 * time.Second
)
