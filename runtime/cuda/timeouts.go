package cuda

import "time"

// All times of the package, and why they are what they are. Calls that have a context end with it; these bound the
// waits of those that have none.
const (
	// closeTimeout bounds each wait of Close: for calls in flight and queued work, and then for libraries that free
	// memory. A queued step takes seconds, and package nccl gives what it frees 20 s. A kernel that never ends keeps a
	// program from ending no longer than this.
	closeTimeout = 30 * time.Second

	// flushTimeout bounds the wait for work that may use freed memory, before Trim or an Allocate on a full GPU gives
	// that back to the driver, and the wait for a graph that later work is not ordered behind. Memory that is still in
	// use then stays in the pool, for a later Trim.
	flushTimeout = 5 * time.Second
)
