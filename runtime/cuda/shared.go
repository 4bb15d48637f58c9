package cuda

import (
	"errors"
	"fmt"
	goruntime "runtime"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/memfd"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/internal/pool"
)

// SharedMemory is memory that several GPUs of this machine reach, of this process or
// of others: a GPU's, or the host's. Each GPU has a mapping of its own, at an address of its own;
// the memory lives until the last of them is closed, or their processes end.
type SharedMemory struct {
	object
	bytes int
}

// AllocateShared makes memory that other GPUs can map, of at least that many bytes: of
// this GPU ([runtime.CUDA]), or page-locked memory of the host ([runtime.CPU]), which GPUs reach that do
// not reach each other's. It is not of the pool, and nothing is known of its content.
func (r *Runtime) AllocateShared(kind runtime.Kind, bytes int) (*SharedMemory, error) {
	if bytes <= 0 {
		return nil, r.argument("%d bytes of shared memory", bytes)
	}
	bytes = (bytes + pool.Granule - 1) / pool.Granule * pool.Granule
	if kind == runtime.CPU {
		return r.mapShared(kind, bytes, func() (handle uintptr, err error) {
			fd, err := memfd.Create("tutti-cuda", bytes)
			return uintptr(fd), err
		})
	}
	if r.memory.handleTypes != handlePosixFD {
		return nil, fmt.Errorf("cuda:%d: %w: memory of this GPU cannot be shared by file descriptors", r.index, runtime.ErrUnsupported)
	}
	return r.mapShared(kind, bytes, func() (handle uintptr, err error) {
		return r.get(r.drv.sym.MemCreate, uintptr(bytes), hostmem.AddrOf(r.memory), 0)
	})
}

// ImportShared maps memory of the host, or of any GPU that this one reaches, given by its kind,
// by what Export returned, possibly in another process, and by its Bytes. The descriptor stays the
// caller's and can be closed at once. Memory out of reach is [runtime.ErrUnsupported].
func (r *Runtime) ImportShared(kind runtime.Kind, fd, bytes int) (*SharedMemory, error) {
	m, err := r.mapShared(kind, bytes, func() (handle uintptr, err error) {
		if kind == runtime.CPU {
			own, err := memfd.Duplicate(fd)
			return uintptr(own), err
		}
		return r.get(r.drv.sym.MemImport, uintptr(fd), handlePosixFD)
	})
	var e *Error
	if errors.As(err, &e) && (e.Status == statusInvalidDevice || e.Status == statusNoPeerAccess) {
		err = fmt.Errorf("%w: no access to memory of that GPU: %w", runtime.ErrUnsupported, err)
	}
	return m, err
}

// mapShared maps the memory whose handle get returns: the driver's, or a file descriptor.
func (r *Runtime) mapShared(kind runtime.Kind, bytes int, get func() (handle uintptr, err error)) (*SharedMemory, error) {
	// Close must not come between the calls and the note of what they made.
	if !r.gate.enter() {
		return nil, r.usable()
	}
	defer r.gate.leave()
	handle, err := get()
	if err != nil {
		return nil, err
	}
	var address uintptr
	d := destructor{memory: handle, size: bytes}
	if kind == runtime.CPU {
		address, d.host, err = r.mapHost(int(handle), bytes)
	} else {
		var mapping pool.Mapping
		mapping, err = deviceMemory{r}.mapHandle(handle, bytes)
		address = mapping.Addr
	}
	if err != nil {
		return nil, err
	}
	r.owned.add(address, d)
	return &SharedMemory{object: object{rt: r, handle: address}, bytes: bytes}, nil
}

// hostRegisterMapped is CU_MEMHOSTREGISTER_DEVICEMAP: kernels reach the memory.
const hostRegisterMapped = 2

// mapHost maps the memory of a file descriptor, which it takes over, for this process and its
// GPUs. It returns where kernels find it.
func (r *Runtime) mapHost(fd, bytes int) (address uintptr, host []byte, err error) {
	if host, err = memfd.Map(fd, bytes); err != nil {
		memfd.Close(fd)
		return 0, nil, err
	}
	at := hostmem.Addr(host)
	err = r.do(r.drv.sym.MemHostRegister, at, uintptr(bytes), hostAllocPortable|hostRegisterMapped)
	if err == nil {
		if address, err = r.get(r.drv.sym.MemHostDevicePtr, at, 0); err == nil {
			return address, host, nil
		}
		return 0, nil, errors.Join(err, r.unmapHost(fd, host))
	}
	memfd.Unmap(host)
	memfd.Close(fd)
	return 0, nil, err
}

// unmapHost undoes mapHost.
func (r *Runtime) unmapHost(fd int, host []byte) error {
	if err := r.giveBack(r.drv.sym.MemHostUnregister, hostmem.Addr(host)); err != nil {
		return err
	}
	memfd.Unmap(host)
	memfd.Close(fd)
	return nil
}

// Address is where the memory begins for kernels of this runtime's GPU.
func (m *SharedMemory) Address() uintptr { return m.handle }

// Bytes is the size, a multiple of 2 MiB.
func (m *SharedMemory) Bytes() int { return m.bytes }

// Export returns a file descriptor that stands for the memory, which the caller
// closes. It can be sent to another process.
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
	if d.host != nil {
		return memfd.Duplicate(int(d.memory))
	}
	out := r.drv.out()
	defer r.drv.release(out)
	err = r.do(r.drv.sym.MemExport, out.addr(0), d.memory, handlePosixFD, 0)
	goruntime.KeepAlive(out)
	return int(int32(out[0])), err
}

// Close gives this mapping up. Nothing may use it any more.
func (m *SharedMemory) Close() error { return m.close() }
