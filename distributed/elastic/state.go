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

// bind moves the trainer to a new epoch, and gives those that join the state of the others. These need not wait
// for that: hashes are compared by the first vote.
func (m *Member) bind(ctx context.Context, e *Epoch) error {
	if err := m.trainer.Rebind(ctx, e.Comm); err != nil {
		return err
	}
	if err := m.transfer(ctx, e); err != nil {
		return err
	}
	e.bound = true
	m.change(func() { m.status.Standing = stepping })
	m.publish()
	slog.Info("elastic: epoch", "number", e.Number, "step", m.Steps(), "members", strings.Join(e.Members, ", "))
	hash, err := m.hash(ctx)
	if err != nil {
		return err
	}
	e.hash = int64(hash>>1 | 1) // an allreduce takes the larger of it and 0
	return m.sayLost(e)
}

// sayLost says whose residuals are gone, ever less often: members that come back are lost again.
func (m *Member) sayLost(e *Epoch) error {
	if e.Comm.Rank() != 0 || len(e.record.Lost) == 0 {
		return nil
	}
	if residuals, err := m.trainer.Residuals(); err != nil || len(residuals) == 0 {
		return err // there were none
	}
	lost := strings.Join(e.record.Lost, ", ")
	times, due := m.residuals.Count("lost " + lost)
	if !due {
		return nil
	}
	norm, err := m.residualNorm()
	if err != nil {
		return err
	}
	slog.Warn("elastic: the residuals of lost members are gone", "epoch", e.Number,
		"lost", lost, "norm of this member's residual", norm, "times", times)
	return nil
}

// transfer sends the state to the members that join, to each of them from another one of those that have it.
func (m *Member) transfer(ctx context.Context, e *Epoch) error {
	var receivers, senders []int // ranks
	for rank, p := range e.record.Members {
		if p.Fresh {
			receivers = append(receivers, rank)
		} else {
			senders = append(senders, rank)
		}
	}
	var shared []byte // what the trainer shares, once this member has sent it
	for i, receiver := range receivers {
		sender := senders[i%len(senders)]
		switch e.Comm.Rank() {
		case sender:
			if shared == nil {
				var err error
				if shared, err = m.trainer.SharedState(ctx); err != nil {
					return err
				}
			}
			if err := m.send(ctx, e, receiver, shared); err != nil {
				return err
			}
		case receiver:
			if err := m.receive(ctx, e, sender); err != nil {
				return err
			}
		}
	}
	return nil
}

// The tag of messages with state, and how long SharedState may be.
const (
	stateTag       = 0
	maxSharedBytes = math.MaxInt32
)

// send sends this member's state: how long the trainer's is and how tensors are sent, then the trainer's, and the
// tensors.
func (m *Member) send(ctx context.Context, e *Epoch, receiver int, shared []byte) error {
	if len(shared) > maxSharedBytes {
		return fmt.Errorf("elastic: %w: SharedState returns %d bytes, the maximum is %d",
			comm.ErrArgument, len(shared), maxSharedBytes)
	}
	post := func(t *runtime.Tensor) error {
		return distributed.Send(ctx, e.Comm, t, receiver, stateTag)
	}
	sending := m.sending()
	if err := communicate(ctx, m, e, []int64{int64(len(shared)), sending}, post); err != nil {
		return err
	}
	if len(shared) > 0 {
		if err := communicate(ctx, m, e, shared, post); err != nil {
			return err
		}
	}
	for _, t := range m.cfg.Tensors {
		if sending == sendsCoded && isCoded(t) {
			if err := m.sendCoded(ctx, e, t, post); err != nil {
				return errors.Join(err, e.Comm.Sync(ctx))
			}
			continue
		}
		if err := post(t); err != nil {
			return errors.Join(err, e.Comm.Sync(ctx))
		}
	}
	return e.Comm.Sync(ctx)
}

