package base

import (
	"errors"

	"github.com/tutti-go/tutti/runtime"
)

// Buffer is device memory that grows when more is needed.
type Buffer struct {
	Ptr   uintptr // 0: none yet
	Bytes int     // its length
}

// Buffers are the buffers that hold memory.
type Buffers []*Buffer

// Allocate makes b hold at least bytes bytes. Its content is lost when it grows.
func (all *Buffers) Allocate(rt runtime.Runtime, b *Buffer, bytes int) error {
	if bytes <= b.Bytes {
		return nil
	}
	if b.Ptr == 0 {
		*all = append(*all, b)
	}
	err := rt.Deallocate(b.Ptr)
	*b = Buffer{}
	ptr, failed := rt.Allocate(bytes)
	if failed == nil {
		*b = Buffer{Ptr: ptr, Bytes: bytes}
	}
	return errors.Join(err, failed)
}

// Release frees all but the first buffers; they are empty then and can grow again.
func (all *Buffers) Release(rt runtime.Runtime, from int) error {
	var errs []error
	for _, b := range (*all)[from:] {
		errs = append(errs, rt.Deallocate(b.Ptr))
		*b = Buffer{}
	}
	*all = (*all)[:from]
	return errors.Join(errs...)
}
