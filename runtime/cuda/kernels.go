package cuda

import (
	"errors"
	"fmt"
	"sync"

	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/internal/pool"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// The number of 256-thread blocks for each multiprocessor, for kernels that stream arrays and for kernels that work on
// lists.
const (
	streamsPerSM = 4
	mergesPerSM  = 4 // doubled from longMerge on: a block that ends early gets another part
	picksPerSM   = 4
	piecesPerSM  = 2 // leaves room for kernels that communicate
)

const _ = uint(streamsPerSM - picksPerSM) // cut closes the gaps of each block of pick

// longMerge is the number of elements from which merge halves its parts. That takes 3 % less time for 104,857,600
// float32, and 10 % more for 26,214,400 bf16.
const longMerge = 1 << 26

// Sizes used by kernels/.
const (
	controlBytes    = 40 << 10
	tileElements    = 4096
	smallTile       = 1024
	smallTilesBelow = 1 << 22 // elements
	segmentElements = 2 * tileElements
	momentsBytes    = 24
	maxLists        = 256
	inlineLists     = 25
	listBytes       = 32
	listsOfPut      = 30 // stored by put_words
	maxCounts       = 64
	maxFactors      = 64
	maxQuantiles    = 64
	maxPieces       = 11
	maxCandidates   = 1 << 14
)

// tiles returns the largest number of tiles that n elements can touch.
func tiles(n int) int { return (n+3)/tileElements + 1 }

// sparse implements the [kernel.Kernels] of a GPU: the PTX of kernels/dense.cu, select.cu, lists.cu, pieces.cu,
// codec.cu and fixed.cu, and their device memory.
//
// All calls share that memory. The compute stream orders calls, and [Graph.Launch] orders the calls in graphs. The
// memory grows with the arrays, but never while the pool is frozen; memory that a graph may refer to is kept until
// Close.
type sparse struct {
	rt *Runtime // runs the kernels

	mu     sync.Mutex                // held while the launches of one call are submitted
	ready  bool                      // the kernels are loaded; guarded by mu
	err    error                     // the error of loading them; guarded by mu
	kept   []uintptr                 // all memory of any region, until Close; guarded by mu
	memory [regionCount]memoryRegion // guarded by mu
}

// memoryRegion is memory for one purpose.
type memoryRegion struct {
	ptr   uintptr // 0 before the first grow
	bytes int     // 0 before the first grow
}

// region numbers the purposes.
type region int

const (
	control        region = iota // struct control of kernels/order.cuh
	status                       // status words of the tiles of an array
	statusTies                   // the same, for a second count
	segmentIndices               // entries listed by pick
	segmentValues
	segmentCounts
	segmentsAbove // counted by sift
	candidates
	partial // sums of segments, or sorted samples
	lists   // descriptors of lists
	regionCount
)

// Kernels implements [kernel.Provider]. The first call makes the driver compile the kernels, and allocates memory. If
// that fails, as it does during a capture, the methods of the result return the error, and the next call retries.
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
		s.rt.loadKernels("codec.ptx.gz", kernelQuantize, kernelRaiseExponentsF32),
		s.rt.loadKernels("fixed.ptx.gz", kernelRaiseExponentsF32, kernelReduceF64))
}

// grow grows a region to at least this many bytes. New memory is zero.
func (s *sparse) grow(purpose region, bytes int) error {
	memory := &s.memory[purpose]
	if bytes <= memory.bytes {
		return nil
	}
	r := s.rt
	if r.pool.Frozen() {
		return fmt.Errorf("cuda:%d: the kernels need %d bytes of memory more than they have, "+
			"which a call before the capture would have allocated: %w",
			r.index, bytes-memory.bytes, runtime.ErrFrozen)
	}
	bytes = max(bytes, 2*memory.bytes)
	ptr, err := r.Allocate(bytes)
	if err != nil {
		return err
	}
	s.kept = append(s.kept, ptr)
	smaller := *memory
	*memory = memoryRegion{ptr, bytes}
	if err := s.zero(purpose); err != nil {
		*memory = smaller
		return err
	}
	return nil
}

// zero clears a region.
func (s *sparse) zero(purpose region) error {
	memory := s.memory[purpose]
	r := s.rt
	return r.do(r.drv.sym.MemsetD8, memory.ptr, 0, uintptr(memory.bytes), r.compute.handle)
}

// growStatus makes room for the status words of the tiles of n elements.
func (s *sparse) growStatus(n int) error {
	tiles := max(n/tileElements, min(n, smallTilesBelow)/smallTile, s.rt.info.Multiprocessors*streamsPerSM) + 2
	return errors.Join(s.grow(status, 8*tiles), s.grow(statusTies, 8*tiles))
}

// address returns the address of a region, as a kernel's parameter.
func (s *sparse) address(purpose region) uintptr { return s.memory[purpose].ptr }

// release returns the memory to the pool.
func (s *sparse) release(p *pool.Pool) (err error) {
	for _, ptr := range s.kept {
		err = errors.Join(err, p.Deallocate(ptr))
	}
	s.kept = nil
	return err
}
