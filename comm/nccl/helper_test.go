package nccl_test

import (
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// read copies n float32 from device memory.
func read(rt runtime.Runtime, p uintptr, n int) ([]float32, error) {
	out := make([]float32, n)
	return out, rt.CopyOut(hostmem.Bytes(out), p)
}
