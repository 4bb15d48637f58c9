package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/window"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// measureWindow measures what a device does with memory that both ranks share: all data at once, each direction alone,
// both, and a reduction of what both ranks have there.
func measureWindow(ctx context.Context, base comm.Communicator, gpu *cuda.Runtime, b *buffers) error {
	sharer, ok := comm.As[interface {
		ShareMemory(ctx context.Context, bytes int) ([]byte, error)
		UnshareMemory(memory []byte)
	}](base)
	if !ok {
		return nil
	}
	memory, err := sharer.ShareMemory(ctx, base.WorldSize()*b.bytes)
	if err != nil || memory == nil {
		return err
	}
	defer sharer.UnshareMemory(memory)
	var w window.Window
	err = once(base, fmt.Sprintf("%d | open a window of both ranks", b.bytes), func() (err error) {
		w, err = gpu.OpenWindow(memory)
		return err
	})
	if err != nil {
		return err
	}
	part := func(rank int) []byte { return memory[rank%base.WorldSize()*b.bytes:][:b.bytes] }
	outbound := part(base.Rank())
	inbound := part(base.Rank() + 1)
	operands := []uintptr{b.memory, hostmem.Addr(inbound)}
	err = measureAllOf(ctx, base, b.bytes, []call{
		{"device to window", func() error { return errors.Join(w.CopyOut(outbound, b.memory), w.Wait()) }},
		{"window to device", func() error { return errors.Join(w.CopyIn(b.memory, inbound), w.Wait()) }},
		{"device to window and back", func() error {
			return errors.Join(w.CopyOut(outbound, b.memory), w.CopyIn(b.memory, inbound), w.Wait())
		}},
		{"device reduces what it copies from the window", func() error {
			return errors.Join(w.Reduce(b.memory, operands, b.bytes/4, dtype.F32, comm.Max), w.Wait())
		}},
		{"the same, while it copies to the window", func() error {
			err := w.CopyOut(outbound, b.memory)
			return errors.Join(err, w.Reduce(b.memory, operands, b.bytes/4, dtype.F32, comm.Max), w.Wait())
		}},
		{"wait for nothing", w.Wait},
	})
	return errors.Join(err, base.Barrier(ctx), w.Close())
}

// timedWindow is a window whose work is parts.
type timedWindow struct {
	window.Window
	timeline *timeline // of the work
}

func (w timedWindow) CopyOut(dst []byte, src uintptr) error {
	return w.timeline.time("submit copy out", func() error { return w.Window.CopyOut(dst, src) })
}

func (w timedWindow) CopyIn(dst uintptr, src []byte) error {
	return w.timeline.time("submit copy in", func() error { return w.Window.CopyIn(dst, src) })
}

func (w timedWindow) Reduce(dst uintptr, operands []uintptr, n int, dt dtype.DType, op comm.ReduceOp) error {
	return w.timeline.time("submit reduction", func() error { return w.Window.Reduce(dst, operands, n, dt, op) })
}

func (w timedWindow) Wait() error { return w.timeline.time("wait for device", w.Window.Wait) }
