package distributed

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// BroadcastBytes returns root's data on every rank: a configuration, a random seed, an encoded checkpoint. The other
// ranks' data is ignored. The result is ready when BroadcastBytes returns.
//
// Like the other functions of this file it goes through memory of rt, which c
// reaches ([comm.ErrDevice] otherwise), and is not for hot paths: it sends a length
// first, and the host waits twice. Memory that c may still write after an error is not
// freed.
func BroadcastBytes(ctx context.Context, rt runtime.Runtime, c comm.Communicator, data []byte,
	root int) ([]byte, error) {
	const op = "broadcast bytes"
	m, err := newMail(op, rt, c)
	if err != nil {
		return nil, err
	}
	if root < 0 || root >= c.WorldSize() {
		return nil, base.OpError(op, fmt.Errorf("%w: root %d is not in [0, %d)", comm.ErrArgument, root, c.WorldSize()))
	}
	word := binary.LittleEndian.AppendUint64(nil, uint64(len(data)))
	word = m.move(ctx, word, 0, len(word), func(p uintptr) []comm.Call {
		return []comm.Call{comm.BroadcastCall(p, 1, dtype.I64, root)}
	}, len(word))
	n := m.length(word, 0, root)
	if c.Rank() != root {
		data = nil
	}
	out := m.move(ctx, data, 0, n, func(p uintptr) []comm.Call {
		return []comm.Call{comm.BroadcastCall(p, n, dtype.U8, root)}
	}, n)
	if m.err != nil {
		return nil, m.err
	}
	return out, nil
}

// AllGatherBytes returns every rank's data on every rank, in rank order. The
// lengths may differ.
func AllGatherBytes(ctx context.Context, rt runtime.Runtime, c comm.Communicator, data []byte) ([][]byte, error) {
	m, err := newMail("allgather bytes", rt, c)
	if err != nil {
		return nil, err
	}
	counts, displs, total := m.lengths(ctx, len(data))
	out := m.move(ctx, data, displs[c.Rank()], total, func(p uintptr) []comm.Call {
		return []comm.Call{comm.AllGatherVCall(p+uintptr(displs[c.Rank()]), p, counts, displs, dtype.U8)}
	}, total)
	return m.parts(out, counts)
}

// GatherBytes returns every rank's data on root, in rank order, and nil on the
// others: metrics, logs, the shards of a checkpoint. The lengths may differ.
func GatherBytes(ctx context.Context, rt runtime.Runtime, c comm.Communicator, data []byte,
	root int) ([][]byte, error) {
	const op = "gather bytes"
	m, err := newMail(op, rt, c)
	if err != nil {
		return nil, err
	}
	if root < 0 || root >= c.WorldSize() {
		return nil, base.OpError(op, fmt.Errorf("%w: root %d is not in [0, %d)", comm.ErrArgument, root, c.WorldSize()))
	}
	counts, displs, total := m.lengths(ctx, len(data))
	if c.Rank() != root {
		m.move(ctx, data, 0, len(data), func(p uintptr) []comm.Call {
			return []comm.Call{comm.SendCall(p, len(data), dtype.U8, root, 0)}
		}, 0)
		return nil, m.err
	}
	out := m.move(ctx, data, displs[root], total, func(p uintptr) []comm.Call {
		var calls []comm.Call
		for r, n := range counts {
			if r != root && n > 0 {
				calls = append(calls, comm.RecvCall(p+uintptr(displs[r]), n, dtype.U8, r, 0))
			}
		}
		return calls
	}, total)
	return m.parts(out, counts)
}

// ScatterBytes returns root's parts[r] on rank r: data that differs between ranks, such as the state of a joining rank.
// The other ranks' parts are ignored. The lengths may differ.
func ScatterBytes(ctx context.Context, rt runtime.Runtime, c comm.Communicator, parts [][]byte,
	root int) ([]byte, error) {
	const op = "scatter bytes"
	m, err := newMail(op, rt, c)
	if err != nil {
		return nil, err
	}
	size := c.WorldSize()
	me := c.Rank()
	if root < 0 || root >= size || me == root && len(parts) != size {
		return nil, base.OpError(op, fmt.Errorf("%w: %d parts of root %d, want %d", comm.ErrArgument, len(parts), root, size))
	}
	words := make([]byte, 8*size)
	if me == root {
		for r, part := range parts {
			binary.LittleEndian.PutUint64(words[8*r:], uint64(len(part)))
		}
	}
	words = m.move(ctx, words, 0, len(words), func(p uintptr) []comm.Call {
		return []comm.Call{comm.BroadcastCall(p, size, dtype.I64, root)}
	}, len(words))
	n := m.length(words, me, root)
	if me != root {
		out := m.move(ctx, nil, 0, n, func(p uintptr) []comm.Call {
			return []comm.Call{comm.RecvCall(p, n, dtype.U8, root, 0)}
		}, n)
		return out, m.err
	}
	for r, part := range parts { // one after the other: the root has memory for one
		if r != root {
			m.move(ctx, part, 0, len(part), func(p uintptr) []comm.Call {
				return []comm.Call{comm.SendCall(p, len(part), dtype.U8, r, 0)}
			}, 0)
		}
	}
	return parts[root], m.err
}

