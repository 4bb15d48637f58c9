package elastic

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"math"
	"slices"
	"strings"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// bind moves the program to a new epoch, and gives those that join the state of the others. These need not wait
// for that: hashes are compared by the first vote.
func (m *Member) bind(ctx context.Context, e *Epoch) error {
	var join, have []int // ranks
	for rank, p := range e.record.Members {
		if p.Fresh {
			join = append(join, rank)
		} else {
			have = append(have, rank)
		}
	}
	if err := m.cfg.Bind(ctx, e); err != nil {
		return err
	}
	var saved []byte
	for i, rank := range join {
		from := have[i%len(have)]
		var err error
		switch e.Comm.Rank() {
		case rank:
			err = m.share(ctx, e, from, nil, true)
		case from:
			if saved == nil && m.cfg.Save != nil {
				saved, err = m.cfg.Save(ctx)
			}
			if err == nil {
				err = m.share(ctx, e, rank, saved, false)
			}
		}
		if err != nil {
			return err
		}
	}
	m.change(func() { m.status.Fresh = false })
	m.publish()
	slog.Info("elastic: epoch", "number", e.Number, "step", m.Steps(), "members", strings.Join(e.Members, ", "))
	h, err := m.cfg.Hash(ctx)
	e.hash = int64(h>>1 | 1) // an allreduce takes the larger of it and 0
	if err == nil && e.Comm.Rank() == 0 && len(e.record.Lost) > 0 {
		norm, normErr := m.residualNorm()
		slog.Warn("elastic: the residuals of lost members are gone", "epoch", e.Number, "lost", strings.Join(e.record.Lost, ", "),
			"norm of this member's residual", norm, "err", normErr)
	}
	return err
}

// agree compares the hashes in a vote.
func (e *Epoch) agree(vote []int64) error {
	hashes := vote[1+len(e.Members):]
	count := map[int64]int{}
	for _, h := range hashes {
		count[h]++
	}
	most := slices.MaxFunc(hashes, func(a, b int64) int { return cmp.Compare(count[a], count[b]) })
	var differ []string
	for rank, h := range hashes {
		if h != most {
			differ = append(differ, printable.Text(e.Members[rank]))
		}
	}
	if len(differ) == 0 {
		return nil
	}
	return fmt.Errorf("elastic: %w: the state of %s is not that of the others at the beginning of epoch %d", comm.ErrMismatch, strings.Join(differ, ", "), e.Number)
}

// castagnoli and IEEE's CRC-32, which processors compute, together detect what a CRC of 64 bits does.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// hash is the two CRC-32 of the tensors.
func (m *Member) hash(context.Context) (uint64, error) {
	var a, b uint32
	for _, t := range m.cfg.Tensors {
		if err := parts(t, func(part []byte) {
			a, b = crc32.Update(a, crc32.IEEETable, part), crc32.Update(b, castagnoli, part)
		}); err != nil {
			return 0, err
		}
	}
	return uint64(a)<<32 | uint64(b), nil
}

// parts calls f with a contiguous tensor in pieces of at most 1 MiB, on the host. A copy of a whole tensor would take as much memory
// again, and a process that is to stop for its garbage collection waits for a copy.
func parts(t *runtime.Tensor, f func(part []byte)) error {
	p, err := t.Ptr()
	rest := t.Len() * t.DType().Size()
	part := make([]byte, min(rest, 1<<20))
	for err == nil && rest > 0 {
		part = part[:min(rest, len(part))]
		if err = t.Runtime().CopyOut(part, p); err == nil {
			f(part)
		}
		p, rest = p+uintptr(len(part)), rest-len(part)
	}
	return err
}

// residualNorm is the Euclidean norm of what this member has not sent.
func (m *Member) residualNorm() (norm float64, err error) {
	list, err := m.cfg.Residuals()
	for _, t := range list {
		err = errors.Join(err, parts(t, func(part []byte) {
			for x := range slices.Chunk(part, dtype.F32.Size()) {
				f := float64(math.Float32frombits(binary.NativeEndian.Uint32(x)))
				norm += f * f
			}
		}))
	}
	return math.Sqrt(norm), err
}

