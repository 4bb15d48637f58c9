package cuda

import (
	"context"
	"errors"
	"fmt"
	goruntime "runtime"
	"slices"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/internal/pool"
)

// The compute stream orders the pool. A block that is freed while a kernel still uses it is handed out to work that
// the stream runs later, so no wait is needed. Before memory that another stream uses is freed, the compute stream
// must wait for that stream.

// slabBytes is the size of the mappings from which blocks up to 2 MiB are cut. GPU memory comes in pages of 2 MiB, so
// a mapping for each small block would waste most of it.
const slabBytes = 16 << 20

// Allocate implements [runtime.Runtime]. If the GPU has no memory left, Allocate returns cached memory to the driver
// and retries: first this runtime's, then the memory of its forks or its parent. It waits at most 5 s for the work of
// their streams; if that does not end, the error says so. Other goroutines do not wait in the meantime.
func (r *Runtime) Allocate(bytes int) (uintptr, error) {
	return r.allocate(r.pool.Allocate, bytes)
}

// AllocateMapping is Allocate for memory with its own mapping, whose size is bytes rounded up to pages of 2 MiB.
// Libraries that map memory of one GPU into the others, such as NCCL for symmetric windows, need that.
func (r *Runtime) AllocateMapping(bytes int) (uintptr, error) {
	return r.allocate(r.pool.AllocateMapping, bytes)
}

// allocate allocates from the pool. When the pool reports that no memory is left, it has already retried without its
// own cache.
func (r *Runtime) allocate(take func(bytes int) (uintptr, error), bytes int) (uintptr, error) {
	if err := r.usable(); err != nil {
		return 0, err
	}
	ptr, err := take(bytes)
	if errors.Is(err, runtime.ErrOutOfMemory) {
		released := int64(0)
		kept := error(nil)
		for _, o := range r.relatives() {
			n, e := o.pool.Trim()
			if !errors.Is(e, runtime.ErrClosed) { // closed in the meantime
				kept = errors.Join(kept, e)
			}
			released += n
		}
		if released > 0 {
			ptr, err = take(bytes)
		}
		if err != nil && kept != nil {
			err = fmt.Errorf("%w; a fork or the parent returned no memory: %w", err, kept)
		}
	}
	return ptr, r.explain(err)
}

// ReleaseMapping frees a block of AllocateMapping and returns its memory to the
// driver instead of the cache. It is for memory that other GPUs have mapped and
// may still write to: their mappings keep the physical memory alive, and no
// later Allocate returns it.
//
// Like Trim it waits for this runtime's streams. If their work does not end, or
// the pool is frozen, a later Trim, an Allocate that needs the memory, or Close
// returns it.
func (r *Runtime) ReleaseMapping(ptr uintptr) error {
	if err := r.usable(); err != nil {
		return err
	}
	return r.pool.Release(ptr)
}

// explain replaces an error of the pool if the device broke or the runtime was closed. The pool reports every refusal
// of the driver as a lack of memory.
func (r *Runtime) explain(err error) error {
	if err == nil {
		return nil
	}
	if unusable := r.usable(); unusable != nil {
		return unusable
	}
	return err
}

// Deallocate implements [runtime.Runtime].
func (r *Runtime) Deallocate(ptr uintptr) error {
	if err := r.usable(); err != nil {
		return err
	}
	return r.pool.Deallocate(ptr)
}

// Stats implements [runtime.Runtime].
func (r *Runtime) Stats() runtime.Stats {
	return r.pool.Stats()
}

// allocationProp is CUmemAllocationProp: the kind of memory that cuMemCreate makes.
type allocationProp struct {
	kind         uint32   // CU_MEM_ALLOCATION_TYPE_PINNED
	handleTypes  uint32   // ways to share it with other processes
	locationKind uint32   // CU_MEM_LOCATION_TYPE_DEVICE
	locationID   int32    // ordinal of the GPU
	_            uintptr  // Windows security attributes
	_            uint8    // compression
	rdma         uint8    // 1 lets network cards read it
	_            uint16   // usage
	_            [4]uint8 // reserved
}

// accessDesc is CUmemAccessDesc.
type accessDesc struct {
	locationKind uint32 // CU_MEM_LOCATION_TYPE_DEVICE
	locationID   int32  // ordinal of the GPU
	flags        uint32 // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
}

const (
	allocationPinned    = 1 // CU_MEM_ALLOCATION_TYPE_PINNED
	handleNone          = 0 // CU_MEM_HANDLE_TYPE_NONE
	handlePosixFD       = 1 // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
	locationDevice      = 1 // CU_MEM_LOCATION_TYPE_DEVICE
	accessReadWrite     = 3 // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
	granularityMinimum  = 0 // CU_MEM_ALLOC_GRANULARITY_MINIMUM
	maxGranularityKnown = pool.Granule
)

// deviceMemory is the pool's source: the driver's virtual memory management. Unlike memory of cuMemAlloc,
// communication libraries can map its blocks into the other GPUs (NCCL's symmetric windows need that).
// https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
type deviceMemory struct {
	rt *Runtime // owner of the pool; never changed
}

// Map implements [pool.System].
func (m deviceMemory) Map(bytes int) (pool.Mapping, error) {
	r := m.rt
	handle, err := r.get(r.drv.sym.MemCreate, uintptr(bytes), hostmem.AddrOf(r.memory), 0)
	if err != nil {
		return pool.Mapping{}, err
	}
	return m.mapHandle(handle, bytes)
}

