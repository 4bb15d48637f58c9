package cuda

import (
	"errors"
	"fmt"
	goruntime "runtime"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/pool"
	"github.com/tutti-go/tutti/runtime"
)

// The pool is ordered by the compute stream: a block that is given back while
// a kernel still uses it is handed out to work that the stream runs later, so
// no wait is needed. Memory that another stream uses is given back after the
// compute stream was made to wait for that stream.

// slabBytes is the size of the mappings that blocks up to 2 MiB are cut from:
// GPU memory comes in pages of 2 MiB, so a mapping for each would waste most of
// it.
const slabBytes = 16 << 20

// Allocate implements [runtime.Runtime].
func (r *Runtime) Allocate(bytes int) (uintptr, error) {
	if err := r.usable(); err != nil {
		return 0, err
	}
	ptr, err := r.pool.Allocate(bytes)
	return ptr, r.explain(err)
}

// AllocateMapping is Allocate for memory that shares its mapping with nothing
// else, of exactly bytes rounded up to pages of 2 MiB. Libraries that map memory
// of one GPU into the others, as NCCL does for symmetric windows, need that.
func (r *Runtime) AllocateMapping(bytes int) (uintptr, error) {
	if err := r.usable(); err != nil {
		return 0, err
	}
	ptr, err := r.pool.AllocateMapping(bytes)
	return ptr, r.explain(err)
}

// explain replaces an error of the pool, which takes everything that the driver
// refuses for a lack of memory, if the device broke or the runtime was closed.
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
func (r *Runtime) Stats() runtime.Stats { return r.pool.Stats() }

// Freeze implements [runtime.Freezer].
func (r *Runtime) Freeze() { r.pool.Freeze() }

// Unfreeze implements [runtime.Freezer].
func (r *Runtime) Unfreeze() { r.pool.Unfreeze() }

// Trim implements [runtime.Freezer].
func (r *Runtime) Trim() (int64, error) {
	if err := r.usable(); err != nil {
		return 0, err
	}
	return r.pool.Trim()
}

// allocationProp is CUmemAllocationProp: which memory cuMemCreate makes.
type allocationProp struct {
	kind         uint32 // CU_MEM_ALLOCATION_TYPE_PINNED
	handleTypes  uint32 // how it may be shared with other processes
	locationKind uint32 // CU_MEM_LOCATION_TYPE_DEVICE
	locationID   int32
	_            uintptr // Windows security attributes
	_            uint8   // compression
	rdma         uint8   // may be read by network cards
	_            uint16  // usage
	_            [4]uint8
}

// accessDesc is CUmemAccessDesc.
type accessDesc struct {
	locationKind uint32
	locationID   int32
	flags        uint32
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

// deviceMemory is the pool's source: the driver's virtual memory management.
// Unlike cuMemAlloc it lets communication libraries map a block into the other
// GPUs (NCCL's symmetric windows need that).
// https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
type deviceMemory struct{ rt *Runtime }

// Map implements [pool.System].
func (m deviceMemory) Map(bytes int) (pool.Mapping, error) {
	r := m.rt
	size := uintptr(bytes)
	addr, err := r.get("cuMemAddressReserve", r.drv.sym.MemAddressReserve, size, pool.Granule, 0, 0)
	if err != nil {
		return pool.Mapping{}, err
	}
	handle, err := r.get("cuMemCreate", r.drv.sym.MemCreate, size, hostmem.AddrOf(r.memory), 0)
	if err != nil {
		_ = r.giveBack("cuMemAddressFree", r.drv.sym.MemAddressFree, addr, size)
		return pool.Mapping{}, err
	}
	mapping := pool.Mapping{Addr: addr, Handle: handle, Bytes: bytes}
	if err := r.do("cuMemMap", r.drv.sym.MemMap, addr, size, 0, handle, 0); err != nil {
		_ = r.giveBack("cuMemRelease", r.drv.sym.MemRelease, handle)
		_ = r.giveBack("cuMemAddressFree", r.drv.sym.MemAddressFree, addr, size)
		return pool.Mapping{}, err
	}
	access := &accessDesc{locationKind: locationDevice, locationID: int32(r.index), flags: accessReadWrite}
	err = r.do("cuMemSetAccess", r.drv.sym.MemSetAccess, addr, size, hostmem.AddrOf(access), 1)
	goruntime.KeepAlive(access)
	if err != nil {
		_ = m.Unmap(mapping)
		return pool.Mapping{}, err
	}
	return mapping, nil
}

// Unmap implements [pool.System]. The memory may still be in use by work that
// was submitted before it was given back, which is waited for. On a broken
// device nothing runs any more, and as much is given back as the driver takes.
func (m deviceMemory) Unmap(mapping pool.Mapping) error {
	r := m.rt
	size := uintptr(mapping.Bytes)
	if err := r.giveBack("cuCtxSynchronize", r.drv.sym.CtxSynchronize); err != nil {
		return err
	}
	if err := r.giveBack("cuMemUnmap", r.drv.sym.MemUnmap, mapping.Addr, size); err != nil {
		return err
	}
	return errors.Join(
		r.giveBack("cuMemRelease", r.drv.sym.MemRelease, mapping.Handle),
		r.giveBack("cuMemAddressFree", r.drv.sym.MemAddressFree, mapping.Addr, size))
}

// prepareMemory learns what deviceMemory needs to know of the device.
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
		return fmt.Errorf("cuda:%d: %w: the driver has no virtual memory management for this GPU", r.index, runtime.ErrUnsupported)
	}
	if shareable != 0 {
		r.memory.handleTypes = handlePosixFD
	}
	r.memory.rdma = uint8(rdma & 1)
	granularity, err := r.get("cuMemGetAllocationGranularity", r.drv.sym.MemGranularity, hostmem.AddrOf(r.memory), granularityMinimum)
	if err != nil {
		return err
	}
	if granularity > maxGranularityKnown {
		return fmt.Errorf("cuda:%d: %w: memory comes in pages of %d bytes", r.index, runtime.ErrUnsupported, granularity)
	}
	return nil
}
