package comm

// SendPart returns the address and the length in bytes of the data that a call of rank sends to a rank, possibly
// itself. For a reduction it is the input of that rank's result. ok is false if the operation sends that rank
// nothing, not even an empty part.
//
// With [Call.RecvPart] it defines an operation: the part that rank a's call sends to rank b goes where b's call
// receives from a.
func (c *Call) SendPart(rank, to int) (address uintptr, bytes int, ok bool) {
	address = c.Send
	bytes = c.Bytes()
	ok = true
	switch c.Op {
	case OpReduceScatter, OpAllToAll:
		address += uintptr(to * bytes)
	case OpAllGatherV:
		bytes = c.RecvCounts[rank] * c.DType.Size()
	case OpAllToAllV:
		address += uintptr(c.SendDispls[to] * c.DType.Size())
		bytes = c.SendCounts[to] * c.DType.Size()
	case OpBroadcast:
		ok = rank == c.Peer
	case OpScatter:
		address += uintptr(to * bytes)
		ok = rank == c.Peer
	case OpReduce, OpGather, OpSend:
		ok = to == c.Peer
	case OpRecv:
		ok = false
	}
	return address, bytes, ok
}

// RecvPart returns the address and the length in bytes of the data that a call of rank receives from a rank, possibly
// itself. For a reduction it is the part for the result, whatever from is. ok is false if the operation receives
// nothing from that rank.
func (c *Call) RecvPart(rank, from int) (address uintptr, bytes int, ok bool) {
	address = c.Recv
	bytes = c.Bytes()
	ok = true
	switch c.Op {
	case OpAllGather, OpAllToAll:
		address += uintptr(from * bytes)
	case OpAllGatherV, OpAllToAllV:
		address += uintptr(c.RecvDispls[from] * c.DType.Size())
		bytes = c.RecvCounts[from] * c.DType.Size()
	case OpGather:
		address += uintptr(from * bytes)
		ok = rank == c.Peer
	case OpReduce:
		ok = rank == c.Peer
	case OpBroadcast, OpScatter, OpRecv:
		ok = from == c.Peer
	case OpSend:
		ok = false
	}
	return address, bytes, ok
}
