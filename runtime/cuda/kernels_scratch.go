package cuda

import (
	"errors"
	"fmt"
	"sync"

	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/internal/pool"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// sparse are the [kernel.Kernels] of a GPU: the PTX of kernels/dense.cu,
// select.cu, lists.cu, pieces.cu and codec.cu, and the device memory that it works with.
//
// That memory is shared by all calls, which the compute stream puts in order, and
// [Graph.Launch] those of graphs. It grows
// with the arrays, never while the pool is frozen, and what a graph may refer to
// is kept until Close.
type sparse struct {
	rt *Runtime

	mu     sync.Mutex // held while the launches of one call are submitted
	ready  bool
	err    error // why it is not
	kept   []uintptr
	memory [regionCount]region
}

// region is memory for one purpose.
type region struct {
	ptr   uintptr
	bytes int
}

const (
	control        = iota // struct control of kernels/order.cuh
	status                // what the tiles of an array tell each other
	statusTies            // the same, for a second count
	segmentIndices        // what pick lists
	segmentValues
	segmentCounts
	segmentsAbove // what sift counts
	candidates
	partial // sums of segments, or sorted samples
	lists   // descriptors of lists
	regionCount
)

// Sizes that kernels/ counts with.
const (
	controlBytes    = 40 << 10
	tileElements    = 4096
	smallTile       = 1024
	smallTilesBelow = 1 << 22 // elements
	segmentElements = 2 * tileElements
	momentsBytes    = 24
	maxLists        = 256
	inlineLists     = 25
	listWords       = 4
	putWords        = 120
	maxCounts       = 64
	maxPieces       = 11
	maxCandidates   = 1 << 14
)

// Kernels implements [kernel.Provider]. The first call has the driver
// compile them, and allocates; if that fails, as it does during a capture, the
// methods of what is returned say why, and the next call tries again.
func (r *Runtime) Kernels() kernel.Kernels {
	s := &r.sparse
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ready {
		s.err = s.load()
		s.ready = s.err == nil
	}
	return s
}

func (s *sparse) load() error {
	if err := s.rt.usable(); err != nil {
		return err
	}
	if err := s.grow(control, controlBytes); err != nil {
		return err
	}
	return errors.Join(
		s.rt.loadKernels("dense.ptx.gz", kernelScaleF32, kernelScatterAdd),
		s.rt.loadKernels("lists.ptx.gz", kernelScatterAdd, kernelPick),
		s.rt.loadKernels("select.ptx.gz", kernelPick, kernelCopyPieces),
		s.rt.loadKernels("pieces.ptx.gz", kernelCopyPieces, kernelQuantize),
		s.rt.loadKernels("codec.ptx.gz", kernelQuantize, kernelCount))
}

// grow sees to it that a region has that many bytes. New memory is zero.
func (s *sparse) grow(which, bytes int) error {
	at := &s.memory[which]
	if bytes <= at.bytes {
		return nil
	}
	r := s.rt
	if r.pool.Frozen() {
		return fmt.Errorf("cuda:%d: the kernels need %d bytes of memory more than they have, which a call before the capture would have allocated: %w",
			r.index, bytes-at.bytes, runtime.ErrFrozen)
	}
	bytes = max(bytes, 2*at.bytes)
	ptr, err := r.Allocate(bytes)
	if err != nil {
		return err
	}
	s.kept = append(s.kept, ptr)
	smaller := *at
	*at = region{ptr, bytes}
	if err := s.zero(which); err != nil {
		*at = smaller
		return err
	}
	return nil
}

// zero makes a region what it was when it was new.
func (s *sparse) zero(which int) error {
	at, r := s.memory[which], s.rt
	return r.do(r.drv.sym.MemsetD8, at.ptr, 0, uintptr(at.bytes), r.compute.handle)
}

// growStatus makes room for what the tiles of n elements tell each other.
func (s *sparse) growStatus(n int) error {
	tiles := max(n/tileElements, min(n, smallTilesBelow)/smallTile, s.rt.info.Multiprocessors*streamsPerSM) + 2
	return errors.Join(s.grow(status, 8*tiles), s.grow(statusTies, 8*tiles))
}

// at is the address of a region, as a kernel's argument.
func (s *sparse) at(which int) uint64 { return uint64(s.memory[which].ptr) }

// giveBack gives the memory back to the pool.
func (s *sparse) giveBack(p *pool.Pool) (err error) {
	for _, ptr := range s.kept {
		err = errors.Join(err, p.Deallocate(ptr))
	}
	s.kept = nil
	return err
}
