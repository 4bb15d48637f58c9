package cuda

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/elements"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/window"
	"github.com/tutti-go/tutti/runtime"
)

// registerPortable is CU_MEMHOSTREGISTER_PORTABLE: pinned for every context.
const registerPortable = 1

// scratchBytes is the device memory of a window, from which reductions read what was in the window: the copy engine
// reads the host's memory faster than kernels do, above all where processes share a GPU.
const scratchBytes = 8 << 20

// hostWindow is a [window.Window]: memory that the driver has registered, and a stream for each kind of work.
type hostWindow struct {
	object
	memory  []byte  // registered
	scratch uintptr // scratchBytes of the device; 0 before there are some
	out     *Stream // copies to the memory
	in      *Stream // copies from the memory
	add     *Stream // reductions
	reduced bool    // out has not waited for the last reduction
}

// OpenWindow implements [window.Opener]. The first call makes the driver compile the kernels of reductions.
func (r *Runtime) OpenWindow(memory []byte) (window.Window, error) {
	if len(memory) == 0 {
		return nil, r.argument("a window of no bytes")
	}
	if err := r.loadReductions(); err != nil {
		return nil, err
	}
	if err := r.register(memory); err != nil {
		return nil, err
	}
	w := &hostWindow{
		object: object{rt: r, handle: hostmem.Addr(memory)},
		memory: memory,
	}
	var err error
	for _, s := range []**Stream{&w.out, &w.in, &w.add} {
		if *s, err = r.NewStream(0); err != nil {
			return nil, errors.Join(err, w.Close())
		}
	}
	if w.scratch, err = r.Allocate(scratchBytes); err != nil {
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

// register registers memory of the host with the driver, which pins it.
func (r *Runtime) register(memory []byte) error {
	if !r.gate.enter() { // Close must not run between the call and the record of its result
		return r.usable()
	}
	defer r.gate.leave()
	address := hostmem.Addr(memory)
	err := r.manage(r.drv.sym.MemHostRegister, address, uintptr(len(memory)), registerPortable)
	switch {
	case err != nil && r.sound() == nil:
		return fmt.Errorf("%w: %w", runtime.ErrUnsupported, err)
	case err != nil:
		return err
	}
	r.owned.add(address, destructor{fn: r.drv.sym.MemHostUnregister, bytes: len(memory)})
	return nil
}

// Begin implements [window.Window].
func (w *hostWindow) Begin() error {
	compute := w.rt.compute
	return errors.Join(w.out.WaitFor(compute), w.in.WaitFor(compute), w.add.WaitFor(compute))
}

// CopyOut implements [window.Window].
func (w *hostWindow) CopyOut(dst []byte, src uintptr) error {
	if err := w.holds(hostmem.Addr(dst), len(dst)); err != nil {
		return err
	}
	if w.reduced {
		if err := w.out.WaitFor(w.add); err != nil {
			return err
		}
		w.reduced = false
	}
	return w.rt.CopyOutAsync(w.out, dst, src)
}

// CopyIn implements [window.Window].
func (w *hostWindow) CopyIn(dst uintptr, src []byte) error {
	if err := w.holds(hostmem.Addr(src), len(src)); err != nil {
		return err
	}
	return w.rt.CopyInAsync(w.in, dst, src)
}

// holds returns an error unless bytes are in the window.
func (w *hostWindow) holds(address uintptr, bytes int) error {
	if !w.begins(address) || bytes > len(w.memory)-int(address-w.handle) {
		return w.rt.argument("%d bytes at %#x are not in the window of %d at %#x",
			bytes, address, len(w.memory), w.handle)
	}
	return nil
}

// begins reports whether an address is in the window.
func (w *hostWindow) begins(address uintptr) bool {
	return address-w.handle < uintptr(len(w.memory))
}

// Reduce implements [window.Window].
func (w *hostWindow) Reduce(dst uintptr, operands []uintptr, n int, dt dtype.DType, op reductions.Op) error {
	switch count := len(operands); {
	case count < 2 || count > window.MaxOperands:
		return w.rt.argument("%d operands, want 2 to %d", count, window.MaxOperands)
	case !op.Defined(dt):
		return w.rt.argument("%v of %v", op, dt)
	}
	err := w.rt.check("reduce", n, dst)
	if err == nil {
		err = w.rt.check("reduce", n, operands...)
	}
	if err != nil || n == 0 {
		return err
	}
	bytes := n * dt.Size()
	copied := 0 // operands of which there will be a copy
	for _, operand := range operands {
		if !w.begins(operand) {
			continue
		}
		if err := w.holds(operand, bytes); err != nil {
			return err
		}
		copied++
	}
	const align = 256
	room := scratchBytes / max(copied, 1) &^ (align - 1)
	w.reduced = true
	for offset := 0; offset < bytes; offset += room {
		p := reduceParameters{
			dst:   dst + uintptr(offset),
			bytes: min(room, bytes-offset),
			count: uint32(len(operands)),
			op:    elements.Code(dt, op),
		}
		for i, operand := range operands {
			p.operands[i] = operand + uintptr(offset)
		}
		if err := w.reduce(&p, reduceKernels[dt], room); err != nil {
			return err
		}
	}
	return nil
}

// reduce copies operands from the window, with room for this many bytes each, and launches a kernel.
func (w *hostWindow) reduce(p *reduceParameters, k kernelID, room int) error {
	if err := w.in.WaitFor(w.add); err != nil { // which may read an earlier copy
		return err
	}
	next := w.scratch
	misaligned := p.dst
	for i, operand := range p.operands[:p.count] {
		if w.begins(operand) {
			if err := w.rt.CopyInAsync(w.in, next, hostmem.Slice[byte](operand, p.bytes)); err != nil {
				return err
			}
			p.operands[i] = next
			next += uintptr(room)
		}
		misaligned |= p.operands[i]
	}
	p.aligned = flag(misaligned%packBytes == 0)
	if err := w.add.WaitFor(w.in); err != nil {
		return err
	}
	packs := (p.bytes + packBytes - 1) / packBytes
	return launchOn(w.rt, w.add.handle, k, blocksOf(packs), blocksPerSM, p)
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

// Wait implements [window.Window].
func (w *hostWindow) Wait() error {
	ctx := context.Background()
	return errors.Join(w.out.Synchronize(ctx), w.in.Synchronize(ctx), w.add.Synchronize(ctx))
}

// Close implements [window.Window]. After the runtime's Close, which takes the access away, it does nothing.
func (w *hostWindow) Close() error {
	if w.closed.Load() || w.rt.gate.isShut() {
		return nil
	}
	var errs []error
	for _, s := range []*Stream{w.out, w.in, w.add} {
		if s != nil {
			errs = append(errs, s.Synchronize(context.Background()), s.Close())
		}
	}
	if w.scratch != 0 {
		errs = append(errs, w.rt.Deallocate(w.scratch))
	}
	return errors.Join(append(errs, w.close())...)
}
