package nccl_test

import (
	"context"

	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// read copies n float32 from device memory.
func read(rt runtime.Runtime, p uintptr, n int) ([]float32, error) {
	out := make([]float32, n)
	return out, rt.CopyOut(hostmem.Bytes(out), p)
}

// buffers returns how to allocate and free memory for collectives of c.
func buffers(ctx context.Context, c *nccl.Comm, symmetric bool) (
	allocate func(bytes int) (uintptr, error), free func(buf uintptr) error) {
	if !symmetric {
		return c.Runtime().Allocate, c.Runtime().Deallocate
	}
	return func(bytes int) (uintptr, error) { return c.AllocateSymmetric(ctx, bytes) },
		func(buf uintptr) error { return c.FreeSymmetric(ctx, buf) }
}