// mapHandle maps physical memory for this GPU, and takes ownership of it.
func (m deviceMemory) mapHandle(handle uintptr, bytes int) (pool.Mapping, error) {
	r := m.rt
	size := uintptr(bytes)
	addr, err := r.get(r.drv.sym.MemAddressReserve, size, pool.Granule, 0, 0)
	if err != nil {
		_ = r.free(r.drv.sym.MemRelease, handle)
		return pool.Mapping{}, err
	}
	mapping := pool.Mapping{
		Addr:   addr,
		Handle: handle,
		Bytes:  bytes,
	}
	if err := r.manage(r.drv.sym.MemMap, addr, size, 0, handle, 0); err != nil {
		_ = r.free(r.drv.sym.MemRelease, handle)
		_ = r.free(r.drv.sym.MemAddressFree, addr, size)
		return pool.Mapping{}, err
	}
	access := &accessDesc{
		locationKind: locationDevice,
		locationID:   int32(r.index),
		flags:        accessReadWrite,
	}
	err = r.manage(r.drv.sym.MemSetAccess, addr, size, hostmem.AddrOf(access), 1)
	goruntime.KeepAlive(access)
	if err != nil {
		_ = m.Unmap(mapping)
		return pool.Mapping{}, err
	}
	return mapping, nil
}

// Unmap implements [pool.System]. The driver does not wait for work that uses the memory, which would fault; see
// Fence. Nothing runs on a broken device, and there Unmap frees as much as the driver permits.
func (m deviceMemory) Unmap(mapping pool.Mapping) error {
	r := m.rt
	r.drv.unmapping.Lock()
	defer r.drv.unmapping.Unlock()
	size := uintptr(mapping.Bytes)
	if err := r.free(r.drv.sym.MemUnmap, mapping.Addr, size); err != nil {
		return err
	}
	return errors.Join(
		r.free(r.drv.sym.MemRelease, mapping.Handle),
		r.free(r.drv.sym.MemAddressFree, mapping.Addr, size))
}

// Unmapping runs f, a library call that unmaps GPU memory, while no runtime of this process and no other f unmaps any:
// driver 580 crashes if two threads unmap the same memory at once. f must not wait for other threads that may call
// Unmapping, nor for kernels that wait for such threads.
func (r *Runtime) Unmapping(f func() error) error {
	r.drv.unmapping.Lock()
	defer r.drv.unmapping.Unlock()
	return f()
}

// Fence implements [pool.System]. By the order that the pool relies on, only work before the fence on the compute
// stream uses freed memory. Fence also waits for this runtime's other streams, because an ordering mistake would
// otherwise cause a fault that breaks the GPU. It does not wait for streams of others, whose work may never end, or
// may wait for this call.
func (m deviceMemory) Fence() (wait func() error) {
	r := m.rt
	events, err := r.markStreams()
	return func() error {
		defer func() {
			for _, e := range events {
				_ = e.Close() // fails on a broken device
			}
		}()
		ctx, cancel := context.WithTimeoutCause(context.Background(), r.flushTime,
			fmt.Errorf("cuda:%d: work that may use the memory did not end within %v", r.index, r.flushTime))
		defer cancel()
		for _, e := range events {
			if err == nil {
				err = poll.Until(ctx, e.Done)
			}
		}
		return err
	}
}

// markStreams records an event in each of this runtime's streams. Unlike streams, events can be queried while somebody
// begins to capture the stream.
func (r *Runtime) markStreams() (events []*Event, err error) {
	streams := r.owned.with(r.drv.sym.StreamDestroy)
	if compute := r.compute.handle; !slices.Contains(streams, compute) {
		streams = append(streams, compute)
	}
	for range streams {
		e, err := r.NewEvent()
		if err != nil {
			return events, err
		}
		events = append(events, e)
	}
	for i, stream := range streams {
		if err := r.recordIn(stream, events[i]); err != nil {
			return events, err
		}
	}
	return events, nil
}

// recordIn records an event in a stream, unless the stream was destroyed. If the stream is full, the call waits for
// room, and holds no lock that others need.
func (r *Runtime) recordIn(stream uintptr, e *Event) error {
	if stream == r.compute.handle {
		return r.RecordEvent(e.handle, stream)
	}
	if !r.gate.enter() { // Close destroys streams once the gate is empty
		return r.usable()
	}
	defer r.gate.leave()
	if !r.owned.use(stream) {
		return nil
	}
	err := r.RecordEvent(e.handle, stream)
	if d, last := r.owned.endUse(stream); last {
		err = errors.Join(err, r.undo(stream, d))
	}
	return err
}

// prepareMemory queries the device properties that deviceMemory needs.
func (r *Runtime) prepareMemory() error {
	r.memory = &allocationProp{
		kind:         allocationPinned,
		handleTypes:  handleNone,
		locationKind: locationDevice,
		locationID:   int32(r.index),
	}
	var mappable, shareable, rdma int
	for _, a := range []struct {
		attribute uintptr
		to        *int
	}{
		{attrVirtualMemory, &mappable},
		{attrPosixFileDescriptor, &shareable},
		{attrRDMAWithVMM, &rdma},
	} {
		v, err := r.drv.attribute(r.index, r.device, a.attribute)
		if err != nil {
			return err
		}
		*a.to = v
	}
	if mappable == 0 {
		return fmt.Errorf("cuda:%d: %w: the driver has no virtual memory management for this GPU",
			r.index, runtime.ErrUnsupported)
	}
	if shareable != 0 {
		r.memory.handleTypes = handlePosixFD
	}
	r.memory.rdma = uint8(rdma & 1)
	granularity, err := r.get(r.drv.sym.MemGranularity, hostmem.AddrOf(r.memory), granularityMinimum)
	if err != nil {
		return err
	}
	if granularity > maxGranularityKnown {
		return fmt.Errorf("cuda:%d: %w: memory comes in pages of %d bytes", r.index, runtime.ErrUnsupported, granularity)
	}
	return nil
}
