package cuda

import (
	"embed"
	"fmt"
	"io/fs"
	goruntime "runtime"
	"sync"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// The kernels' PTX, compiled from kernels/*.cu by kernels/generate.sh. The
// driver compiles it for the chip at load.
//
//go:embed kernels/*.ptx
var ptx embed.FS

// kernel numbers the entry points of the PTX; kernelNames has their names.
type kernel int

const (
	fillU64 kernel = iota
	copyStrided1
	copyStrided2
	copyStrided4
	copyStrided8
	transpose1
	transpose2
	transpose4
	transpose8
	scaleF64
	scaleF32
	scaleF16
	scaleBF16
	kernelCount
)

var kernelNames = [kernelCount]string{
	fillU64:      "fill_u64",
	copyStrided1: "copy_strided_1",
	copyStrided2: "copy_strided_2",
	copyStrided4: "copy_strided_4",
	copyStrided8: "copy_strided_8",
	transpose1:   "transpose_1",
	transpose2:   "transpose_2",
	transpose4:   "transpose_4",
	transpose8:   "transpose_8",
	scaleF64:     "scale_f64",
	scaleF32:     "scale_f32",
	scaleF16:     "scale_f16",
	scaleBF16:    "scale_bf16",
}

// loadKernels compiles and loads the embedded PTX into the context, and finds
// the kernels' entry points.
func (r *Runtime) loadKernels() error {
	files, err := fs.Glob(ptx, "kernels/*.ptx")
	if err != nil {
		return err
	}
	var modules []uintptr
	for _, name := range files {
		text, err := ptx.ReadFile(name)
		if err != nil {
			return err
		}
		text = append(text, 0) // the driver reads a C string
		module, err := r.create(r.drv.sym.ModuleLoadData, destructor{fn: r.drv.sym.ModuleUnload}, hostmem.Addr(text))
		goruntime.KeepAlive(text)
		if err != nil {
			return fmt.Errorf("load %s: %w", name, err)
		}
		modules = append(modules, module)
	}
	for i, name := range kernelNames {
		if r.kernels[i], err = r.findKernel(modules, name); err != nil {
			return err
		}
	}
	return nil
}

// findKernel looks an entry point up in the modules.
func (r *Runtime) findKernel(modules []uintptr, name string) (entry uintptr, err error) {
	cname := append([]byte(name), 0)
	for _, m := range modules {
		entry, err = r.get(r.drv.sym.ModuleGetFunc, m, hostmem.Addr(cname))
		if err == nil {
			break
		}
	}
	goruntime.KeepAlive(cname)
	if err != nil {
		return 0, fmt.Errorf("kernel %s: %w", name, err)
	}
	return entry, nil
}

// block is the number of threads of a block, and blocksPerSM how many blocks a
// multiprocessor gets of a grid-stride kernel: enough to fill it (2048 threads)
// once.
const (
	block       = 256
	blocksPerSM = 8
)

// arguments are the parameters of a launch. cuLaunchKernel takes an array of
// pointers to them; both lie in one heap object that a pool hands out again,
// so that a launch allocates nothing.
type arguments struct {
	values [8]uint64
	layout stridedLayout
	params [8]uintptr
}

var argumentPool = sync.Pool{New: func() any {
	a := new(arguments)
	for i := range a.params {
		a.params[i] = hostmem.Addr(a.values[i:])
	}
	return a
}}

// launch runs a grid-stride kernel over n elements on the compute stream. The
// arguments are passed as 64-bit words, of which the kernel reads as much as
// its parameter's type has.
func (r *Runtime) launch(k kernel, n int, values ...uint64) error {
	a := argumentPool.Get().(*arguments)
	copy(a.values[:], values)
	err := r.launchArguments(k, n, a)
	argumentPool.Put(a)
	return err
}

func (r *Runtime) launchArguments(k kernel, n int, a *arguments) error {
	if n == 0 {
		return nil
	}
	grid := min((n+block-1)/block, r.info.Multiprocessors*blocksPerSM)
	return r.do(r.drv.sym.LaunchKernel.As(kernelNames[k]), r.kernels[k],
		uintptr(grid), 1, 1, block, 1, 1, 0, r.compute.handle, hostmem.Addr(a.params[:]), 0)
}
