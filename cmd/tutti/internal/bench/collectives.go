package bench

import "github.com/tutti-go/tutti/comm"

// Collective is a collective that can be measured, by its operation. OpSend stands for a ring, in which every rank
// sends to the next rank and receives from the previous one. A buffer consists of parts of Count elements. In place,
// a smaller buffer is the rank's part of the larger one.
type Collective struct{ comm.Op }

// Collectives returns the collectives in the order of nccl-tests' table.
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

// String is the collective's name on the command line.
func (k Collective) String() string {
	if k.Op == comm.OpSend {
		return "sendrecv"
	}
	return k.Op.String()
}

// Places returns the forms of the collective. The first is measured by default.
func (k Collective) Places() []Place {
	switch k.Op {
	case comm.OpBroadcast: // the contract's broadcast has a single buffer
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

// parts returns the numbers of parts in a rank's buffers among p ranks.
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

// sizeParts is the number of parts in the "size" of nccl-tests: those of the larger buffer.
func (k Collective) sizeParts(p int) int {
	send, recv := k.parts(p)
	return max(send, recv)
}

// busFactor converts algorithm bandwidth to bus bandwidth, the load of a link (nccl-tests, doc/PERFORMANCE.md).
func (k Collective) busFactor(p float64) float64 {
	switch k.Op {
	case comm.OpAllReduce:
		return 2 * (p - 1) / p
	case comm.OpBroadcast, comm.OpSend: // all data travels once
		return 1
	}
	return (p - 1) / p // of p equal shares, one stays
}

// origin returns the rank, and the part of its input, that arrives as the given part of rank's result among p ranks.
// For a reduction only the part counts.
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
	return 0, part // from the root
}

// submission returns a function that starts the operation described by a call.
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
