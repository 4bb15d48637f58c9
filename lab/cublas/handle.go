package cublas

import (
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Values of the library's enumerations, from its headers library_types.h and
// cublas_api.h.
const (
	opN       = 0 // CUBLAS_OP_N
	opT       = 1 // CUBLAS_OP_T
	typeBF16  = 14
	compute32 = 68          // CUBLAS_COMPUTE_32F: products and sums in float32
	algorithm = ^uintptr(0) // CUBLAS_GEMM_DEFAULT, -1
	workspace = 32 << 20    // bytes; what the library's manual advises for compute capability 9.0
)

// Handle multiplies on the compute stream of one runtime. It belongs to one
// goroutine at a time.
type Handle struct {
	lib       *library      // shared by the handles of a process
	rt        *cuda.Runtime // provides the compute stream; its owner closes it
	native    uintptr       // cublasHandle_t, 0 when closed
	workspace uintptr       // device memory of the products, 0 when closed
	// scalars are alpha and beta, which the library reads during a call.
	scalars [2]float32
}

// Open makes a handle for a runtime. It allocates the workspace, so a product allocates no device memory. A product
// may therefore be captured in a graph, and never waits for kernels of a communicator that wait for this rank.
func Open(rt *cuda.Runtime) (*Handle, error) {
	lib, err := open()
	if err != nil {
		return nil, err
	}
	h := &Handle{
		lib:     lib,
		rt:      rt,
		scalars: [2]float32{1, 0},
	}
	if err := h.init(); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	return h, nil
}

// init acquires what Close frees.
func (h *Handle) init() (err error) {
	sym := &h.lib.sym
	cell := new(uint64)
	if err := h.do(sym.Create, hostmem.AddrOf(cell)); err != nil {
		return err
	}
	h.native = uintptr(*cell)
	if h.workspace, err = h.rt.Allocate(workspace); err != nil {
		return err
	}
	// The workspace comes second: setting a stream restores the library's own workspace.
	if err := h.do(sym.SetStream, h.native, h.rt.ComputeStream()); err != nil {
		return err
	}
	return h.do(sym.SetWorkspace, h.native, h.workspace, workspace)
}

// SetMultiprocessors limits later products to n of the GPU's multiprocessors; 0 removes the limit. Kernels that run
// beside them then find the others free. Without the limit, a product whose kernel has a thread block for every
// multiprocessor runs its last blocks alone, after the others, and takes twice as long
// (https://github.com/pytorch/pytorch/issues/143988).
func (h *Handle) SetMultiprocessors(n int) error {
	if !h.lib.sym.SetSMCount.Found() {
		if n == 0 {
			return nil
		}
		return fmt.Errorf("cublas: %w: %s is too old to limit multiprocessors",
			runtime.ErrUnsupported, h.lib.name)
	}
	return h.do(h.lib.sym.SetSMCount, h.native, uintptr(n))
}

// Multiply submits c = a·b, accumulated in float32, to the runtime's compute stream. c is not transposed and does not
// overlap the factors. It allocates nothing.
func (h *Handle) Multiply(c, a, b Matrix) error {
	g := newGEMM(c, a, b)
	alpha := hostmem.AddrOf(&h.scalars[0])
	beta := hostmem.AddrOf(&h.scalars[1])
	return h.do(h.lib.sym.GemmEx, h.native, operation(g.a), operation(g.b),
		uintptr(g.m), uintptr(g.n), uintptr(g.k), alpha,
		g.a.addr, typeBF16, uintptr(g.a.leading),
		g.b.addr, typeBF16, uintptr(g.b.leading), beta,
		g.c.addr, typeBF16, uintptr(g.c.leading),
		compute32, algorithm)
}

// operation is the cublasOperation_t of a factor.
func operation(o operand) uintptr {
	if o.transpose {
		return opT
	}
	return opN
}

// Close destroys the handle, which waits for the device. A second Close does nothing.
func (h *Handle) Close() error {
	var errs []error
	if h.native != 0 {
		errs = append(errs, h.do(h.lib.sym.Destroy, h.native))
		h.native = 0
	}
	if h.workspace != 0 {
		errs = append(errs, h.rt.Deallocate(h.workspace))
		h.workspace = 0
	}
	return errors.Join(errs...)
}

// do calls the library with the device's context current.
func (h *Handle) do(fn dl.Func, args ...uintptr) error {
	return h.rt.Current(func() error {
		if status := int32(fn.Call(args...)); status != 0 {
			return h.lib.newError(fn, h.rt.Device().String(), status)
		}
		return nil
	})
}
