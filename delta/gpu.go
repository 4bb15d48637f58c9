package delta

import (
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"sync"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// The PTX of kernels/delta.cu, written by runtime/cuda/kernels/generate.sh.
//
//go:embed kernels/delta.ptx.gz
var compressed []byte

// Sizes of kernels/delta.cu.
const (
	controlBytes = 64       // the part of struct control that diff uses
	tileBytes    = 16 << 10 // taken by blocks of diff at a time; half as many for elements of one byte
	maxTiles     = 8 * blockLen / tileBytes
	scratchBytes = controlBytes + 8*maxTiles // zeros for diff
	threads      = 256
	diffsPerSM   = 4
	patchesPerSM = 8
)

// gpu has the kernels that compare and change the elements of a block in GPU memory.
type gpu struct {
	rt      *cuda.Runtime   // of the GPU
	diffs   [4]*cuda.Kernel // by the logarithm of an element's bytes
	patches [4]*cuda.Kernel // kernels that change elements, by the same
}

// gpus are the kernels of each runtime for which they are loaded.
var gpus = struct {
	sync.Mutex
	loaded map[*cuda.Runtime]*gpu // guarded by Mutex
}{loaded: map[*cuda.Runtime]*gpu{}}

// openGPU returns the kernels of a runtime, which unloads them when it is closed. The first call loads them.
func openGPU(rt *cuda.Runtime) (*gpu, error) {
	gpus.Lock()
	defer gpus.Unlock()
	if g := gpus.loaded[rt]; g != nil {
		return g, nil
	}
	maps.DeleteFunc(gpus.loaded, func(rt *cuda.Runtime, _ *gpu) bool { return isClosed(rt) })
	g, err := loadGPU(rt)
	if err != nil {
		return nil, fmt.Errorf("delta: load kernels: %w", err)
	}
	gpus.loaded[rt] = g
	return g, nil
}

func isClosed(rt *cuda.Runtime) bool {
	err := rt.Current(func() error { return nil })
	return errors.Is(err, runtime.ErrClosed)
}

func loadGPU(rt *cuda.Runtime) (*gpu, error) {
	module, err := rt.LoadModule(compressed)
	if err != nil {
		return nil, err
	}
	g := &gpu{rt: rt}
	for i := range g.diffs {
		var diffErr, patchErr error
		g.diffs[i], diffErr = module.Kernel(fmt.Sprintf("diff_%d", 1<<i))
		g.patches[i], patchErr = module.Kernel(fmt.Sprintf("patch_%d", 1<<i))
		if err := errors.Join(diffErr, patchErr); err != nil {
			return nil, errors.Join(err, module.Close())
		}
	}
	return g, nil
}

// diff is [coder.changes] on the GPU.
func (g *gpu) diff(area []byte, room int, old, now uintptr, d dtype.DType, elements int) error {
	size := d.Size()
	if err := g.checkAligned(size, old, now); err != nil {
		return err
	}
	clear(area[:scratchBytes])
	return g.withCopy(area, func(base uintptr) error {
		if err := g.rt.CopyIn(base, area[:scratchBytes+headBytes]); err != nil {
			return err
		}
		head := base + scratchBytes
		err := g.launch(g.diffs[bits.TrailingZeros(uint(size))], elements*size/(tileBytes/2)+1, diffsPerSM,
			uint64(base), uint64(base+controlBytes), uint64(old), uint64(now), uint64(elements), signFlips(d),
			uint64(head+headBytes), uint64(base)+uint64(diffsAt(room)), uint64(room), uint64(head), uint64(head+sumAt))
		if err != nil {
			return err
		}
		return g.rt.CopyOut(area[scratchBytes:], head)
	})
}

// patch is [coder.patch] on the GPU.
func (g *gpu) patch(area []byte, room, changed int, x uintptr, d dtype.DType, elements int, subtract bool) error {
	size := d.Size()
	if err := g.checkAligned(size, x); err != nil {
		return err
	}
	negate := uint64(0)
	if subtract {
		negate = 1
	}
	return g.withCopy(area, func(base uintptr) error {
		head := base + scratchBytes
		if err := g.rt.CopyIn(head, area[scratchBytes:diffsAt(room)+changed*size]); err != nil {
			return err
		}
		err := g.launch(g.patches[bits.TrailingZeros(uint(size))], (changed+threads-1)/threads, patchesPerSM,
			uint64(x), uint64(elements), signFlips(d),
			uint64(head+headBytes), uint64(base)+uint64(diffsAt(room)), uint64(changed), 0, uint64(head+sumAt), negate)
		if err != nil {
			return err
		}
		return g.rt.CopyOut(area[scratchBytes:scratchBytes+headBytes], head)
	})
}

// withCopy calls f with GPU memory of the same length as area.
func (g *gpu) withCopy(area []byte, f func(base uintptr) error) error {
	base, err := g.rt.Allocate(len(area))
	if err != nil {
		return err
	}
	return errors.Join(f(base), g.rt.Deallocate(base))
}

// checkAligned checks that elements are aligned for kernels: an unaligned access breaks the device.
func (g *gpu) checkAligned(size int, addresses ...uintptr) error {
	for _, address := range addresses {
		if address%uintptr(size) != 0 {
			return fmt.Errorf("delta: elements of %d bytes at %#x are not aligned: %w", size, address, runtime.ErrArgument)
		}
	}
	return nil
}

// launch runs a kernel with this number of blocks, but at most perSM for each multiprocessor.
func (g *gpu) launch(k *cuda.Kernel, blocks, perSM int, parameters ...uint64) error {
	grid := max(1, min(blocks, perSM*g.rt.Info().Multiprocessors))
	geometry := cuda.Geometry{
		Grid:  cuda.Dim{X: grid},
		Block: cuda.Dim{X: threads},
	}
	return k.Launch(g.rt.Stream(), geometry, parameters...)
}

// signFlips returns the bits that a sign inverts when elements are compared as integers.
func signFlips(d dtype.DType) uint64 {
	if d.IsFloat() {
		return 1<<(8*d.Size()-1) - 1
	}
	return 0
}
