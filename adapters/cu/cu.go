// Package cu lets programs that drive GPUs with gorgonia.org/cu communicate with tutti. Contexts, streams, events and
// pointers pass between the two unchanged. Nothing is copied, and neither destroys what the other has made.
//
// The package needs cgo and the CUDA headers, as gorgonia.org/cu does. A program that imports gorgonia.org/cu ends at
// once on a machine without a driver.
package cu

import (
	"unsafe"

	"gorgonia.org/cu"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Open returns a runtime that works in a context of cu on GPU number device. The context comes from
// cu.Device.MakeContext or cu.NewContext, or is the primary one (cu.Device.RetainPrimaryCtx), which NCCL uses. The
// context must outlive the runtime, which does not destroy it.
func Open(device int, ctx cu.CUContext, opts ...cuda.Option) (*cuda.Runtime, error) {
	return cuda.Open(device, append([]cuda.Option{cuda.WithContext(handle(ctx))}, opts...)...)
}

// WithStream makes the runtime order its work on a stream of its context, as [cuda.WithComputeStream] says. Kernels
// that cu launches there are ordered with communication without waiting.
func WithStream(s cu.Stream) cuda.Option { return cuda.WithComputeStream(handle(s)) }

// Context returns the context of a runtime.
func Context(rt *cuda.Runtime) cu.CUContext { return object[cu.CUContext](rt.Context()) }

// Stream returns the compute stream of a runtime, for kernels launched by cu.
func Stream(rt *cuda.Runtime) cu.Stream { return object[cu.Stream](rt.ComputeStream()) }

// Event converts an event of tutti to one of cu.
func Event(e *cuda.Event) cu.Event { return object[cu.Event](e.Handle()) }

// WrapStream converts a stream of cu to one of tutti. Its Close does nothing.
func WrapStream(rt *cuda.Runtime, s cu.Stream) *cuda.Stream { return rt.WrapStream(handle(s)) }

// WrapEvent converts an event of cu to one of tutti, to record and to wait for. Destroy it with cu.
func WrapEvent(rt *cuda.Runtime, e cu.Event) *cuda.Event { return rt.WrapEvent(handle(e)) }

// Wrap makes a tensor of memory that cu allocated on rt's GPU. It returns [runtime.ErrDevice] if the driver says that
// the memory is not there. Without a shape the tensor is a scalar.
func Wrap(rt *cuda.Runtime, p cu.DevicePtr, dt dtype.DType, shape ...int) (*runtime.Tensor, error) {
	return rt.WrapTensor(uintptr(p), dt, shape, nil, nil)
}

// Pointer returns the address of a tensor's first element, for kernels and copies
// of cu.
func Pointer(t *runtime.Tensor) (cu.DevicePtr, error) {
	p, err := t.Ptr()
	return cu.DevicePtr(p), err
}

// native are cu's types that hold only a handle of the driver.
type native interface {
	cu.CUContext | cu.Stream | cu.Event
}

// handle returns the handle of an object.
func handle[T native](x T) uintptr {
	return *(*uintptr)(unsafe.Pointer(&x))
}

// object returns the object for a handle.
func object[T native](handle uintptr) T {
	return *(*T)(unsafe.Pointer(&handle))
}

// Each object is as large as a handle.
var (
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.CUContext{})]struct{}{}
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.Stream{})]struct{}{}
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.Event{})]struct{}{}
)
