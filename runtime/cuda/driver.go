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

// symbols are the functions of libcuda that this package calls, named without their "cu" prefix. The tag is the
// exported name: the driver keeps an old signature under the old name and adds "_v2" for a new one. Bind sets them
// once, and nothing changes them after; an optional function that the library lacks stays zero.
// https://docs.nvidia.com/cuda/cuda-driver-api/
type symbols struct {
	// Driver and devices.
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

	// Contexts.
	PrimaryCtxRetain  dl.Func `sym:"cuDevicePrimaryCtxRetain"`
	PrimaryCtxRelease dl.Func `sym:"cuDevicePrimaryCtxRelease_v2"`
	CtxGetCurrent     dl.Func `sym:"cuCtxGetCurrent"`
	CtxSetCurrent     dl.Func `sym:"cuCtxSetCurrent"`
	CtxGetDevice      dl.Func `sym:"cuCtxGetDevice"`
	CtxPriorityRange  dl.Func `sym:"cuCtxGetStreamPriorityRange"`

	// Streams.
	StreamCreate       dl.Func `sym:"cuStreamCreateWithPriority"`
	StreamDestroy      dl.Func `sym:"cuStreamDestroy_v2"`
	StreamSynchronize  dl.Func `sym:"cuStreamSynchronize"`
	StreamQuery        dl.Func `sym:"cuStreamQuery"`
	StreamGetCtx       dl.Func `sym:"cuStreamGetCtx"`
	StreamWaitEvent    dl.Func `sym:"cuStreamWaitEvent"`
	StreamIsCapturing  dl.Func `sym:"cuStreamIsCapturing"`
	StreamWriteValue   dl.Func `sym:"cuStreamWriteValue64_v2,optional"` // 11.7
	StreamBeginCapture dl.Func `sym:"cuStreamBeginCapture_v2"`
	StreamEndCapture   dl.Func `sym:"cuStreamEndCapture"`
	ThreadExchangeMode dl.Func `sym:"cuThreadExchangeStreamCaptureMode"`

	// Events.
	EventCreate      dl.Func `sym:"cuEventCreate"`
	EventDestroy     dl.Func `sym:"cuEventDestroy_v2"`
	EventRecord      dl.Func `sym:"cuEventRecord"`
	EventQuery       dl.Func `sym:"cuEventQuery"`
	EventSynchronize dl.Func `sym:"cuEventSynchronize"`
	EventElapsedTime dl.Func `sym:"cuEventElapsedTime"`

	// Captured graphs.
	GraphInstantiate dl.Func `sym:"cuGraphInstantiateWithFlags"`
	GraphLaunch      dl.Func `sym:"cuGraphLaunch"`
	GraphDestroy     dl.Func `sym:"cuGraphDestroy"`
	GraphExecDestroy dl.Func `sym:"cuGraphExecDestroy"`

	// Memory.
	MemAddressReserve dl.Func `sym:"cuMemAddressReserve"`
	MemAddressFree    dl.Func `sym:"cuMemAddressFree"`
	MemCreate         dl.Func `sym:"cuMemCreate"`
	MemRelease        dl.Func `sym:"cuMemRelease"`
	MemMap            dl.Func `sym:"cuMemMap"`
	MemUnmap          dl.Func `sym:"cuMemUnmap"`
	MemSetAccess      dl.Func `sym:"cuMemSetAccess"`
	MemExport         dl.Func `sym:"cuMemExportToShareableHandle"`
	MemImport         dl.Func `sym:"cuMemImportFromShareableHandle"`
	MemGranularity    dl.Func `sym:"cuMemGetAllocationGranularity"`
	MemGetInfo        dl.Func `sym:"cuMemGetInfo_v2"`
	MemHostAlloc      dl.Func `sym:"cuMemHostAlloc"`
	MemFreeHost       dl.Func `sym:"cuMemFreeHost"`
	MemHostRegister   dl.Func `sym:"cuMemHostRegister_v2"`
	MemHostUnregister dl.Func `sym:"cuMemHostUnregister"`
	MemcpyHtoD        dl.Func `sym:"cuMemcpyHtoDAsync_v2"`
	MemcpyDtoH        dl.Func `sym:"cuMemcpyDtoHAsync_v2"`
	MemcpyDtoD        dl.Func `sym:"cuMemcpyDtoDAsync_v2"`
	MemsetD8          dl.Func `sym:"cuMemsetD8Async"`
	MemsetD16         dl.Func `sym:"cuMemsetD16Async"`
	MemsetD32         dl.Func `sym:"cuMemsetD32Async"`
	PointerGetAttr    dl.Func `sym:"cuPointerGetAttribute"`

	// Modules and kernels.
	ModuleLoadData dl.Func `sym:"cuModuleLoadData"`
	ModuleUnload   dl.Func `sym:"cuModuleUnload"`
	ModuleGetFunc  dl.Func `sym:"cuModuleGetFunction"`
	LaunchKernel   dl.Func `sym:"cuLaunchKernel"`
	LaunchKernelEx dl.Func `sym:"cuLaunchKernelEx,optional"`
}

