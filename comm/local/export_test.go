package local

import (
	"time"

	"github.com/tutti-go/tutti/comm"
)

// NewDedicated is New on a machine that has a processor for each rank.
func NewDedicated(ranks int) []comm.Communicator {
	w := newWorld(ranks, dedicated)
	var comms []comm.Communicator
	for _, e := range w.ranks {
		comms = append(comms, newCommunicator(e))
	}
	return comms
}

// CloseWithin has Close wait for operations in flight no longer than d.
func CloseWithin(c comm.Communicator, d time.Duration) { c.(*communicator).e.life.Timeout = d }
