package cuda

import (
	"fmt"
	"os"
	goruntime "runtime"
	"sync"

	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// symbols are the functions of libcuda that this package calls, named without
// their "cu" prefix. The tag is the exported name: the driver keeps old
// signatures under the old name and adds "_v2" for a new one.
// https://docs.nvidia.com/cuda/cuda-driver-api/
type symbols struct {
	Init               dl.Func `sym:"cuInit"`
	DriverGetVersion   dl.Func `sym:"cuDriverGetVersion"`
	GetErrorName       dl.Func `sym:"cuGetErrorName"`
	GetErrorString     dl.Func `sym:"cuGetErrorString"`
	DeviceGet          dl.Func `sym:"cuDeviceGet"`
	DeviceGetCount     dl.Func `sym:"cuDeviceGetCount"`
	DeviceGetName      dl.Func `sym:"cuDeviceGetName"`
	DeviceTotalMem     dl.Func `sym:"cuDeviceTotalMem_v2"`
	DeviceGetAttribute dl.Func `sym:"cuDeviceGetAttribute"`
	DeviceGetPCIBusID  dl.Func `sym:"cuDeviceGetPCIBusId"`
	DeviceGetP2P       dl.Func `sym:"cuDeviceGetP2PAttribute"`

	PrimaryCtxRetain  dl.Func `sym:"cuDevicePrimaryCtxRetain"`
	PrimaryCtxRelease dl.Func `sym:"cuDevicePrimaryCtxRelease_v2"`
	CtxGetCurrent     dl.Func `sym:"cuCtxGetCurrent"`
	CtxSetCurrent     dl.Func `sym:"cuCtxSetCurrent"`
	CtxGetDevice      dl.Func `sym:"cuCtxGetDevice"`
	CtxSynchronize    dl.Func `sym:"cuCtxSynchronize"`
	CtxPriorityRange  dl.Func `sym:"cuCtxGetStreamPriorityRange"`

	StreamCreate       dl.Func `sym:"cuStreamCreateWithPriority"`
	StreamDestroy      dl.Func `sym:"cuStreamDestroy_v2"`
	StreamSynchronize  dl.Func `sym:"cuStreamSynchronize"`
	StreamQuery        dl.Func `sym:"cuStreamQuery"`
	StreamWaitEvent    dl.Func `sym:"cuStreamWaitEvent"`
	StreamBeginCapture dl.Func `sym:"cuStreamBeginCapture_v2"`
	StreamEndCapture   dl.Func `sym:"cuStreamEndCapture"`

	EventCreate      dl.Func `sym:"cuEventCreate"`
	EventDestroy     dl.Func `sym:"cuEventDestroy_v2"`
	EventRecord      dl.Func `sym:"cuEventRecord"`
	EventQuery       dl.Func `sym:"cuEventQuery"`
	EventSynchronize dl.Func `sym:"cuEventSynchronize"`
	EventElapsedTime dl.Func `sym:"cuEventElapsedTime"`

	GraphInstantiate dl.Func `sym:"cuGraphInstantiateWithFlags"`
	GraphLaunch      dl.Func `sym:"cuGraphLaunch"`
	GraphDestroy     dl.Func `sym:"cuGraphDestroy"`
	GraphExecDestroy dl.Func `sym:"cuGraphExecDestroy"`

	MemAddressReserve dl.Func `sym:"cuMemAddressReserve"`
	MemAddressFree    dl.Func `sym:"cuMemAddressFree"`
	MemCreate         dl.Func `sym:"cuMemCreate"`
	MemRelease        dl.Func `sym:"cuMemRelease"`
	MemMap            dl.Func `sym:"cuMemMap"`
	MemUnmap          dl.Func `sym:"cuMemUnmap"`
	MemSetAccess      dl.Func `sym:"cuMemSetAccess"`
	MemGranularity    dl.Func `sym:"cuMemGetAllocationGranularity"`
	MemGetInfo        dl.Func `sym:"cuMemGetInfo_v2"`
	MemHostAlloc      dl.Func `sym:"cuMemHostAlloc"`
	MemFreeHost       dl.Func `sym:"cuMemFreeHost"`
	MemcpyHtoD        dl.Func `sym:"cuMemcpyHtoDAsync_v2"`
	MemcpyDtoH        dl.Func `sym:"cuMemcpyDtoHAsync_v2"`
	MemcpyDtoD        dl.Func `sym:"cuMemcpyDtoDAsync_v2"`
	MemsetD8          dl.Func `sym:"cuMemsetD8Async"`
	MemsetD16         dl.Func `sym:"cuMemsetD16Async"`
	MemsetD32         dl.Func `sym:"cuMemsetD32Async"`
	PointerGetAttr    dl.Func `sym:"cuPointerGetAttribute"`

	ModuleLoadData dl.Func `sym:"cuModuleLoadData"`
	ModuleUnload   dl.Func `sym:"cuModuleUnload"`
	ModuleGetFunc  dl.Func `sym:"cuModuleGetFunction"`
	LaunchKernel   dl.Func `sym:"cuLaunchKernel"`
}

// libraryVariable names an environment variable with the driver library to use
// instead of the system's.
const libraryVariable = "TUTTI_CUDA_LIB"

// driver is the opened and initialised driver library.
type driver struct {
	sym  symbols
	outs sync.Pool
}

// open loads libcuda and initialises it, once a process. Every later call
// returns the same driver or the same error.
var open = sync.OnceValues(func() (*driver, error) {
	names := []string{"libcuda.so.1", "libcuda.so"}
	if goruntime.GOOS == "windows" {
		names = []string{"nvcuda.dll"}
	}
	if own := os.Getenv(libraryVariable); own != "" {
		names = []string{own}
	}
	lib, err := dl.Open(names...)
	if err != nil {
		return nil, fmt.Errorf("cuda: no driver library: %w: %w; install the NVIDIA driver or set %s",
			runtime.ErrUnavailable, err, libraryVariable)
	}
	d := &driver{}
	d.outs.New = func() any { return new(outs) }
	if err := lib.Bind(&d.sym); err != nil {
		return nil, fmt.Errorf("cuda: %w: %w; this driver is too old, one for CUDA 11.4 or newer is needed", runtime.ErrUnavailable, err)
	}
	if err := d.check("cuInit", -1, d.sym.Init.Call(0)); err != nil {
		return nil, fmt.Errorf("%w: %w", runtime.ErrUnavailable, err)
	}
	return d, nil
})

// outs are cells that a call stores results in. They come from a pool and so
// lie on the heap, where the garbage collector does not move them.
type outs [4]uint64

// addr is the address of cell i.
func (o *outs) addr(i int) uintptr { return hostmem.Addr(o[i:]) }

func (d *driver) out() *outs {
	o := d.outs.Get().(*outs)
	*o = outs{}
	return o
}

func (d *driver) release(o *outs) { d.outs.Put(o) }

// get makes a call that stores one result, and returns it. The result is the
// first parameter of fn, as it is of most of the driver's getters.
func (d *driver) get(call string, device int, fn dl.Func, args ...uintptr) (uint64, error) {
	out := d.out()
	defer d.release(out)
	var status uintptr
	switch len(args) {
	case 0:
		status = fn.Call(out.addr(0))
	case 1:
		status = fn.Call(out.addr(0), args[0])
	case 2:
		status = fn.Call(out.addr(0), args[0], args[1])
	case 3:
		status = fn.Call(out.addr(0), args[0], args[1], args[2])
	default:
		status = fn.Call(out.addr(0), args[0], args[1], args[2], args[3])
	}
	if err := d.check(call, device, status); err != nil {
		return 0, err
	}
	return out[0], nil
}