// libraryVariable names an environment variable with the driver library to use
// instead of the system's.
const libraryVariable = "TUTTI_CUDA_LIB"

// driver is the opened and initialized driver library.
type driver struct {
	sym  symbols   // the functions; Found says which the library lacks
	outs sync.Pool // cells for results of calls
	// unmapping keeps threads from releasing mappings of the same memory at once, after which driver 580 frees its own
	// memory twice. It is held from cuMemUnmap to the last call of a mapping; holding it for less has not been shown
	// to be safe. (Without it, 9,000 pairs of mappings on one GPU were released without a failure; the failures were
	// on two GPUs.)
	unmapping sync.Mutex
	orders    orders // locks itself
}

// open loads libcuda and initializes it, once per process. Every later call returns the same driver or the same error.
var open = sync.OnceValues(func() (*driver, error) {
	names := []string{"libcuda.so.1", "libcuda.so"}
	if goruntime.GOOS == "windows" {
		names = []string{"nvcuda.dll"}
	}
	if name := os.Getenv(libraryVariable); name != "" {
		names = []string{name}
	}
	lib, err := dl.Open(names...)
	if err != nil {
		return nil, fmt.Errorf("cuda: %w: no driver library: %w; install the NVIDIA driver or set %s",
			runtime.ErrUnavailable, err, libraryVariable)
	}
	d := &driver{}
	d.outs.New = func() any { return new(outs) }
	err = lib.Bind(&d.sym)
	if err == nil {
		err = d.check(d.sym.Init, -1, d.sym.Init.Int(0))
		if err != nil {
			err = fmt.Errorf("%s: %w", lib.Name(), err)
		}
	}
	// The first error of an old driver is due to its age.
	if v := d.version(); v != 0 && v < oldestDriver {
		return nil, fmt.Errorf("cuda: %w: %s is a driver for CUDA %s, one for %s or newer is needed",
			runtime.ErrUnavailable, lib.Name(), versionText(v), versionText(oldestDriver))
	}
	if err != nil {
		return nil, fmt.Errorf("cuda: %w: %w", runtime.ErrUnavailable, err)
	}
	return d, nil
})

// oldestDriver is the version (1000 * major + 10 * minor) of the first driver with all symbols and a compiler for PTX
// ISA 7.5, which the kernels use.
const oldestDriver = 11050

// version returns the newest CUDA version that the driver supports, 0 if unknown. It may be called before cuInit.
func (d *driver) version() int {
	out := d.out()
	defer d.release(out)
	ask := d.sym.DriverGetVersion
	if !ask.Found() || Status(ask.Int(out.addr(0))) != statusSuccess {
		return 0
	}
	return int(int32(out[0]))
}

func versionText(v int) string {
	return fmt.Sprintf("%d.%d", v/1000, v%1000/10)
}

// outs are cells in which a call stores results. They come from a pool, and thus lie on the heap, where the garbage
// collector does not move them.
type outs [4]uint64

// addr returns the address of cell i.
func (o *outs) addr(i int) uintptr {
	return hostmem.Addr(o[i:])
}

func (d *driver) out() *outs {
	o := d.outs.Get().(*outs)
	*o = outs{}
	return o
}

func (d *driver) release(o *outs) {
	d.outs.Put(o)
}

// captureRelaxed is CU_STREAM_CAPTURE_MODE_RELAXED.
const captureRelaxed = 2

// relaxed runs f on a thread whose calls disturb no capture. f must not submit to a stream that captures.
func (d *driver) relaxed(f func()) {
	// A capture that a framework has begun in the global mode ends at any call that may disturb it, on any thread,
	// unless that thread has declared its calls harmless. (Driver 580 may crash if the framework ends the capture at
	// the same time.)
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	mode := d.out()
	defer d.release(mode)
	mode[0] = captureRelaxed
	exchange := d.sym.ThreadExchangeMode
	exchange.Int(mode.addr(0))
	defer exchange.Int(mode.addr(0)) // the previous mode
	f()
}

// manage makes a call that submits nothing: it queries an object, waits for it, makes or frees one.
func (d *driver) manage(fn dl.Func, args ...uintptr) (status Status) {
	d.relaxed(func() { status = Status(fn.Int(args...)) })
	return status
}

// get makes a call that stores one result, and returns it. The result is the first parameter of fn, as in most of the
// driver's getters.
func (d *driver) get(device int, fn dl.Func, args ...uintptr) (uint64, error) {
	out := d.out()
	defer d.release(out)
	all := [5]uintptr{out.addr(0)}
	if len(args) >= len(all) {
		panic("cuda: get with more arguments than any getter has")
	}
	n := copy(all[1:], args)
	if status := d.manage(fn, all[:1+n]...); status != statusSuccess {
		return 0, d.newError(fn, device, status)
	}
	return out[0], nil
}