// receive gets the state that send sends, and begins with empty residuals.
func (m *Member) receive(ctx context.Context, e *Epoch, sender int) error {
	fetch := func(t *runtime.Tensor) error {
		return distributed.Recv(ctx, e.Comm, t, sender, stateTag)
	}
	announced := []int64{0, 0}
	if err := communicate(ctx, m, e, announced, fetch); err != nil {
		return err
	}
	m.sayDropped(e)
	length := announced[0]
	sending := announced[1]
	if length < 0 || length > maxSharedBytes || sending != sendsPlain && sending != sendsCoded {
		return fmt.Errorf("elastic: %w: %s announces a state of %d bytes, and tensors in the form %d",
			comm.ErrMismatch, e.Members[sender], length, sending)
	}
	shared := make([]byte, length)
	if len(shared) > 0 {
		if err := communicate(ctx, m, e, shared, fetch); err != nil {
			return err
		}
	}
	for _, t := range m.cfg.Tensors {
		if sending == sendsCoded && isCoded(t) {
			if err := m.receiveCoded(ctx, e, t, fetch); err != nil {
				return errors.Join(err, e.Comm.Sync(ctx))
			}
			continue
		}
		if err := fetch(t); err != nil {
			return errors.Join(err, e.Comm.Sync(ctx))
		}
	}
	if err := e.Comm.Sync(ctx); err != nil {
		return err
	}
	if len(shared) > 0 {
		if err := m.trainer.Restore(ctx, shared); err != nil {
			return err
		}
	}
	residuals, err := m.trainer.Residuals()
	if err != nil {
		return err
	}
	for _, t := range residuals {
		if err := t.Fill(0); err != nil {
			return err
		}
	}
	return nil
}

// sayDropped says that a member that joins again loses its residual, ever less often. One that has made no step has
// nothing to lose, which it need not look at. A trainer that has no residuals before it is restored says so with an
// error.
func (m *Member) sayDropped(e *Epoch) {
	if m.Steps() == 0 {
		return
	}
	norm, err := m.residualNorm()
	if err != nil || norm == 0 {
		return
	}
	if times, due := m.residuals.Count("dropped"); due {
		slog.Warn("elastic: this member joins again, without its residuals", "epoch", e.Number,
			"member", m.cfg.Name, "norm of its residual", norm, "times", times)
	}
}

// communicate calls a communication with memory of the runtime instead of x, which is the host's.
func communicate[T dtype.Element](
	ctx context.Context, m *Member, e *Epoch, x []T, call func(t *runtime.Tensor) error,
) error {
	t, err := runtime.FromSlice(m.cfg.Runtime, x)
	if err != nil {
		return err
	}
	err = call(t)
	if err == nil {
		err = e.Comm.Sync(ctx)
	}
	if err != nil {
		comm.AbortAll(e.Comm, err) // nobody uses the memory any more
		return errors.Join(err, t.Free())
	}
	return errors.Join(runtime.CopyOut(x, t), t.Free())
}

// agree compares the hashes in a vote.
func (e *Epoch) agree(hashes []int64) error {
	count := map[int64]int{}
	for _, h := range hashes {
		count[h]++
	}
	majority := slices.MaxFunc(hashes, func(a, b int64) int {
		return cmp.Compare(count[a], count[b])
	})
	var differ []string
	for rank, h := range hashes {
		if h != majority {
			differ = append(differ, printable.Text(e.Members[rank]))
		}
	}
	if len(differ) == 0 {
		return nil
	}
	return fmt.Errorf("elastic: %w: the state of %s differs from the others' at the beginning of epoch %d",
		comm.ErrMismatch, strings.Join(differ, ", "), e.Number)
}

// castagnoli and IEEE's CRC-32, which processors compute, together detect what a CRC of 64 bits does.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// hash returns the trainer's hash if it has one, otherwise two CRC-32 of the tensors.
func (m *Member) hash(ctx context.Context) (uint64, error) {
	if h, ok := m.trainer.(hasher); ok {
		return h.Hash(ctx)
	}
	var ieee, c uint32
	for _, t := range m.cfg.Tensors {
		err := pieces(t, func(piece []byte) {
			ieee = crc32.Update(ieee, crc32.IEEETable, piece)
			c = crc32.Update(c, castagnoli, piece)
		})
		if err != nil {
			return 0, err
		}
	}
	return uint64(ieee)<<32 | uint64(c), nil
}

// pieceBytes bounds a piece of a tensor on the host. A copy of a whole tensor would take as much memory again, and a
// process that is to stop for its garbage collection waits for a copy.
const pieceBytes = 1 << 20

