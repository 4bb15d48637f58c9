package cuda

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/elements"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Flags of cuMemHostRegister.
const (
	registerPortable = 1 // pinned for every context
	registerMapped   = 2 // kernels access it
)

// window is a [kernel.Window]: memory that the driver has registered, and two streams, one for each direction.
type window struct {
	object
	memory  []byte  // registered
	out     *Stream // copies to the memory
	in      *Stream // reductions and copies from the memory
	reduced bool    // out has not waited for the last reduction
}

// OpenWindow implements [kernel.WindowOpener]. The first call makes the driver compile the kernels of reductions.
func (r *Runtime) OpenWindow(memory []byte) (kernel.Window, error) {
	if len(memory) == 0 {
		return nil, r.argument("a window of no bytes")
	}
	if err := r.loadReductions(); err != nil {
		return nil, err
	}
	if err := r.register(memory); err != nil {
		return nil, err
	}
	w := &window{
		object: object{rt: r, handle: hostmem.Addr(memory)},
		memory: memory,
	}
	var err error
	if w.out, err = r.NewStream(0); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	if w.in, err = r.NewStream(0); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// loadReductions loads the kernels that reduce, once.
func (r *Runtime) loadReductions() error {
	if err := r.usable(); err != nil {
		return err
	}
	r.sparse.mu.Lock() // guards the kernels
	defer r.sparse.mu.Unlock()
	return r.loadKernels("reduce.ptx.gz", kernelReduceF64, kernelCount)
}

// register registers memory of the host with the driver, which pins it. Kernels have it at the same address.
func (r *Runtime) register(memory []byte) error {
	if !r.gate.enter() { // Close must not run between the call and the record of its result
		return r.usable()
	}
	defer r.gate.leave()
	address := hostmem.Addr(memory)
	const flags = registerPortable | registerMapped
	err := r.manage(r.drv.sym.MemHostRegister, address, uintptr(len(memory)), flags)
	switch {
	case err != nil && r.sound() == nil:
		return fmt.Errorf("%w: %w", runtime.ErrUnsupported, err)
	case err != nil:
		return err
	}
	r.owned.add(address, destructor{fn: r.drv.sym.MemHostUnregister, bytes: len(memory)})
	mapped, err := r.get(r.drv.sym.MemHostGetDevicePointer, address, 0)
	if err == nil && mapped != address {
		err = fmt.Errorf("cuda:%d: %w: memory of the host has another address on the device", r.index, runtime.ErrUnsupported)
	}
	if err != nil {
		return errors.Join(err, r.destroy(address))
	}
	return nil
}

// Begin implements [kernel.Window].
func (w *window) Begin() error {
	if err := w.out.WaitFor(w.rt.compute); err != nil {
		return err
	}
	return w.in.WaitFor(w.rt.compute)
}

// CopyOut implements [kernel.Window].
func (w *window) CopyOut(dst []byte, src uintptr) error {
	if err := w.holds(hostmem.Addr(dst), len(dst)); err != nil {
		return err
	}
	if w.reduced {
		if err := w.out.WaitFor(w.in); err != nil {
			return err
		}
		w.reduced = false
	}
	return w.rt.CopyOutAsync(w.out, dst, src)
}

// CopyIn implements [kernel.Window].
func (w *window) CopyIn(dst uintptr, src []byte) error {
	if err := w.holds(hostmem.Addr(src), len(src)); err != nil {
		return err
	}
	return w.rt.CopyInAsync(w.in, dst, src)
}

// holds returns an error unless bytes are in the window.
func (w *window) holds(address uintptr, bytes int) error {
	if start := hostmem.Addr(w.memory); address-start > uintptr(len(w.memory)-bytes) {
		return w.rt.argument("%d bytes at %#x are not in the window of %d at %#x", bytes, address, len(w.memory), start)
	}
	return nil
}

// Reduce implements [kernel.Window].
func (w *window) Reduce(dst uintptr, operands []uintptr, n int, dt dtype.DType, op reductions.Op) error {
	switch count := len(operands); {
	case count < 2 || count > kernel.MaxOperands:
		return w.rt.argument("%d operands, want 2 to %d", count, kernel.MaxOperands)
	case !op.Defined(dt):
		return w.rt.argument("%v of %v", op, dt)
	case n == 0:
		return nil
	}
	if err := w.rt.check("reduce", n, dst); err != nil {
		return err
	}
	if err := w.rt.check("reduce", n, operands...); err != nil {
		return err
	}
	stream, err := w.in.use("stream")
	if err != nil {
		return err
	}
	parameters := reduceParameters{
		dst:   dst,
		bytes: n * dt.Size(),
		count: uint32(len(operands)),
		op:    elements.Code(dt, op),
	}
	misaligned := dst
	for i, operand := range operands {
		parameters.operands[i] = operand
		misaligned |= operand
	}
	parameters.aligned = flag(misaligned%packBytes == 0)
	w.reduced = true
	packs := (parameters.bytes + packBytes - 1) / packBytes
	return launchOn(w.rt, stream, reduceKernels[dt], blocksOf(packs), blocksPerSM, &parameters)
}

// packBytes is what a thread reads of an operand at once.
const packBytes = 16

// reduceKernels are the kernels that reduce, by the type of their elements.
var reduceKernels = [...]kernelID{
	dtype.F64:     kernelReduceF64,
	dtype.F32:     kernelReduceF32,
	dtype.F16:     kernelReduceF16,
	dtype.BF16:    kernelReduceBF16,
	dtype.FP8E4M3: kernelReduceE4M3,
	dtype.FP8E5M2: kernelReduceE5M2,
	dtype.I64:     kernelReduceI64,
	dtype.U64:     kernelReduceI64,
	dtype.I32:     kernelReduceI32,
	dtype.U32:     kernelReduceI32,
	dtype.I16:     kernelReduceI16,
	dtype.U16:     kernelReduceI16,
	dtype.I8:      kernelReduceI8,
	dtype.U8:      kernelReduceI8,
	dtype.Bool:    kernelReduceI8,
}

// Wait implements [kernel.Window].
func (w *window) Wait() error {
	err := w.out.Synchronize(context.Background())
	return errors.Join(err, w.in.Synchronize(context.Background()))
}

// Close implements [kernel.Window]. After the runtime's Close, which takes the access away, it does nothing.
func (w *window) Close() error {
	if w.closed.Load() || w.rt.gate.isShut() {
		return nil
	}
	var errs []error
	for _, s := range []*Stream{w.out, w.in} {
		if s != nil {
			errs = append(errs, s.Synchronize(context.Background()), s.Close())
		}
	}
	return errors.Join(append(errs, w.close())...)
}
