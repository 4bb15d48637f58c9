// Package keeper ends a process of a rank when the rank's keeper was killed. A keeper is the process of tutti launch
// that is an ancestor of all processes of its rank, and outlives them unless it is killed.
package keeper

// Name is a keeper's name in lists of processes.
const Name = "rank-keeper"
