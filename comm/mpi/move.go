package mpi

import "github.com/tutti-go/tutti/runtime/cpu"

// stepExchange sends every rank its part of send and receives every rank's
// part of recv: all collectives that only move data, but for short broadcasts,
// are an exchange with some layout of parts.
func stepExchange(e *engine, o *op) (bool, error) {
	if o.phase == 1 {
		return true, nil
	}
	for i := 1; i < e.size; i++ {
		src := (e.rank + e.size - i) % e.size
		if err := e.recvBytes(o, o.tag, o.recv+uintptr(o.recvAt[src]), o.recvBytes[src], src); err != nil {
			return false, err
		}
	}
	for i := 1; i < e.size; i++ {
		dest := (e.rank + i) % e.size
		if err := e.sendBytes(o, o.tag, o.send+uintptr(o.sendAt[dest]), o.sendBytes[dest], dest); err != nil {
			return false, err
		}
	}
	cpu.Copy(o.recv+uintptr(o.recvAt[e.rank]), o.send+uintptr(o.sendAt[e.rank]), o.recvBytes[e.rank], false)
	return false, nil
}

// stepTree broadcasts along a binomial tree: in the order that starts at the
// root, rank v receives from v without its lowest set bit, then sends to v
// plus every lower power of two.
func stepTree(e *engine, o *op) (bool, error) {
	bytes := o.total * o.dt.Size()
	place := (e.rank - o.peer + e.size) % e.size
	below := place & -place
	if place == 0 {
		for below = 1; below < e.size; below *= 2 {
		}
	}
	switch o.phase {
	case 0:
		if place == 0 {
			return false, nil
		}
		return false, e.recvBytes(o, o.tag, o.recv, bytes, (place-below+o.peer)%e.size)
	case 1:
		for step := below / 2; step > 0; step /= 2 {
			if place+step >= e.size {
				continue
			}
			if err := e.sendBytes(o, o.tag, o.recv, bytes, (place+step+o.peer)%e.size); err != nil {
				return false, err
			}
		}
		return false, nil
	}
	return true, nil
}

// stepSend sends a user's message.
func stepSend(e *engine, o *op) (bool, error) {
	if o.phase == 1 {
		return true, nil
	}
	return false, e.message(o, "MPI_Isend", e.lib.Isend, e.lib.IsendC, o.send, false)
}

// stepRecv receives a user's message.
func stepRecv(e *engine, o *op) (bool, error) {
	if o.phase == 1 {
		return true, nil
	}
	return false, e.message(o, "MPI_Irecv", e.lib.Irecv, e.lib.IrecvC, o.recv, true)
}
