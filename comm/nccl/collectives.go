package nccl

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// AllReduce implements [comm.Communicator].
func (c *Comm) AllReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	if err := c.Check.AllReduce(send, recv, count, dt, op); err != nil {
		return c.group.Refuse(err)
	}
	return c.submit("allreduce", count, c.allReduce(send, recv, count, dt, op))
}

func (c *Comm) allReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) call {
	n := newCall("ncclAllReduce", c.lib.sym.AllReduce,
		send, recv, uintptr(count), uintptr(typeTable[dt]), c.nativeOp(op))
	n.kind = reductionOnWindows(windowAllReduce, dt, op)
	n.sendBytes, n.recvBytes = count*dt.Size(), count*dt.Size()
	return n
}

// Broadcast implements [comm.Communicator].
func (c *Comm) Broadcast(buf uintptr, count int, dt dtype.DType, root int) error {
	if err := c.Check.Broadcast(buf, count, dt, root); err != nil {
		return c.group.Refuse(err)
	}
	return c.submit("broadcast", count, c.broadcast(buf, count*dt.Size(), root))
}

func (c *Comm) broadcast(buf uintptr, bytes, root int) call {
	return newCall("ncclBroadcast", c.lib.sym.Broadcast, buf, buf, uintptr(bytes), nativeByte, uintptr(root))
}

// Reduce implements [comm.Communicator].
func (c *Comm) Reduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp, root int) error {
	if err := c.Check.Reduce(send, recv, count, dt, op, root); err != nil {
		return c.group.Refuse(err)
	}
	return c.submit("reduce", count, c.reduce(send, recv, count, dt, op, root))
}

func (c *Comm) reduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp, root int) call {
	return newCall("ncclReduce", c.lib.sym.Reduce,
		send, recv, uintptr(count), uintptr(typeTable[dt]), c.nativeOp(op), uintptr(root))
}

// AllGather implements [comm.Communicator].
func (c *Comm) AllGather(send, recv uintptr, count int, dt dtype.DType) error {
	if err := c.Check.AllGather(send, recv, count, dt); err != nil {
		return c.group.Refuse(err)
	}
	return c.submit("allgather", count, c.allGather(send, recv, count*dt.Size()))
}

func (c *Comm) allGather(send, recv uintptr, bytes int) call {
	n := newCall("ncclAllGather", c.lib.sym.AllGather, send, recv, uintptr(bytes), nativeByte)
	n.kind = windowAllGather
	n.sendBytes, n.recvBytes = bytes, bytes*c.WorldSize()
	return n
}

// ReduceScatter implements [comm.Communicator].
func (c *Comm) ReduceScatter(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	if err := c.Check.ReduceScatter(send, recv, count, dt, op); err != nil {
		return c.group.Refuse(err)
	}
	return c.submit("reducescatter", count, c.reduceScatter(send, recv, count, dt, op))
}

func (c *Comm) reduceScatter(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) call {
	n := newCall("ncclReduceScatter", c.lib.sym.ReduceScatter,
		send, recv, uintptr(count), uintptr(typeTable[dt]), c.nativeOp(op))
	n.kind = reductionOnWindows(windowReduceScatter, dt, op)
	n.sendBytes, n.recvBytes = count*dt.Size()*c.WorldSize(), count*dt.Size()
	return n
}

// AllToAll implements [comm.Communicator].
func (c *Comm) AllToAll(send, recv uintptr, count int, dt dtype.DType) error {
	if err := c.Check.AllToAll(send, recv, count, dt); err != nil {
		return c.group.Refuse(err)
	}
	bytes := count * dt.Size()
	if c.lib.sym.AllToAll.Found() {
		return c.submit("alltoall", count, newCall("ncclAlltoAll", c.lib.sym.AllToAll,
			send, recv, uintptr(bytes), nativeByte))
	}
	return c.together("alltoall", func(m *messages) {
		for r := range c.WorldSize() {
			m.send(send+uintptr(r*bytes), bytes, r)
			m.recv(recv+uintptr(r*bytes), bytes, r)
		}
	})
}