// pieces calls f with a contiguous tensor, piece by piece.
func pieces(t *runtime.Tensor, f func(piece []byte)) error {
	address, err := t.Ptr()
	if err != nil {
		return err
	}
	left := t.Len() * t.DType().Size()
	buffer := make([]byte, min(left, pieceBytes))
	for left > 0 {
		piece := buffer[:min(left, len(buffer))]
		if err := t.Runtime().CopyOut(piece, address); err != nil {
			return err
		}
		f(piece)
		address += uintptr(len(piece))
		left -= len(piece)
	}
	return nil
}

// residualNorm is the Euclidean norm of this member's residuals.
func (m *Member) residualNorm() (float64, error) {
	residuals, err := m.trainer.Residuals()
	if err != nil {
		return 0, err
	}
	var squares float64
	for _, t := range residuals {
		err := pieces(t, func(piece []byte) {
			for x := range slices.Chunk(piece, dtype.F32.Size()) {
				f := float64(math.Float32frombits(binary.NativeEndian.Uint32(x)))
				squares += f * f
			}
		})
		if err != nil {
			return 0, err
		}
	}
	return math.Sqrt(squares), nil
}

// handOver passes the residuals of members that leave to the next ones that stay, which add them to their own: if all
// leave, to the first, which stays if others wait to join. An error fails the epoch.
func (m *Member) handOver(ctx context.Context) error {
	e := m.epoch
	leaves := e.leaves
	if len(leaves) == len(e.Members) {
		leaves = leaves[1:]
	}
	if len(leaves) == 0 {
		return nil
	}
	residuals, err := m.trainer.Residuals()
	if err != nil {
		slog.Warn("elastic: lost the residuals of members that leave", "epoch", e.Number, "err", err)
		return err
	}
	for _, leaver := range leaves {
		heir := leaver
		for slices.Contains(leaves, heir) {
			heir = (heir + 1) % len(e.Members)
		}
		for i, t := range residuals {
			switch e.Comm.Rank() {
			case leaver:
				err = m.bequeath(ctx, e, t, heir)
			case heir:
				err = m.inherit(ctx, e, t, leaver)
			}
			if err == nil {
				continue
			}
			if e.Comm.Rank() == heir {
				slog.Warn("elastic: lost the residual of a member that leaves",
					"member", e.Members[leaver], "rank", leaver, "residual", i, "err", err)
			}
			return err
		}
		if e.Comm.Rank() == heir && len(residuals) > 0 {
			m.sayInherited(e, leaver)
		}
	}
	return nil
}

// sayInherited says that this member has the residuals of one that leaves, ever less often: members may come and go.
func (m *Member) sayInherited(e *Epoch, leaver int) {
	name := e.Members[leaver]
	if times, due := m.residuals.Count("inherited " + name); due {
		slog.Info("elastic: took over the residuals of a member that leaves", "epoch", e.Number,
			"member", name, "rank", leaver, "times", times)
	}
}

// bequeath sends a residual to another member, and empties it.
func (m *Member) bequeath(ctx context.Context, e *Epoch, t *runtime.Tensor, heir int) error {
	err := distributed.Send(ctx, e.Comm, t, heir, stateTag)
	if err := errors.Join(err, e.Comm.Sync(ctx)); err != nil {
		return err
	}
	return t.Fill(0)
}

// inherit adds another member's residual to this one's.
func (m *Member) inherit(ctx context.Context, e *Epoch, t *runtime.Tensor, leaver int) error {
	kernels, err := kernel.Lookup(t.Runtime())
	if err != nil {
		return err
	}
	legacy, err := runtime.New(t.Runtime(), dtype.F32, t.Len())
	if err != nil {
		return err
	}
	err = distributed.Recv(ctx, e.Comm, legacy, leaver, stateTag)
	if err := errors.Join(err, e.Comm.Sync(ctx)); err != nil {
		comm.AbortAll(e.Comm, err) // nobody uses the memory any more
		return errors.Join(err, legacy.Free())
	}
	return errors.Join(accumulate(kernels, t, legacy), legacy.Free())
}

// accumulate adds x to t.
func accumulate(kernels kernel.Kernels, t, x *runtime.Tensor) error {
	sum, err := t.Ptr()
	if err != nil {
		return err
	}
	addend, err := x.Ptr()
	if err != nil {
		return err
	}
	return kernels.Accumulate(kernel.Source{X: sum, N: t.Len(), Grad: addend, DType: dtype.F32})
}
