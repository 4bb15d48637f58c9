// Package cublas multiplies matrices on NVIDIA GPUs with cuBLAS, which it opens at run time. It gives demonstrations
// of overlap something to compute and is no binding of the whole library.
package cublas

import (
	"fmt"
	"os"
	goruntime "runtime"
	"sync"

	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// symbols are the functions of libcublas that this package calls. Several have two signatures in the library; the
// current one has a name ending in "_v2". https://docs.nvidia.com/cuda/cublas/
type symbols struct {
	GetProperty     dl.Func `sym:"cublasGetProperty"`
	GetStatusString dl.Func `sym:"cublasGetStatusString,optional"` // CUDA 11.4
	Create          dl.Func `sym:"cublasCreate_v2"`
	Destroy         dl.Func `sym:"cublasDestroy_v2"`
	SetStream       dl.Func `sym:"cublasSetStream_v2"`
	SetWorkspace    dl.Func `sym:"cublasSetWorkspace_v2"`
	SetSMCount      dl.Func `sym:"cublasSetSmCountTarget,optional"` // not in early versions of 11
	GemmEx          dl.Func `sym:"cublasGemmEx"`
}

// library is the opened cuBLAS.
type library struct {
	sym  symbols // bound; optional ones may be missing
	name string  // name by which it was opened
}

// libraryVariable is the environment variable that names the library to use.
const libraryVariable = "TUTTI_CUBLAS_LIB"

// candidates returns the library's possible names.
func candidates() []string {
	if path := os.Getenv(libraryVariable); path != "" {
		return []string{path}
	}
	if goruntime.GOOS == "windows" {
		return []string{"cublas64_13.dll", "cublas64_12.dll", "cublas64_11.dll"}
	}
	return []string{"libcublas.so.13", "libcublas.so.12", "libcublas.so.11", "libcublas.so"}
}

// open loads libcublas, once per process.
var open = sync.OnceValues(func() (*library, error) { return load(candidates()...) })

// load opens the first candidate that exists.
func load(names ...string) (*library, error) {
	lib, err := dl.Open(names...)
	if err != nil {
		return nil, fmt.Errorf(
			"cublas: %w: no library: %w; install cuBLAS, or set %s to its file (in a Python "+
				"environment, in site-packages/nvidia/cu13/lib or site-packages/nvidia/cublas/lib)",
			runtime.ErrUnavailable,
			err,
			libraryVariable,
		)
	}
	l := &library{name: lib.Name()}
	if err := lib.Bind(&l.sym); err != nil {
		return nil, fmt.Errorf("cublas: %w: %w; version 11 or newer is needed", runtime.ErrUnavailable, err)
	}
	return l, nil
}

// Version returns the version of cuBLAS that would be used, such as "13.0.2", and the name by which it was opened.
func Version() (version, library string, err error) {
	l, err := open()
	if err != nil {
		return "", "", err
	}
	var parts [3]any // the values of libraryPropertyType: major, minor, patch level
	for property := range parts {
		value := new(int32)
		if status := l.sym.GetProperty.Int(uintptr(property), hostmem.AddrOf(value)); status != 0 {
			return "", "", l.newError(l.sym.GetProperty, "cublas", status)
		}
		parts[property] = *value
	}
	return fmt.Sprintf("%d.%d.%d", parts[:]...), l.name, nil
}

// causes maps values of cublasStatus_t to sentinels of package runtime. 0 is success.
// https://docs.nvidia.com/cuda/cublas/#cublasstatus-t
var causes = map[int32]error{
	3:  runtime.ErrOutOfMemory, // CUBLAS_STATUS_ALLOC_FAILED
	7:  runtime.ErrArgument,    // CUBLAS_STATUS_INVALID_VALUE
	8:  runtime.ErrUnsupported, // CUBLAS_STATUS_ARCH_MISMATCH
	15: runtime.ErrUnsupported, // CUBLAS_STATUS_NOT_SUPPORTED
}

// newError describes a status other than success, such as "cuda:0: cublasGemmEx: CUBLAS_STATUS_INVALID_VALUE (7)".
func (l *library) newError(fn dl.Func, situation string, status int32) error {
	text := "failed"
	if l.sym.GetStatusString.Found() {
		text = hostmem.CString(l.sym.GetStatusString.Call(uintptr(status)))
	}
	if cause := causes[status]; cause != nil {
		return fmt.Errorf("%s: %s: %s (%d): %w", situation, fn.Name(), text, status, cause)
	}
	return fmt.Errorf("%s: %s: %s (%d)", situation, fn.Name(), text, status)
}
