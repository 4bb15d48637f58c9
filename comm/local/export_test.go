package local

import (
	"time"

	"github.com/tutti-go/tutti/comm"
)

// CloseWithin has Close wait for operations in flight no longer than d.
func CloseWithin(c comm.Communicator, d time.Duration) { c.(*communicator).e.life.Timeout = d }
