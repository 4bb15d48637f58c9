//go:build unix

package dlpack

import (
	"fmt"
	"os"
	goruntime "runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// TestPython exchanges tensors with PyTorch on a GPU, PyTorch on the host, or NumPy, whichever is
// there first, in a Python of this process. TUTTI_PYTHON_LIB names its library.
func TestPython(t *testing.T) {
	python := uintptr(0)
	candidates := strings.Fields(os.Getenv("TUTTI_PYTHON_LIB"))
	for minor := 15; minor > 8; minor-- {
		candidates = append(candidates, fmt.Sprintf("libpython3.%d.so.1.0", minor))
	}
	for _, name := range candidates {
		if h, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_GLOBAL); err == nil {
			python = h
			break
		}
	}
	if python == 0 {
		t.Skipf("needs one of %v", candidates)
	}
	goruntime.LockOSThread() // which has Python's lock
	defer goruntime.UnlockOSThread()
	var initialize func(int32)
	var execute func(string) int32
	purego.RegisterLibFunc(&initialize, python, "Py_InitializeEx")
	purego.RegisterLibFunc(&execute, python, "PyRun_SimpleString")
	initialize(0)
	var rt runtime.Runtime = openCPU(t)
	onGPU := uint64(0)
	if gpu, err := cuda.Open(0); err == nil {
		defer func() { assert.NoError(t, gpu.Close()) }()
		rt, onGPU = gpu, 1
	}
	var done atomic.Int32
	x, err := runtime.New(rt, dtype.F32, 2, 3)
	require.NoError(t, err)
	defer x.Free() //nolint:errcheck
	set := func(x *runtime.Tensor, values ...float32) {
		p, err := x.Ptr()
		require.NoError(t, err)
		require.NoError(t, rt.CopyIn(p, hostmem.Bytes(values)))
	}
	set(x, 1, 2, 3, 4, 5, 6)
	var wrong error
	export := purego.NewCallback(func(stream, format uintptr) uintptr {
		m, err := Export(x, int(int64(stream)), formats[format], func() { done.Add(1) })
		if err != nil {
			wrong = err
		}
		return m
	})
	box := make([]uint64, 3) // what Python found, the address of a struct, its format
	run := func(script string) {
		t.Helper()
		require.Zero(t, execute(strings.NewReplacer("BOX", fmt.Sprint(hostmem.Addr(box)), "EXPORT", fmt.Sprint(export),
			"GPU", fmt.Sprint(onGPU), "STREAM", fmt.Sprint(Stream(rt))).Replace(script)), "the error is in the log")
		require.NoError(t, wrong)
	}
	run(`
import ctypes, gc
box = (ctypes.c_uint64 * 3).from_address(BOX)
lib, device = None, (1, 0)
try:
    import torch as lib
    if GPU and lib.cuda.is_available(): device = (2, 0)
    box[0] = 2 if device[0] == 2 else 1
except ImportError:
    try:
        import numpy as lib
        box[0] = 1
    except ImportError: pass
api = ctypes.pythonapi
api.PyCapsule_New.restype, api.PyCapsule_New.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
`)
	if box[0] == 0 {
		t.Skip("Python has neither PyTorch nor NumPy")
	}
	if onGPU == 1 && box[0] != 2 {
		t.Skip("Python has no PyTorch that reaches the GPU")
	}
	// Python takes a tensor, and changes it in the memory that is shared.
	run(`
export = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_int64, ctypes.c_uint64)(EXPORT)
names = [b"dltensor_versioned", b"dltensor"]
class Exporter:
    def __dlpack_device__(self): return device
    def __dlpack__(self, stream=None, max_version=None, **rest):
        f = 0 if max_version and max_version >= (1, 0) else 1
        return api.PyCapsule_New(export(stream or 0, f), names[f], None)
y = lib.from_dlpack(Exporter())
assert y.tolist() == [[1, 2, 3], [4, 5, 6]], y
if lib.__name__ == "torch":
    y.mul_(2)
    if device[0] == 2: lib.cuda.synchronize()
`)
	if box[0] == 2 {
		out := make([]float32, 6)
		p, err := x.Ptr()
		require.NoError(t, err)
		require.NoError(t, rt.CopyOut(hostmem.Bytes(out), p))
		assert.Equal(t, []float32{2, 4, 6, 8, 10, 12}, out)
	}
	assert.Zero(t, done.Load())
	run("del y; gc.collect()")
	assert.EqualValues(t, 1, done.Load())
	require.NoError(t, x.Free())
	// And the other way.
	run(`
z = lib.arange(6, dtype=lib.float32).reshape(2, 3)
if device[0] == 2: z = z.cuda()
args = {"stream": STREAM} if device[0] == 2 else {}
try: capsule = z.__dlpack__(max_version=(1, 0), **args)
except TypeError: capsule = z.__dlpack__(**args)
name = api.PyCapsule_GetName(capsule)
box[1], box[2] = api.PyCapsule_GetPointer(capsule, name), names.index(name)
used = b"used_" + name
assert api.PyCapsule_SetName(capsule, used) == 0
`)
	z, err := Import(rt, uintptr(box[1]), formats[box[2]])
	require.NoError(t, err)
	assert.Equal(t, []int{2, 3, 3, 1}, append(z.Shape(), z.Strides()...))
	out := make([]float32, 6)
	p, err := z.Ptr()
	require.NoError(t, err)
	require.NoError(t, rt.CopyOut(hostmem.Bytes(out), p))
	assert.Equal(t, []float32{0, 1, 2, 3, 4, 5}, out)
	set(z, 7, 8, 9, 10, 11, 12)
	require.NoError(t, rt.Synchronize(t.Context()))
	run("assert z.tolist() == [[7, 8, 9], [10, 11, 12]], z")
	require.NoError(t, z.Free())
	run("del capsule, z; gc.collect()")
}
