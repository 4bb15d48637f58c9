package standin

import (
	"github.com/tutti-go/tutti/comm"
)

// Grouped records the groups that a communicator is given.
type Grouped struct {
	comm.Communicator
	Groups [][]comm.Call
}

// Group implements [comm.Communicator].
func (c *Grouped) Group(calls ...comm.Call) error {
	c.Groups = append(c.Groups, append([]comm.Call(nil), calls...))
	return c.Communicator.Group(calls...)
}
