package mpi

import "github.com/tutti-go/tutti/comm"

// SpoilSplit makes every Split of this rank fail, after MPI_Comm_split.
func SpoilSplit(c comm.Communicator) { c.(*communicator).e.lib.handles.errorsReturn = 0 }

// Shares reports whether collectives of c go over memory that its ranks share.
func Shares(c comm.Communicator) bool { return c.(*communicator).e.board.memory != nil }

// InFlight returns the number of operations of c that are not done.
func InFlight(c comm.Communicator) int { return int(c.(*communicator).e.inFlight.Load()) }
