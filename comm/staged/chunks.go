package staged

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

const (
	chunks     = 4 // of a long call
	countBytes = 8
)

// longCall is the bytes of a call that is done in chunks, at least. Tests lower it.
var longCall = 16 << 20

// divides reports whether a call is done in chunks, whose copies run beside the reductions of others: a long one
// of host memory, each of whose elements is for itself. All ranks find the same.
func (s *stage) divides(c *comm.Call) bool {
	switch c.Op {
	case comm.OpAllReduce, comm.OpBroadcast, comm.OpReduce:
		return s.host.Device().Kind == runtime.CPU && c.Count*c.DType.Size() >= longCall
	}
	return false
}

// workInChunks does one call, of which staged is the same on the host.
func (s *stage) workInChunks(call, staged *comm.Call) error {
	if err := s.agree(call); err != nil {
		return err
	}
	p := &pipeline{
		stage:   s,
		call:    call,
		staged:  staged,
		arrived: make(chan struct{}, chunks),
		reduced: make(chan struct{}, chunks),
	}
	copied := make(chan error)
	go func() { copied <- p.copyChunks() }()
	err := p.reduceChunks()
	close(p.reduced)
	if failure := <-copied; failure != nil {
		return failure
	}
	return err
}

// agree compares what all ranks call: chunks and steps say less. No rank goes on before all have come.
func (s *stage) agree(call *comm.Call) error {
	called := essenceOf(call)
	all, err := s.exchange(int64(called))
	if err != nil {
		return err
	}
	for rank, word := range all {
		if e := essence(word); e != called {
			return fmt.Errorf("%w: %v of %v, rank %d has %v", comm.ErrMismatch, call.Op, called, rank, e)
		}
	}
	return nil
}

// essence is what the ranks that make a call agree on: the number of elements, their type, and the reduction.
type essence int64

const essenceBits = 8 // of a type, and of a reduction

func essenceOf(c *comm.Call) essence {
	kind := essence(c.DType)<<essenceBits | essence(c.Reduce)
	return essence(c.Count)<<(2*essenceBits) | kind
}

func (e essence) String() string {
	dt := dtype.DType(e >> essenceBits)
	return fmt.Sprintf("%d %v, %v", e>>(2*essenceBits), dt, comm.ReduceOp(e))
}

// exchange returns the numbers of all ranks, valid until the next exchange. There is room for them (growAround).
func (s *stage) exchange(number int64) ([]int64, error) {
	ranks := s.base.WorldSize()
	numbers := hostmem.Slice[int64](s.memory+uintptr(s.counts), 1+ranks)
	numbers[ranks] = number
	all := hostmem.Addr(numbers)
	if err := s.base.AllGather(all+uintptr(countBytes*ranks), all, 1, dtype.I64); err != nil {
		return nil, err
	}
	if err := s.base.Sync(context.Background()); err != nil { // Leave ends it
		return nil, err
	}
	return numbers[:ranks], nil
}

// pipeline is a call that is done in chunks.
type pipeline struct {
	stage   *stage        // whose memory it uses
	call    *comm.Call    // of the device's memory
	staged  *comm.Call    // of the host's
	arrived chan struct{} // of each chunk, once it is on the host; closed behind the last one, or a failure
	reduced chan struct{} // of each chunk that may go back; closed by who reduces
}

// chunk is one of chunks parts of a call, which may have no elements.
func chunk(c *comm.Call, number int) comm.Call {
	share := (c.Count + chunks - 1) / chunks
	first := min(number*share, c.Count)
	part := *c
	part.Count = min(share, c.Count-first)
	offset := uintptr(first * c.DType.Size())
	part.Send += offset
	part.Recv += offset
	return part
}

// reduceChunks does chunk after chunk on the host.
func (p *pipeline) reduceChunks() error {
	base := p.stage.base
	number := 0
	for range p.arrived {
		part := chunk(p.staged, number)
		if err := part.Make(base); err != nil {
			return err
		}
		if err := base.Sync(context.Background()); err != nil { // Leave ends it
			return err
		}
		p.reduced <- struct{}{}
		number++
	}
	return nil
}

// copyChunks copies each chunk to the host, ahead by one, and back.
func (p *pipeline) copyChunks() error {
	defer close(p.arrived)
	for number := range chunks + 1 {
		if number < chunks {
			if err := p.copyChunk(number, (*comm.Call).SendPart, p.stage.copyIn); err != nil {
				return err
			}
			p.arrived <- struct{}{}
		}
		if number == 0 {
			continue
		}
		if _, ok := <-p.reduced; !ok {
			return nil
		}
		if err := p.copyChunk(number-1, (*comm.Call).RecvPart, p.stage.copyOut); err != nil {
			return err
		}
	}
	return nil
}

func (p *pipeline) copyChunk(number int, which part, copyPart func(device, host uintptr, bytes int) error) error {
	call := chunk(p.call, number)
	staged := chunk(p.staged, number)
	return p.stage.copyParts(&call, &staged, which, copyPart)
}
