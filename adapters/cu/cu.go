// Package cu lets programs that drive GPUs with gorgonia.org/cu communicate with
// tutti: the contexts, streams, events and pointers of either are given to the
// other as they are. Nothing is copied, and what one has made the other does not
// destroy.
//
// It needs cgo and the CUDA headers, as gorgonia.org/cu does, and a program that
// imports that ends at once on a machine without a driver.
package cu

import (
	"unsafe"

	"gorgonia.org/cu"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Open returns a runtime that works in a context of cu on GPU number device: one of
// cu.Device.MakeContext, cu.NewContext, or the primary one
// (cu.Device.RetainPrimaryCtx), which is what NCCL uses. The context has to outlive
// the runtime, which does not destroy it.
func Open(device int, ctx cu.CUContext, opts ...cuda.Option) (*cuda.Runtime, error) {
	return cuda.Open(device, append([]cuda.Option{cuda.WithContext(handle(ctx))}, opts...)...)
}

// WithStream has the runtime order its work on a stream of its context, as
// [cuda.WithComputeStream] says: kernels that cu launches there, and
// communication, are ordered without waiting.
func WithStream(s cu.Stream) cuda.Option { return cuda.WithComputeStream(handle(s)) }

// Context returns the context of a runtime.
func Context(rt *cuda.Runtime) cu.CUContext { return object[cu.CUContext](rt.Context()) }

// Stream returns the compute stream of a runtime, for kernels that cu launches.
func Stream(rt *cuda.Runtime) cu.Stream { return object[cu.Stream](rt.ComputeStream()) }

// Event returns an event of tutti for cu.
func Event(e *cuda.Event) cu.Event { return object[cu.Event](e.Handle()) }

// WrapStream returns a stream of cu for tutti. Its Close does nothing.
func WrapStream(rt *cuda.Runtime, s cu.Stream) *cuda.Stream { return rt.WrapStream(handle(s)) }

// WrapEvent returns an event of cu for tutti, to record and to wait for; destroy it
// with cu.
func WrapEvent(rt *cuda.Runtime, e cu.Event) *cuda.Event { return rt.WrapEvent(handle(e)) }

// Wrap makes a tensor of memory that cu allocated on the GPU of rt, after asking the
// driver whether it is that ([runtime.ErrDevice]). No shape makes a scalar.
func Wrap(rt *cuda.Runtime, p cu.DevicePtr, dt dtype.DType, shape ...int) (*runtime.Tensor, error) {
	return rt.WrapTensor(uintptr(p), dt, shape, nil, nil)
}

// Pointer returns the address of a tensor's first element, for kernels and copies
// of cu.
func Pointer(t *runtime.Tensor) (cu.DevicePtr, error) {
	p, err := t.Ptr()
	return cu.DevicePtr(p), err
}

// native are the types of cu that hold a handle of the driver, and nothing else.
type native interface {
	cu.CUContext | cu.Stream | cu.Event
}

// handle returns the handle in an object.
func handle[T native](x T) uintptr {
	return *(*uintptr)(unsafe.Pointer(&x))
}

// object returns the object of a handle.
func object[T native](handle uintptr) T {
	return *(*T)(unsafe.Pointer(&handle))
}

// The objects are as large as a handle.
var (
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.CUContext{})]struct{}{}
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.Stream{})]struct{}{}
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.Event{})]struct{}{}
)
