package cuda

import (
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// Pointer attributes, CUpointer_attribute.
const (
	pointerMemoryType = 2
	pointerIsManaged  = 8
	pointerOrdinal    = 9
)

// Values of pointerMemoryType, CUmemorytype.
const (
	memoryTypeHost   = 1
	memoryTypeDevice = 2
)

// WrapTensor makes a tensor of memory on this GPU that other code allocated. It is [runtime.Wrap] (release is not
// called after an error) with a check by the driver: memory of the host or of another GPU is [runtime.ErrDevice].
func (r *Runtime) WrapTensor(ptr uintptr, dt dtype.DType, shape, strides []int,
	release func()) (*runtime.Tensor, error) {
	t, err := runtime.Wrap(r, ptr, dt, shape, strides, release)
	if err != nil || t.Len() == 0 {
		return t, err
	}
	if err := r.CheckPointer(ptr); err != nil {
		return nil, fmt.Errorf("wrap %v: %w", t, err)
	}
	return t, nil
}

// CheckPointer returns an error unless an address lies in memory of this GPU, or in managed memory, whoever allocated
// it. The error wraps [runtime.ErrDevice] and says what the memory is: page-locked host memory, memory of another GPU,
// or unknown to the driver. The call takes about as long as a launch.
func (r *Runtime) CheckPointer(ptr uintptr) error {
	refuse := func(memory string) error {
		return fmt.Errorf("cuda:%d: %w: %#x is %s", r.index, runtime.ErrDevice, ptr, memory)
	}
	const unknown = "no memory that the driver knows: it is the host's, not page-locked, or was freed"
	if ptr == 0 {
		return r.argument("nil pointer")
	}
	managed, err := r.pointerAttribute(pointerIsManaged, ptr)
	var e *Error
	switch {
	case errors.As(err, &e) && e.Status == statusInvalidValue:
		return refuse(unknown)
	case err != nil:
		return err
	case managed&0xff != 0: // a C bool
		return nil
	}
	kind, err := r.pointerAttribute(pointerMemoryType, ptr)
	if err != nil {
		return err
	}
	switch uint32(kind) {
	case memoryTypeDevice:
	case memoryTypeHost:
		return refuse("page-locked memory of the host")
	default:
		return refuse(unknown)
	}
	ordinal, err := r.pointerAttribute(pointerOrdinal, ptr)
	if err != nil {
		return err
	}
	if index := int(int32(ordinal)); index != r.index {
		return refuse(fmt.Sprintf("memory of cuda:%d", index))
	}
	return nil
}

func (r *Runtime) pointerAttribute(attribute, ptr uintptr) (uintptr, error) {
	return r.get(r.drv.sym.PointerGetAttr, attribute, ptr)
}
