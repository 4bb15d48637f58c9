// Package keeper ends a process of a rank when the rank's keeper was killed. A keeper is the process of tutti launch
// that is an ancestor of all processes of its rank, and outlives them unless it is killed.
package keeper

import "time"

// Name is a keeper's name in lists of processes.
const Name = "rank-keeper"

const (
	// guardTime is how long a process waits after its keeper's end. The launcher's guard, unless it was killed as well,
	// ends the rank's processes within it, and reports the end.
	guardTime = time.Second
	// wordTime bounds the wait for a reader of the last line.
	wordTime = time.Second
)
