package bench

import "github.com/tutti-go/tutti/comm"

// Collective is one that can be measured, by its operation; OpSend stands for a ring, in which every
// rank sends to the next one and receives from the one before. A buffer has parts of Count elements
// each. In place, a smaller buffer is the rank's own part of the larger one.
type Collective struct{ comm.Op }

// Collectives are in the order of nccl-tests' table.
func Collectives() []Collective {
	return []Collective{
		{comm.OpAllReduce},
		{comm.OpAllGather},
		{comm.OpReduceScatter},
		{comm.OpAllToAll},
		{comm.OpBroadcast},
		{comm.OpSend},
	}
}

// String is what the command line calls it.
func (k Collective) String() string {
	if k.Op == comm.OpSend {
		return "sendrecv"
	}
	return k.Op.String()
}

// Places are the forms it has; the first is measured by default.
func (k Collective) Places() []Place {
	switch k.Op {
	case comm.OpBroadcast: // the contract's has a single buffer
		return []Place{InPlace}
	case comm.OpAllToAll, comm.OpSend:
		return []Place{OutOfPlace}
	}
	return []Place{OutOfPlace, InPlace}
}

// root is the root of a collective, -1 if it has none.
func (k Collective) root() int {
	if k.HasRoot() {
		return 0
	}
	return -1
}

// parts are the parts of a rank's buffers among p ranks.
func (k Collective) parts(p int) (send, recv int) {
	switch k.Op {
	case comm.OpAllGather:
		return 1, p
	case comm.OpReduceScatter:
		return p, 1
	case comm.OpAllToAll:
		return p, p
	}
	return 1, 1
}

// sizeParts is how many parts the "size" of nccl-tests counts: those of the larger buffer.
func (k Collective) sizeParts(p int) int {
	send, recv := k.parts(p)
	return max(send, recv)
}

// busFactor turns algorithm bandwidth into bus bandwidth: what a link carries
// (nccl-tests, doc/PERFORMANCE.md).
func (k Collective) busFactor(p float64) float64 {
	switch k.Op {
	case comm.OpAllReduce:
		return 2 * (p - 1) / p
	case comm.OpBroadcast, comm.OpSend: // everything travels once
		return 1
	}
	return (p - 1) / p // of p equal shares, one stays
}

// origin says whose part (and which of its parts) arrives as the given part of rank's
// result among p ranks; for a reduction only the part counts.
func (k Collective) origin(rank, p, part int) (from, fromPart int) {
	switch k.Op {
	case comm.OpReduceScatter:
		return 0, rank
	case comm.OpAllGather:
		return part, 0
	case comm.OpAllToAll:
		return part, rank
	case comm.OpSend:
		return (rank + p - 1) % p, part
	}
	return 0, part // of the root
}

// submission returns what starts the operation that a call describes.
func (k Collective) submission(c comm.Communicator, call comm.Call) func() error {
	if k.Op != comm.OpSend {
		return func() error { return call.Make(c) }
	}
	rank := c.Rank()
	p := c.WorldSize()
	ring := []comm.Call{
		comm.SendCall(call.Send, call.Count, call.DType, (rank+1)%p, 0),
		comm.RecvCall(call.Recv, call.Count, call.DType, (rank+p-1)%p, 0),
	}
	return func() error { return c.Group(ring...) }
}