// AllGatherV implements [comm.Communicator].
func (c *Comm) AllGatherV(send, recv uintptr, counts, displs []int, dt dtype.DType) error {
	if err := c.Check.AllGatherV(send, recv, counts, displs, dt); err != nil {
		return c.group.Refuse(err)
	}
	size := dt.Size()
	return c.together("allgatherv", func(m *messages) {
		for r := range c.WorldSize() {
			to := recv + uintptr(displs[r]*size)
			if r == c.Rank() && to == send {
				continue // in place
			}
			m.send(send, counts[c.Rank()]*size, r)
			m.recv(to, counts[r]*size, r)
		}
	})
}

// AllToAllV implements [comm.Communicator].
func (c *Comm) AllToAllV(send uintptr, sendCounts, sendDispls []int, recv uintptr, recvCounts, recvDispls []int, dt dtype.DType) error {
	if err := c.Check.AllToAllV(send, sendCounts, sendDispls, recv, recvCounts, recvDispls, dt); err != nil {
		return c.group.Refuse(err)
	}
	size := dt.Size()
	return c.together("alltoallv", func(m *messages) {
		for r := range c.WorldSize() {
			m.send(send+uintptr(sendDispls[r]*size), sendCounts[r]*size, r)
			m.recv(recv+uintptr(recvDispls[r]*size), recvCounts[r]*size, r)
		}
	})
}

// Gather implements [comm.Communicator].
func (c *Comm) Gather(send, recv uintptr, count int, dt dtype.DType, root int) error {
	if err := c.Check.Gather(send, recv, count, dt, root); err != nil {
		return c.group.Refuse(err)
	}
	bytes := count * dt.Size()
	if c.lib.sym.Gather.Found() {
		return c.submit("gather", count, newCall("ncclGather", c.lib.sym.Gather,
			send, recv, uintptr(bytes), nativeByte, uintptr(root)))
	}
	return c.together("gather", func(m *messages) {
		if c.Rank() != root {
			m.send(send, bytes, root)
			return
		}
		m.fromAll(recv, bytes, send)
	})
}

// fromAll adds what a gather's root does.
func (m *messages) fromAll(recv uintptr, bytes int, own uintptr) {
	for r := range m.c.WorldSize() {
		to := recv + uintptr(r*bytes)
		if r == m.c.Rank() {
			if to == own {
				continue // in place
			}
			m.send(own, bytes, r)
		}
		m.recv(to, bytes, r)
	}
}

// Scatter implements [comm.Communicator].
func (c *Comm) Scatter(send, recv uintptr, count int, dt dtype.DType, root int) error {
	if err := c.Check.Scatter(send, recv, count, dt, root); err != nil {
		return c.group.Refuse(err)
	}
	bytes := count * dt.Size()
	if c.lib.sym.Scatter.Found() {
		return c.submit("scatter", count, newCall("ncclScatter", c.lib.sym.Scatter,
			send, recv, uintptr(bytes), nativeByte, uintptr(root)))
	}
	return c.together("scatter", func(m *messages) {
		if c.Rank() != root {
			m.recv(recv, bytes, root)
			return
		}
		m.toAll(send, bytes, recv)
	})
}

// toAll adds what a scatter's root does.
func (m *messages) toAll(send uintptr, bytes int, own uintptr) {
	for r := range m.c.WorldSize() {
		from := send + uintptr(r*bytes)
		if r == m.c.Rank() {
			if from == own {
				continue // in place
			}
			m.recv(own, bytes, r)
		}
		m.send(from, bytes, r)
	}
}

// Send implements [comm.Communicator]; the tag is ignored.
func (c *Comm) Send(buf uintptr, count int, dt dtype.DType, dest int, _ uint32) error {
	if err := c.Check.Send(buf, count, dt, dest); err != nil {
		return c.group.Refuse(err)
	}
	return c.together("send", func(m *messages) { m.send(buf, count*dt.Size(), dest) })
}

// Recv implements [comm.Communicator]; the tag is ignored. NCCL does not tell
// when the message has another length.
func (c *Comm) Recv(buf uintptr, count int, dt dtype.DType, src int, _ uint32) error {
	if err := c.Check.Recv(buf, count, dt, src); err != nil {
		return c.group.Refuse(err)
	}
	return c.together("recv", func(m *messages) { m.recv(buf, count*dt.Size(), src) })
}
