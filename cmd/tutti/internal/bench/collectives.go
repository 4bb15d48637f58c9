package bench

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// collective is one that can be measured: its buffers, its result and how its bandwidth
// is counted. A buffer has parts of count elements each. In place, a smaller
// buffer is the rank's own part of the larger one.
type collective struct {
	name    string
	reduces bool
	root    int     // -1 for none
	places  []Place // the forms it has; the first is measured by default

	// sendParts and recvParts are the parts of a rank's buffers among p ranks.
	sendParts, recvParts func(p int) int
	// sizeParts is how many parts the "size" of nccl-tests counts.
	sizeParts func(p int) int
	// busFactor turns algorithm bandwidth into bus bandwidth: what a link
	// carries (nccl-tests, doc/PERFORMANCE.md).
	busFactor func(p float64) float64
	// origin says whose part (and which of its parts) arrives as the given part
	// of rank's result among p ranks; for a reduction only the part counts.
	origin func(rank, p, part int) (from, fromPart int)
	// submit starts the operation.
	submit func(c comm.Communicator, w work) error
}

// work is one operation: its buffers and their elements.
type work struct {
	send, recv uintptr
	count      int // of a part
	dt         dtype.DType
	op         comm.ReduceOp
}

func one(int) int   { return 1 }
func all(p int) int { return p }

var bothPlaces = []Place{OutOfPlace, InPlace}

// root of the collectives that have one.
const root = 0

// collectives are in the order of nccl-tests' table.
var collectives = []collective{
	{
		name: "allreduce", reduces: true, root: -1, places: bothPlaces,
		sendParts: one, recvParts: one, sizeParts: one,
		busFactor: func(p float64) float64 { return 2 * (p - 1) / p },
		origin:    func(_, _, part int) (int, int) { return 0, part },
		submit: func(c comm.Communicator, w work) error {
			return c.AllReduce(w.send, w.recv, w.count, w.dt, w.op)
		},
	},
	{
		name: "allgather", root: -1, places: bothPlaces,
		sendParts: one, recvParts: all, sizeParts: all,
		busFactor: oneShareStays,
		origin:    func(_, _, part int) (int, int) { return part, 0 },
		submit: func(c comm.Communicator, w work) error {
			return c.AllGather(w.send, w.recv, w.count, w.dt)
		},
	},
	{
		name: "reducescatter", reduces: true, root: -1, places: bothPlaces,
		sendParts: all, recvParts: one, sizeParts: all,
		busFactor: oneShareStays,
		origin:    func(rank, _, _ int) (int, int) { return 0, rank },
		submit: func(c comm.Communicator, w work) error {
			return c.ReduceScatter(w.send, w.recv, w.count, w.dt, w.op)
		},
	},
	{
		name: "alltoall", root: -1, places: []Place{OutOfPlace},
		sendParts: all, recvParts: all, sizeParts: all,
		busFactor: oneShareStays,
		origin:    func(rank, _, part int) (int, int) { return part, rank },
		submit: func(c comm.Communicator, w work) error {
			return c.AllToAll(w.send, w.recv, w.count, w.dt)
		},
	},
	{
		// The contract's broadcast has a single buffer.
		name: "broadcast", root: root, places: []Place{InPlace},
		sendParts: one, recvParts: one, sizeParts: one,
		busFactor: whole,
		origin:    func(_, _, part int) (int, int) { return root, part },
		submit: func(c comm.Communicator, w work) error {
			return c.Broadcast(w.recv, w.count, w.dt, root)
		},
	},
	{
		// Every rank sends to the next one and receives from the one before.
		name: "sendrecv", root: -1, places: []Place{OutOfPlace},
		sendParts: one, recvParts: one, sizeParts: one,
		busFactor: whole,
		origin:    func(rank, p, part int) (int, int) { return (rank + p - 1) % p, part },
		submit: func(c comm.Communicator, w work) error {
			rank, p := c.Rank(), c.WorldSize()
			return c.Group(
				comm.SendCall(w.send, w.count, w.dt, (rank+1)%p, 0),
				comm.RecvCall(w.recv, w.count, w.dt, (rank+p-1)%p, 0))
		},
	},
}

// oneShareStays: of p equal shares, p-1 travel.
func oneShareStays(p float64) float64 { return (p - 1) / p }

// whole: everything travels once.
func whole(float64) float64 { return 1 }
