package mpi

import (
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Reductions combine the ranks' data on the host, in rank order, with the same
// kernel as comm/local. The result therefore does not depend on the MPI
// library, the number of messages or who receives first, and is the same on
// every rank to the last bit. Two schedules serve all of them:
//
//   - whole: everybody sends everything to whom the result is for. One step,
//     for messages where latency counts.
//   - by shares: rank r receives and reduces share r, then sends it on to whom
//     the result is for. Two steps, each rank sends and receives 2(P-1)/P of
//     the data, which is the least possible (Patarasuk and Yuan, "Bandwidth
//     optimal all-reduce algorithms for clusters of workstations", 2009).

// wholeLimit is how many bytes a rank receives at most in the whole schedule.
const wholeLimit = 512 << 10

// blockBytes is how much data is reduced at once by shares. Longer buffers are
// cut up, so that working memory is bounded, stays in the caches, and one
// block's messages overlap with the next one's arithmetic.
const blockBytes = 4 << 20

// cacheLine is the alignment of shares and of working memory, in bytes.
const cacheLine = 64

func roundUp(n, unit int) int { return (n + unit - 1) / unit * unit }

// stepWhole runs the whole schedule.
func stepWhole(e *engine, o *op) (bool, error) {
	receives := o.peer == everybody || o.peer == e.rank
	bytes := o.total * o.dt.Size()
	if o.phase == 1 {
		if receives {
			o.dst[0] = o.recv
			cpu.Reduce(o.dst[:], o.srcs, o.total, o.dt, o.red, false)
		}
		return true, nil
	}
	if receives {
		if err := e.recvOperands(o, bytes, 0); err != nil {
			return false, err
		}
		o.srcs[e.rank] = o.send
	}
	for i := 1; i < e.size; i++ {
		dest := (e.rank + i) % e.size
		if o.peer != everybody && o.peer != dest {
			continue
		}
		if err := e.sendBytes(o, o.tag, o.send, bytes, dest); err != nil {
			return false, err
		}
	}
	return false, nil
}

// stepShares runs the schedule by shares.
func stepShares(e *engine, o *op) (bool, error) {
	switch o.phase {
	case 0:
		return false, e.exchangeShares(o)
	case 1:
		o.dst[0] = o.result(e.rank)
		cpu.Reduce(o.dst[:], o.srcs, o.length(e.rank), o.dt, o.red, false)
		return false, e.spreadShares(o)
	}
	return true, nil
}

// length is the number of elements in rank r's share.
func (o *op) length(r int) int { return max(0, min(o.share, o.total-r*o.share)) }

// result is where this rank puts its share of the result.
func (o *op) result(rank int) uintptr {
	switch o.peer {
	case nobody:
		return o.recv
	case everybody, rank:
		return o.recv + uintptr(rank*o.stride*o.dt.Size())
	}
	return o.memory.address // in place of an operand
}

// exchangeShares sends every rank its share of this rank's data.
func (e *engine) exchangeShares(o *op) error {
	size := o.dt.Size()
	spare := uintptr(0)
	if (o.peer == everybody || o.peer == nobody) && !o.reads.overlaps(o.writes) {
		spare = o.result(e.rank)
	}
	if err := e.recvOperands(o, o.length(e.rank)*size, spare); err != nil {
		return err
	}
	o.srcs[e.rank] = o.send + uintptr(e.rank*o.stride*size)
	for i := 1; i < e.size; i++ {
		dest := (e.rank + i) % e.size
		if err := e.sendBytes(o, o.tag, o.send+uintptr(dest*o.stride*size), o.length(dest)*size, dest); err != nil {
			return err
		}
	}
	return nil
}

// recvOperands receives bytes from every other rank and notes where in o.srcs.
// They go to working memory, one of them to spare if there is such a place.
func (e *engine) recvOperands(o *op, bytes int, spare uintptr) error {
	next := o.memory.address
	for i := 1; i < e.size; i++ {
		src := (e.rank + e.size - i) % e.size
		buffer := spare
		if spare = 0; buffer == 0 {
			buffer = next
			next += uintptr(roundUp(bytes, cacheLine))
		}
		o.srcs[src] = buffer
		if err := e.recvBytes(o, o.tag, buffer, bytes, src); err != nil {
			return err
		}
	}
	return nil
}

// spreadShares sends this rank's share of the result to whom it is for, and
// receives the others'.
func (e *engine) spreadShares(o *op) error {
	size := o.dt.Size()
	if o.peer == everybody || o.peer == e.rank {
		for i := 1; i < e.size; i++ {
			src := (e.rank + e.size - i) % e.size
			if err := e.recvBytes(o, o.tag+1, o.recv+uintptr(src*o.stride*size), o.length(src)*size, src); err != nil {
				return err
			}
		}
	}
	if o.peer == nobody || o.peer == e.rank {
		return nil
	}
	for i := 1; i < e.size; i++ {
		dest := (e.rank + i) % e.size
		if o.peer != everybody && o.peer != dest {
			continue
		}
		if err := e.sendBytes(o, o.tag+1, o.dst[0], o.length(e.rank)*size, dest); err != nil {
			return err
		}
	}
	return nil
}