// mail moves bytes of the host through memory of a device. Its first error
// sticks.
type mail struct {
	op    string            // errors begin with it
	rt    runtime.Runtime   // of the memory that travels
	c     comm.Communicator // among whose ranks it travels
	order base.Order        // has c's work and the compute stream wait for each other
	err   error             // the first one; nil: none yet
}

func newMail(op string, rt runtime.Runtime, c comm.Communicator) (*mail, error) {
	if err := base.Reaches(rt, c); err != nil {
		return nil, base.OpError(op, err)
	}
	return &mail{
		op:    op,
		rt:    rt,
		c:     c,
		order: base.NewOrder(rt, c),
	}, nil
}

// move allocates n bytes, copies in to their place at, makes the calls, and returns the first wanted bytes of
// what there is then. The runtime's memory comes first: where a rank announces more than there is, that is an error.
func (m *mail) move(ctx context.Context, in []byte, offset, n int, calls func(p uintptr) []comm.Call,
	wanted int) (out []byte) {
	if m.err != nil {
		return nil
	}
	if n == 0 {
		return []byte{}
	}
	p, err := m.rt.Allocate(n)
	if err != nil {
		m.err = base.OpError(m.op, err)
		return
	}
	err = func() error {
		if len(in) > 0 {
			if err := m.rt.CopyIn(p+uintptr(offset), in); err != nil {
				return err
			}
		}
		if err := m.order.Around(ctx, func() error { return m.c.Group(calls(p)...) }); err != nil {
			return err
		}
		if err := m.order.HostAfterAll(ctx); err != nil || wanted == 0 {
			return err
		}
		out = make([]byte, wanted)
		return m.rt.CopyOut(out, p)
	}()
	if drained := m.order.DrainToFree(); drained != nil {
		err = cmp.Or(err, drained)
	} else {
		err = errors.Join(err, m.rt.Deallocate(p))
	}
	if err != nil {
		m.err = base.OpError(m.op, err)
		return nil
	}
	return out
}

// lengths exchanges how many bytes each rank has, and returns where they are to
// lie.
func (m *mail) lengths(ctx context.Context, n int) (counts, displs []int, total int) {
	size := m.c.WorldSize()
	offset := 8 * m.c.Rank()
	words := m.move(ctx, binary.LittleEndian.AppendUint64(nil, uint64(n)), offset, 8*size, func(p uintptr) []comm.Call {
		return []comm.Call{comm.AllGatherCall(p+uintptr(offset), p, 1, dtype.I64)}
	}, 8*size)
	counts = make([]int, size)
	displs = make([]int, size)
	for r := range counts {
		counts[r] = m.length(words, r, r)
	}
	return counts, displs, base.Displacements(counts, displs)
}

// mostBytes is more than ranks have, together: lengths that they announce add up below 2^63.
const mostBytes = 1 << 42

// length reads the i-th of the lengths that a rank sent.
func (m *mail) length(words []byte, i, rank int) int {
	if m.err != nil {
		return 0
	}
	n := int64(binary.LittleEndian.Uint64(words[8*i:]))
	if n < 0 || n > mostBytes {
		m.err = base.OpError(m.op, fmt.Errorf("%w: rank %d announces %d bytes", comm.ErrMismatch, rank, n))
		return 0
	}
	return int(n)
}

// parts cuts what was gathered.
func (m *mail) parts(all []byte, counts []int) ([][]byte, error) {
	if m.err != nil {
		return nil, m.err
	}
	parts := make([][]byte, len(counts))
	for r, n := range counts {
		parts[r] = all[:n:n]
		all = all[n:]
	}
	return parts, nil
}
