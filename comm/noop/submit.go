package noop

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// Submit implements [comm.Backend]: it does what can be done at once and keeps
// the rest.
func (c *communicator) Submit(call comm.Call) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.usable(); err != nil {
		return err
	}
	if len(c.waiting) == 0 && !call.Op.Message() {
		simplify(&call)
		return c.do(&call)
	}
	c.keep(call)
	return c.progress()
}

// SubmitTogether implements [comm.Backend]. The calls of a group are not ordered
// among themselves. Messages go first, lest a collective waits behind one whose
// partner comes after it.
func (c *communicator) SubmitTogether(calls []comm.Call) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.usable(); err != nil {
		return err
	}
	for _, messages := range []bool{true, false} {
		for _, call := range calls {
			if call.Op.Message() == messages {
				c.keep(call)
			}
		}
	}
	return c.progress()
}

// keep puts a call behind those that wait.
func (c *communicator) keep(call comm.Call) {
	simplify(&call)
	c.waiting = append(c.waiting, call)
}

// simplify turns a V-collective into what it is when there is one rank: a copy. So
// its lists, which belong to the caller, are not needed later.
func simplify(call *comm.Call) {
	if call.RecvCounts == nil {
		return
	}
	send, _, _ := call.SendPart(0, 0)
	recv, _, _ := call.RecvPart(0, 0)
	*call = comm.AllToAllCall(send, recv, call.RecvCounts[0], call.DType)
}

// do does a collective: it copies, on the runtime's stream. Any reduction of
// Bool makes bytes that are not zero 1.
func (c *communicator) do(call *comm.Call) error {
	if call.Op.Reduces() && call.DType == dtype.Bool {
		return c.copyTruth(call.Recv, call.Send, call.Count)
	}
	return c.copy(call.Recv, call.Send, call.Bytes())
}

func (c *communicator) copy(dst, src uintptr, bytes int) error {
	if bytes == 0 || dst == src {
		return nil
	}
	return c.rt.Copy(dst, src, bytes)
}

// copyTruth reduces Bool elements. It does so on the host, piece by piece, as
// no runtime has a kernel for it.
func (c *communicator) copyTruth(dst, src uintptr, count int) error {
	piece := make([]byte, min(count, 64<<10))
	for at := 0; at < count; at += len(piece) {
		piece = piece[:min(len(piece), count-at)]
		if err := c.rt.CopyOut(piece, src+uintptr(at)); err != nil {
			return err
		}
		for i, b := range piece {
			piece[i] = min(b, 1)
		}
		if err := c.rt.CopyIn(dst+uintptr(at), piece); err != nil {
			return err
		}
	}
	return nil
}

// progress does everything that waits and can be done: messages whose partner
// is there, and collectives with no message before them. A collective never
// overtakes a message, whose data it may need; a message does overtake
// collectives that wait for its partner, or they would wait for ever.
//
// An error breaks the communicator: what failed may be another submission's.
func (c *communicator) progress() error {
	for i := 0; i < len(c.waiting); {
		call, other := c.waiting[i], c.partner(i)
		var err error
		switch {
		case other >= 0:
			first := c.waiting[other]
			c.remove(i)
			c.remove(other)
			err = c.deliver(&first, &call)
			i = 0 // what waited behind the two may go on
		case i == 0 && !call.Op.Message():
			c.remove(0)
			err = c.do(&call)
		default:
			i++
		}
		if err != nil {
			return c.fail(err)
		}
	}
	return nil
}

// partner returns the place of the first message before number i that is the
// other end of it, or -1.
func (c *communicator) partner(i int) int {
	call := c.waiting[i]
	if !call.Op.Message() {
		return -1
	}
	for j, other := range c.waiting[:i] {
		if other.Op.Message() && other.Op != call.Op && other.Tag == call.Tag {
			return j
		}
	}
	return -1
}

// remove takes call i out of those that wait.
func (c *communicator) remove(i int) {
	c.waiting = append(c.waiting[:i], c.waiting[i+1:]...)
	c.announce()
}

// deliver copies a message, given its two ends.
func (c *communicator) deliver(send, recv *comm.Call) error {
	if send.Op == comm.OpRecv {
		send, recv = recv, send
	}
	if err := comm.AgreeOnMessage(0, send, 0, recv); err != nil {
		return err
	}
	return c.copy(recv.Recv, send.Send, recv.Bytes())
}
