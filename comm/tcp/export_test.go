package tcp

import (
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/poll"
)

// LanesOf is what a round trip asks for.
var LanesOf = lanesOf

// ParallelLanesOf is what processors ask for.
var ParallelLanesOf = parallelLanesOf

// MeasureByMessages has a test measure round trips as where the kernel does not tell them.
func MeasureByMessages(t *testing.T) {
	before := kernelRoundTrip
	kernelRoundTrip = func(syscall.RawConn) (time.Duration, bool) { return 0, false }
	t.Cleanup(func() { kernelRoundTrip = before })
}

// Ports are those of this side and the other of a connection to a rank.
func Ports(c comm.Communicator, rank, lane int) (own, other int) {
	conn := c.(*communicator).e.wire.pairs[rank].lanes[lane].link
	return conn.LocalAddr().(*net.TCPAddr).Port, conn.RemoteAddr().(*net.TCPAddr).Port
}

// Stuck has a test set how long a connection may be stuck.
func Stuck(t *testing.T, d time.Duration) {
	before := stuck
	stuck = d
	t.Cleanup(func() { stuck = before })
}

// Early is how many bytes of messages have come from a rank before their receives, if no more fit; 0 otherwise.
func Early(c comm.Communicator, rank int) int { return c.(*communicator).e.wire.Early(rank) }

// Lanes is the number of connections to the last other rank.
func Lanes(c comm.Communicator) (n int) {
	for _, p := range c.(*communicator).e.wire.pairs {
		n = max(n, len(p.lanes))
	}
	return n
}

// Propose has a rank of a world of three propose a number for the communicator that its next Split makes.
func Propose(c comm.Communicator, number uint64) {
	const third = 0xaaaaaaaaaaaaaaab // 3 * third is 1, modulo 2^64
	n := c.(*communicator).e.wire.node
	n.proposals.Store((number-uint64(n.rank))*third - 1)
}

// Neighbors has the ranks of a test be on machines: those with the same number share memory, unless it is 0.
func Neighbors(t *testing.T, number func(rank int) int64) {
	before := machine
	machine = number
	if t == nil {
		return
	}
	t.Cleanup(func() { machine = before })
}

// Shares reports whether short collectives of a communicator go over memory, and whether anything of it does.
func Shares(c comm.Communicator) (slots, anything bool) {
	e := c.(*communicator).e
	return c.(*communicator).SharesMemory(), e.wire.shares.Load()
}

// Home is the processor to which waits of a rank return that shares memory.
func Home(c comm.Communicator) *poll.Home { return c.(*communicator).e.wire.node.neighbors.Load().home }

// Machine is what ranks are on outside of tests.
var Machine = machine

// Run is the name of a world where the process has none, which the launcher or the job's ranks have given it.
func Run(c comm.Communicator) string { return c.(*communicator).e.wire.node.run }
