package cuda

import (
	"fmt"

	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// Status is a CUresult, the status code of a driver call.
// https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html
type Status int32

// The status codes that this package distinguishes.
const (
	statusSuccess       Status = 0
	statusInvalidValue  Status = 1
	statusOutOfMemory   Status = 2
	statusNoDevice      Status = 100
	statusInvalidDevice Status = 101
	statusNoPeerAccess  Status = 217
	statusNotReady      Status = 600
	statusNotSupported  Status = 801
)

// sticky are the codes after which a context refuses all further work and is lost to the process. (From the
// descriptions in the driver API's cudaError_enum: "This leaves the process in an inconsistent state".)
var sticky = map[Status]bool{
	214: true, // CUDA_ERROR_ECC_UNCORRECTABLE
	220: true, // CUDA_ERROR_NVLINK_UNCORRECTABLE
	226: true, // CUDA_ERROR_CONTAINED
	700: true, // CUDA_ERROR_ILLEGAL_ADDRESS
	702: true, // CUDA_ERROR_LAUNCH_TIMEOUT
	710: true, // CUDA_ERROR_ASSERT
	714: true, // CUDA_ERROR_HARDWARE_STACK_ERROR
	715: true, // CUDA_ERROR_ILLEGAL_INSTRUCTION
	716: true, // CUDA_ERROR_MISALIGNED_ADDRESS
	717: true, // CUDA_ERROR_INVALID_ADDRESS_SPACE
	718: true, // CUDA_ERROR_INVALID_PC
	719: true, // CUDA_ERROR_LAUNCH_FAILED
	721: true, // CUDA_ERROR_TENSOR_MEMORY_LEAK
}

// Error is a failed driver call.
type Error struct {
	Status Status // never Success
	Name   string // "CUDA_ERROR_ILLEGAL_ADDRESS"
	Text   string // the driver's description
	Call   string // "cuMemAlloc"
	Device int    // the device's ordinal, -1 before there is one
	// Sticky means that the context and every runtime on this device in this process are unusable from now on.
	Sticky bool
}

// The first and the last code of stream captures, and the code of a wait for an event that is being captured.
const (
	statusCaptureUnsupported Status = 900 // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
	statusCapturedEvent      Status = 907 // CUDA_ERROR_CAPTURED_EVENT
	statusCaptureWrongThread Status = 908 // CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
)

// InCapture reports whether the call failed because of a stream capture, which forbids it or which an earlier call
// invalidated. That is a mistake of the program (see [Stream.Capture]) and leaves the device intact.
func (e *Error) InCapture() bool {
	return e.Status >= statusCaptureUnsupported && e.Status <= statusCaptureWrongThread
}

// Error returns "cuda:0: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory".
func (e *Error) Error() string {
	device := "cuda"
	if e.Device >= 0 {
		device = fmt.Sprintf("cuda:%d", e.Device)
	}
	s := fmt.Sprintf("%s: %s: %s (%d): %s", device, e.Call, e.Name, e.Status, e.Text)
	switch {
	case e.Status == statusCaptureUnsupported, e.Status == statusCapturedEvent:
		s += "; the stream is being captured, wait outside Capture"
	case e.Sticky:
		s += "; the CUDA context is unusable from here on, restart the process"
	}
	return s
}

// Is reports whether the failure corresponds to a sentinel error of package runtime.
func (e *Error) Is(target error) bool {
	switch target {
	case runtime.ErrOutOfMemory:
		return e.Status == statusOutOfMemory
	case runtime.ErrBroken:
		return e.Sticky
	case runtime.ErrArgument:
		return e.Status == statusInvalidValue
	case runtime.ErrUnavailable:
		return e.Status == statusNoDevice || e.Status == statusInvalidDevice
	case runtime.ErrUnsupported:
		return e.Status == statusNotSupported
	}
	return false
}

// check turns the status of a call into an error, nil for success.
func (d *driver) check(fn dl.Func, device int, status int32) error {
	if s := Status(status); s != statusSuccess {
		return d.newError(fn, device, s)
	}
	return nil
}

// newError is separate so that check can be inlined.
func (d *driver) newError(fn dl.Func, device int, s Status) error {
	return &Error{
		Status: s,
		Name:   d.statusString(d.sym.GetErrorName, s, "CUDA_ERROR"),
		Text:   d.statusString(d.sym.GetErrorString, s, "no description"),
		Call:   fn.Name(),
		Device: device,
		Sticky: sticky[s],
	}
}

// statusString queries the name or text of a status.
func (d *driver) statusString(fn dl.Func, s Status, unknown string) string {
	out := d.out()
	defer d.release(out)
	if !fn.Found() || Status(fn.Int(uintptr(s), out.addr(0))) != statusSuccess || out[0] == 0 {
		return unknown
	}
	return hostmem.CString(uintptr(out[0]))
}
