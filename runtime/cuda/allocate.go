package cuda

import (
	"fmt"

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
	return r.pool.Allocate(bytes)
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
	handlePosixFD       = 1 // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
	locationDevice      = 1 // CU_MEM_LOCATION_TYPE_DEVICE
	accessReadWrite     = 3 // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
	attrRDMAWithVMM     = 110
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
	prop := &allocationProp{
		kind:         allocationPinned,
		handleTypes:  handlePosixFD,
		locationKind: locationDevice,
		locationID:   int32(r.index),
		rdma:         r.rdma,
	}
	addr, err := r.get("cuMemAddressReserve", r.drv.sym.MemAddressReserve, size, pool.Granule, 0, 0)
	if err != nil {
		return pool.Mapping{}, err
	}
	handle, err := r.get("cuMemCreate", r.drv.sym.MemCreate, size, hostmem.AddrOf(prop), 0)
	if err != nil {
		_ = r.do("cuMemAddressFree", r.drv.sym.MemAddressFree, addr, size)
		return pool.Mapping{}, err
	}
	mapping := pool.Mapping{Addr: addr, Handle: handle, Bytes: bytes}
	if err := r.do("cuMemMap", r.drv.sym.MemMap, addr, size, 0, handle, 0); err != nil {
		_ = r.do("cuMemRelease", r.drv.sym.MemRelease, handle)
		_ = r.do("cuMemAddressFree", r.drv.sym.MemAddressFree, addr, size)
		return pool.Mapping{}, err
	}
	access := &accessDesc{locationKind: locationDevice, locationID: int32(r.index), flags: accessReadWrite}
	if err := r.do("cuMemSetAccess", r.drv.sym.MemSetAccess, addr, size, hostmem.AddrOf(access), 1); err != nil {
		_ = m.Unmap(mapping)
		return pool.Mapping{}, err
	}
	return mapping, nil
}

// Unmap implements [pool.System]. The memory may still be in use by work that
// was submitted before it was given back, which is waited for.
func (m deviceMemory) Unmap(mapping pool.Mapping) error {
	r := m.rt
	size := uintptr(mapping.Bytes)
	if err := r.do("cuCtxSynchronize", r.drv.sym.CtxSynchronize); err != nil {
		return err
	}
	if err := r.do("cuMemUnmap", r.drv.sym.MemUnmap, mapping.Addr, size); err != nil {
		return err
	}
	if err := r.do("cuMemRelease", r.drv.sym.MemRelease, mapping.Handle); err != nil {
		return err
	}
	return r.do("cuMemAddressFree", r.drv.sym.MemAddressFree, mapping.Addr, size)
}

// prepareMemory learns what deviceMemory needs to know of the device.
func (r *Runtime) prepareMemory() error {
	granularity, err := r.get("cuMemGetAllocationGranularity", r.drv.sym.MemGranularity, hostmem.AddrOf(&allocationProp{
		kind: allocationPinned, handleTypes: handlePosixFD, locationKind: locationDevice, locationID: int32(r.index),
	}), granularityMinimum)
	if err != nil {
		return err
	}
	if granularity > maxGranularityKnown {
		return fmt.Errorf("cuda:%d: %w: memory comes in pages of %d bytes", r.index, runtime.ErrUnsupported, granularity)
	}
	rdma, err := r.get("cuDeviceGetAttribute", r.drv.sym.DeviceGetAttribute, attrRDMAWithVMM, r.device)
	if err != nil {
		return err
	}
	r.rdma = uint8(rdma & 1)
	return nil
}
