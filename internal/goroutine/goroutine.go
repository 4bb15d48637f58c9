// Package goroutine tells goroutines apart, which [comm.Communicator.Group]
// needs: what a goroutine submits belongs to the group that it has opened, what
// others submit does not.
package goroutine
