package noop

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// kind says what an operation is.
type kind uint8

const (
	collective kind = iota // copies src to dst
	send                   // copies src to the dst of a recv
	recv
)

// operation is something that was submitted.
type operation struct {
	kind     kind
	name     string // of a collective
	src, dst uintptr
	count    int
	dt       dtype.DType
	tag      uint32
	truth    bool // bytes that are not zero become 1, as in any reduction of Bool
}

func (o operation) isMessage() bool { return o.kind != collective }

func (o operation) bytes() int { return o.count * o.dt.Size() }

// submit does what can be done at once and keeps the rest. err is what the
// check of the arguments found.
func (c *communicator) submit(op operation, err error) error {
	if err != nil {
		return c.group.Refuse(err)
	}
	inGroup := c.group.Enter()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.usableLocked(op.describe()); err != nil {
		return c.group.Refuse(err)
	}
	switch {
	case inGroup:
		c.held = append(c.held, op)
		return nil
	case len(c.waiting) == 0 && !op.isMessage():
		return c.do(op)
	}
	c.waiting = append(c.waiting, op)
	return c.progress()
}

// describe returns the name of the method.
func (o operation) describe() string {
	switch o.kind {
	case send:
		return "send"
	case recv:
		return "recv"
	}
	return o.name
}

// do copies, on the runtime's stream.
func (c *communicator) do(op operation) error {
	var err error
	switch {
	case op.count == 0:
	case op.truth:
		err = c.copyTruth(op)
	case op.src != op.dst:
		err = c.rt.Copy(op.dst, op.src, op.bytes())
	}
	if err != nil {
		return c.check.Fail(op.describe(), err)
	}
	return nil
}

// copyTruth reduces Bool elements. It does so on the host, piece by piece, as
// no runtime has a kernel for it.
func (c *communicator) copyTruth(op operation) error {
	piece := make([]byte, min(op.count, 64<<10))
	for at := 0; at < op.count; at += len(piece) {
		piece = piece[:min(len(piece), op.count-at)]
		if err := c.rt.CopyOut(piece, op.src+uintptr(at)); err != nil {
			return err
		}
		for i, b := range piece {
			piece[i] = min(b, 1)
		}
		if err := c.rt.CopyIn(op.dst+uintptr(at), piece); err != nil {
			return err
		}
	}
	return nil
}

// progress does everything that waits and can be done: messages whose partner
// is there, and collectives with no message before them. A collective never
// overtakes a message, whose data it may need; a message does overtake
// collectives that wait for its partner, or they would wait for ever.
func (c *communicator) progress() error {
	for i := 0; i < len(c.waiting); {
		op := c.waiting[i]
		if op.kind == collective {
			if i > 0 {
				i++
				continue
			}
			c.remove(0)
			if err := c.do(op); err != nil {
				return err
			}
			continue
		}
		first := c.partner(i)
		if first < 0 {
			i++
			continue
		}
		from, to := op, c.waiting[first]
		if op.kind == recv {
			from, to = to, from
		}
		c.remove(i)
		c.remove(first)
		i = 0 // what waited behind the two may go on
		if err := c.deliver(from, to); err != nil {
			return err
		}
	}
	return nil
}

// partner returns the place of the first message before number i that is the
// other end of it, or -1.
func (c *communicator) partner(i int) int {
	op := c.waiting[i]
	for j, other := range c.waiting[:i] {
		if other.isMessage() && other.kind != op.kind && other.tag == op.tag {
			return j
		}
	}
	return -1
}

// remove takes operation i out of those that wait.
func (c *communicator) remove(i int) {
	c.waiting = append(c.waiting[:i], c.waiting[i+1:]...)
	c.announce()
}

// deliver copies a message.
func (c *communicator) deliver(from, to operation) error {
	if from.count != to.count || from.dt != to.dt {
		err := fmt.Errorf("%w: tag %d: sent %d %v, to be received %d %v",
			comm.ErrMismatch, from.tag, from.count, from.dt, to.count, to.dt)
		c.fail(err)
		return c.check.Fail(to.describe(), err)
	}
	to.src = from.src
	return c.do(to)
}
