package nccl

import (
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
)

// call is one native call, ready to be made: its arguments but the last two,
// which are the communicator and the stream in every call that moves data.
type call struct {
	name  string
	fn    dl.Func
	args  [maxArgs + 2]uintptr
	count int

	// A collective that can be done on windows tells which one it is and the
	// lengths of the buffers that its first two arguments are.
	kind                 windowKind
	sendBytes, recvBytes int
}

// maxArgs is how many arguments ncclReduce has, which has most, before the
// last two.
const maxArgs = 6

func newCall(name string, fn dl.Func, args ...uintptr) call {
	n := call{name: name, fn: fn}
	n.count = copy(n.args[:maxArgs], args)
	return n
}

// messages collects native calls. Sends and receives of nothing are left out,
// on both sides.
type messages struct {
	c     *Comm
	calls []call
}

func (m *messages) send(buf uintptr, bytes, dest int) {
	m.add("ncclSend", m.c.lib.sym.Send, buf, bytes, dest)
}

func (m *messages) recv(buf uintptr, bytes, src int) {
	m.add("ncclRecv", m.c.lib.sym.Recv, buf, bytes, src)
}

func (m *messages) add(name string, fn dl.Func, buf uintptr, bytes, peer int) {
	if bytes > 0 {
		m.calls = append(m.calls, newCall(name, fn, buf, uintptr(bytes), nativeByte, uintptr(peer)))
	}
}

// submit makes one native call, now or when the open group ends. A call that
// moves nothing is left out, on every rank.
func (c *Comm) submit(op string, count int, native call) error {
	return c.together(op, func(m *messages) {
		if count > 0 {
			m.calls = append(m.calls, native)
		}
	})
}

// together makes the native calls that add appends as one NCCL group, or adds
// them to the group that this goroutine has open.
func (c *Comm) together(op string, add func(m *messages)) error {
	inside := c.group.Enter()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.usable(op); err != nil {
		return c.group.Refuse(err)
	}
	if inside {
		add(&c.grouped)
		return nil
	}
	add(&c.pending)
	return c.flush(op, &c.pending, c.pick(c.pending.calls))
}

// Group implements [comm.Communicator].
func (c *Comm) Group(submit func() error) error {
	if err := c.usable("group"); err != nil {
		return err
	}
	return c.group.Run(submit, func(err error) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if err != nil {
			c.grouped.calls = c.grouped.calls[:0]
			return nil
		}
		// Ranks may have different numbers of calls in a group, so one call alone
		// does not mean that it is alone on all.
		return c.flush("group", &c.grouped, c.data)
	})
}

// pick chooses the native communicator for what one submission consists of.
func (c *Comm) pick(calls []call) *native {
	if len(calls) == 1 && c.windows.serve(&calls[0]) {
		return c.windows.native.Load()
	}
	return c.data
}

// flush makes native calls, several of them as one NCCL group, and empties the
// list.
func (c *Comm) flush(op string, m *messages, on *native) error {
	calls := m.calls
	m.calls = calls[:0]
	if len(calls) == 0 {
		return nil
	}
	if err := c.usable(op); err != nil {
		return err
	}
	if !on.enter() {
		return c.Fail(op, comm.ErrBroken)
	}
	// NCCL's groups belong to the OS thread; Current keeps the goroutine on it.
	err := c.rt.Current(func() error {
		if len(calls) == 1 {
			return c.invoke(&calls[0], on.handle)
		}
		c.lib.sym.GroupStart.Int()
		var first error
		for i := range calls {
			if first = c.invoke(&calls[i], on.handle); first != nil {
				break
			}
		}
		return errors.Join(first, c.status("ncclGroupEnd", on.handle, c.lib.sym.GroupEnd.Int()))
	})
	on.leave()
	if err != nil {
		return c.breakDown(op, err)
	}
	return nil
}

// invoke makes a call on a native communicator. Its arguments are all words, so
// those that a function does not have do no harm.
func (c *Comm) invoke(n *call, handle uintptr) error {
	a := &n.args
	a[n.count], a[n.count+1] = handle, c.stream.Handle()
	return c.status(n.name, handle, n.fn.Int(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]))
}

// status turns the result of a call into an error.
func (c *Comm) status(name string, handle uintptr, result int32) error {
	if s := Status(result); s != statusSuccess {
		return c.lib.newError(name, s, handle)
	}
	return nil
}
