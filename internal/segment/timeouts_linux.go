package segment

import "time"

// handoverTime bounds a handover between two processes on one machine, which may be busy.
const handoverTime = 10 * time.Second

// acceptTime is the pause of a server whose process has no file descriptors left.
const acceptTime = 10 * time.Millisecond
