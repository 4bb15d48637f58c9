package tcp

import "github.com/tutti-go/tutti/comm"

// LanesOf is what a round trip asks for.
var LanesOf = lanesOf

// Lanes is the number of connections to the last other rank.
func Lanes(c comm.Communicator) (n int) {
	for _, p := range c.(*communicator).e.wire.pairs {
		n = max(n, len(p.lanes))
	}
	return n
}
