package distributed

import (
	"errors"

	"github.com/tutti-go/tutti/runtime"
)

// buffer is device memory that grows when more is needed.
type buffer struct {
	ptr   uintptr
	bytes int
}

// buffers are those that hold memory.
type buffers []*buffer

// allocate makes b hold at least bytes bytes; its content is lost when it has
// to grow.
func (all *buffers) allocate(rt runtime.Runtime, b *buffer, bytes int) error {
	if bytes <= b.bytes {
		return nil
	}
	if b.ptr == 0 {
		*all = append(*all, b)
	}
	err := rt.Deallocate(b.ptr)
	*b = buffer{}
	ptr, failed := rt.Allocate(bytes)
	if failed == nil {
		*b = buffer{ptr: ptr, bytes: bytes}
	}
	return errors.Join(err, failed)
}

// release gives the memory of all but the first buffers back; they are empty then and grow again.
func (all *buffers) release(rt runtime.Runtime, from int) error {
	var errs []error
	for _, b := range (*all)[from:] {
		errs = append(errs, rt.Deallocate(b.ptr))
		*b = buffer{}
	}
	*all = (*all)[:from]
	return errors.Join(errs...)
}
