package mpi

import "github.com/tutti-go/tutti/comm"

// InFlight returns the number of operations of c that are not done.
func InFlight(c comm.Communicator) int { return int(c.(*communicator).e.inFlight.Load()) }
