package bench

import (
	"context"
	"errors"
	"slices"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
)

// memory allocates buffers.
type memory struct {
	rank      backend.Rank      // its runtime allocates buffers that are not symmetric
	from      comm.Communicator // owns the buffers
	symmetric bool              // from allocates
}

// newMemory follows the configuration's choice.
func newMemory(r backend.Rank, cfg Config) (memory, error) {
	_, has := comm.As[comm.SymmetricAllocator](r.Comm)
	m := memory{
		rank:      r,
		from:      r.Comm,
		symmetric: has && cfg.Symmetric != Never,
	}
	switch {
	case cfg.Symmetric == Never:
		m.from = struct{ comm.Communicator }{r.Comm} // hides its other interfaces
	case cfg.Symmetric == Always && !has:
		return m, backend.Needs(cfg.Backend, "--symmetric", "symmetric memory")
	}
	return m, nil
}

func (m memory) allocate(ctx context.Context, bytes int) (*comm.Buffer, error) {
	ctx, cancel := m.rank.Within(ctx)
	defer cancel()
	return comm.Allocate(ctx, m.from, m.rank.Runtime, bytes)
}

func (m memory) free(ctx context.Context, b *comm.Buffer) error {
	ctx, cancel := m.rank.Within(ctx)
	defer cancel()
	return b.Free(ctx)
}

// releaseAfter frees buffers after a measurement that ended with err, and returns err joined with any error here.
// After an error the ranks are out of step, so freeing symmetric memory, which is collective, must not wait.
func (m memory) releaseAfter(ctx context.Context, err error, buffers ...*comm.Buffer) error {
	if err != nil {
		ended, cancel := context.WithCancel(ctx)
		cancel()
		for _, b := range buffers {
			_ = m.free(ended, b) // err has the reason
		}
		return err
	}
	for _, b := range buffers {
		err = errors.Join(err, m.free(ctx, b))
	}
	return err
}

// allocate makes the buffers of an operation. It returns a function that frees them and takes the measurement's
// error. It is collective.
func (s *setup) allocate(ctx context.Context, count int, place Place) (comm.Call, func(error) error, error) {
	k := s.tables.collective
	p := s.Comm.WorldSize()
	part := count * s.cfg.DType.Size()
	w := comm.Call{
		Op:     k.Op,
		Count:  count,
		DType:  s.cfg.DType,
		Reduce: s.cfg.Op,
	}
	sendParts, recvParts := k.parts(p)
	sizes := []int{part * sendParts, part * recvParts}
	if place == InPlace {
		sizes = []int{slices.Max(sizes)}
	}
	var buffers []*comm.Buffer
	free := func(err error) error {
		return s.memory.releaseAfter(ctx, err, buffers...)
	}
	for _, bytes := range sizes {
		b, err := s.memory.allocate(ctx, bytes)
		if err != nil {
			return w, nil, free(err)
		}
		buffers = append(buffers, b)
	}
	w.Send = buffers[0].Ptr
	w.Recv = buffers[len(buffers)-1].Ptr
	if offset := uintptr(s.Comm.Rank() * part); place == InPlace && sendParts < recvParts {
		w.Send += offset
	} else if place == InPlace && sendParts > recvParts {
		w.Recv += offset
	}
	return w, free, nil
}