// The tag of messages with state, and the most that Save may return.
const (
	tag       = 0
	mostSaved = math.MaxInt32
)

// share gives a member that joins what it needs, or takes that from another one.
func (m *Member) share(ctx context.Context, e *Epoch, peer int, saved []byte, joins bool) error {
	move := func(t *runtime.Tensor) error {
		if joins {
			return distributed.Recv(ctx, e.Comm, t, peer, tag)
		}
		return distributed.Send(ctx, e.Comm, t, peer, tag)
	}
	length := []int64{int64(len(saved))}
	if length[0] > mostSaved {
		return fmt.Errorf("elastic: %w: Save returns %d bytes, the most are %d", comm.ErrArgument, length[0], mostSaved)
	}
	err := pass(ctx, m, e, length, move)
	if err == nil && (length[0] < 0 || length[0] > mostSaved) {
		err = fmt.Errorf("elastic: %w: %s announces a state of %d bytes", comm.ErrMismatch, e.Members[peer], length[0])
	}
	if err == nil && length[0] > 0 {
		if joins {
			saved = make([]byte, length[0])
		}
		err = pass(ctx, m, e, saved, move)
	}
	for _, t := range m.cfg.Tensors {
		if err == nil {
			err = move(t)
		}
	}
	if err = errors.Join(err, e.Comm.Sync(ctx)); err != nil || !joins {
		return err
	}
	if m.cfg.Load != nil && len(saved) > 0 {
		if err := m.cfg.Load(ctx, saved); err != nil {
			return err
		}
	}
	list, err := m.cfg.Residuals()
	for _, t := range list {
		if err == nil {
			err = t.Fill(0)
		}
	}
	return err
}

// pass communicates what the host has by memory of the runtime.
func pass[T dtype.Element](ctx context.Context, m *Member, e *Epoch, x []T, call func(t *runtime.Tensor) error) error {
	t, err := runtime.FromSlice(m.cfg.Runtime, x)
	if err != nil {
		return err
	}
	if err = call(t); err == nil {
		err = e.Comm.Sync(ctx)
	}
	if err == nil {
		err = runtime.CopyOut(x, t)
	} else {
		comm.AbortAll(e.Comm, err) // nobody uses the memory any more
	}
	return errors.Join(err, t.Free())
}

// handOver passes the residuals of members that leave to the next ones that stay, which add them to their own: if all leave, to
// the first, which stays if others wait to join. An error fails the epoch.
func (m *Member) handOver(ctx context.Context) error {
	e, leaves := m.epoch, m.leaves
	if len(leaves) == len(e.Members) {
		leaves = leaves[1:]
	}
	list, err := m.cfg.Residuals()
	for _, from := range leaves {
		to := from
		for slices.Contains(leaves, to) {
			to = (to + 1) % len(e.Members)
		}
		for _, t := range list {
			if err != nil {
				break
			}
			switch e.Comm.Rank() {
			case from:
				if err = errors.Join(distributed.Send(ctx, e.Comm, t, to, tag), e.Comm.Sync(ctx)); err == nil {
					err = t.Fill(0)
				}
			case to:
				err = m.take(ctx, e, t, from)
			}
		}
		if err != nil && e.Comm.Rank() == to {
			slog.Warn("elastic: lost what a member that leaves had not sent", "member", e.Members[from], "err", err)
		}
	}
	return err
}

// take adds another member's residual.
func (m *Member) take(ctx context.Context, e *Epoch, t *runtime.Tensor, from int) error {
	k, err := kernel.Lookup(t.Runtime())
	if err != nil {
		return err
	}
	other, err := runtime.New(t.Runtime(), dtype.F32, t.Len())
	if err != nil {
		return err
	}
	if err = errors.Join(distributed.Recv(ctx, e.Comm, other, from, tag), e.Comm.Sync(ctx)); err != nil {
		comm.AbortAll(e.Comm, err)
		return errors.Join(err, other.Free())
	}
	own, err := t.Ptr()
	theirs, otherErr := other.Ptr()
	if err = errors.Join(err, otherErr); err == nil {
		err = k.Accumulate(kernel.Source{X: own, N: t.Len(), Grad: theirs, DType: dtype.F32})
	}
	return errors.Join(err, other.Free())
}
