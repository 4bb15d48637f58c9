package cuda

import (
	"errors"
	"fmt"
	goruntime "runtime"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/internal/pool"
)

// SharedMemory is GPU memory that several GPUs of this machine can access, in this process or in others. Each has its
// own mapping at its own address. The memory lives until the last mapping is closed, or their processes end.
type SharedMemory struct {
	object
	bytes int // of the mapping
}

// AllocateShared allocates memory on this GPU that other GPUs can map, of at least this many bytes. It does not come
// from the pool, and its content is undefined.
func (r *Runtime) AllocateShared(bytes int) (*SharedMemory, error) {
	if bytes <= 0 {
		return nil, r.argument("%d bytes of shared memory", bytes)
	}
	if r.memory.handleTypes != handlePosixFD {
		return nil, fmt.Errorf(
			"cuda:%d: %w: memory of this GPU cannot be shared by file descriptors",
			r.index,
			runtime.ErrUnsupported,
		)
	}
	bytes = (bytes + pool.Granule - 1) / pool.Granule * pool.Granule
	return r.mapShared(bytes, func() (handle uintptr, err error) {
		return r.get(r.drv.sym.MemCreate, uintptr(bytes), hostmem.AddrOf(r.memory), 0)
	})
}

// ImportShared maps memory of any GPU that this one can access. It takes the results of the owner's Export and Bytes,
// possibly from another process. The caller keeps the descriptor and may close it at once. Memory that this GPU cannot
// access is [runtime.ErrUnsupported].
func (r *Runtime) ImportShared(fd, bytes int) (*SharedMemory, error) {
	m, err := r.mapShared(bytes, func() (handle uintptr, err error) {
		return r.get(r.drv.sym.MemImport, uintptr(fd), handlePosixFD)
	})
	var e *Error
	if errors.As(err, &e) && (e.Status == statusInvalidDevice || e.Status == statusNoPeerAccess) {
		err = fmt.Errorf("%w: no access to memory of that GPU: %w", runtime.ErrUnsupported, err)
	}
	return m, err
}

// mapShared maps the memory whose handle get returns.
func (r *Runtime) mapShared(bytes int, get func() (handle uintptr, err error)) (*SharedMemory, error) {
	// Close must not run between the calls and the record of their results.
	if !r.gate.enter() {
		return nil, r.usable()
	}
	defer r.gate.leave()
	handle, err := get()
	if err != nil {
		return nil, err
	}
	mapping, err := deviceMemory{r}.mapHandle(handle, bytes)
	if err != nil {
		return nil, err
	}
	r.owned.add(mapping.Addr, destructor{memory: handle, size: bytes})
	return &SharedMemory{object: object{rt: r, handle: mapping.Addr}, bytes: bytes}, nil
}

// Address is the address of the memory for kernels of this runtime's GPU.
func (m *SharedMemory) Address() uintptr { return m.handle }

// Bytes is the size, a multiple of 2 MiB.
func (m *SharedMemory) Bytes() int { return m.bytes }

// Export returns a file descriptor of the memory, which can be sent to another process. The caller closes it.
func (m *SharedMemory) Export() (fd int, err error) {
	address, err := m.use("shared memory")
	if err != nil {
		return -1, err
	}
	r := m.rt
	d, found := r.owned.get(address)
	if !found {
		return -1, r.argument("shared memory was closed")
	}
	out := r.drv.out()
	defer r.drv.release(out)
	err = r.manage(r.drv.sym.MemExport, out.addr(0), d.memory, handlePosixFD, 0)
	goruntime.KeepAlive(out)
	return int(int32(out[0])), err
}

// Close unmaps the memory. Nothing may use this mapping afterwards.
func (m *SharedMemory) Close() error {
	return m.close()
}
