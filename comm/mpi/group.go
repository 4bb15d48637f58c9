package mpi

import "github.com/tutti-go/tutti/comm"

// group is the state of Communicator.Group. What comm.Grouping does not guard
// itself is guarded by engine.mu.
type group struct {
	comm.Grouping
	ops    []*op // submitted inside, not handed to the engine yet
	inside bool  // the submission that holds engine.mu belongs to the group
}
