//go:build unix

package dlpack

import (
	"fmt"
	"os"
	goruntime "runtime"
	"slices"
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

// python is a Python of this process, in which scripts run.
type python struct {
	execute func(string) int32
	rt      runtime.Runtime
	onGPU   bool           // rt is a GPU's
	box     []uint64       // what scripts leave: whether the library has a GPU, the address of a struct, its format
	release func() uintptr // of Python's lock, which restore takes again
	restore func(uintptr)
	words   []string          // what stands for a word of a script
	tensors []*runtime.Tensor // what scripts may take, by number
	done    atomic.Int32      // tensors that scripts have returned
	wrong   error             // of an export
}

// Values of box[0].
const (
	noLibrary = iota
	onHost
	onGPU
)

// openPython starts Python with PyTorch on a GPU, PyTorch on the host, or NumPy, whichever is there first.
// TUTTI_PYTHON_LIB names Python's library. The test has one thread from then on, which has Python's lock.
func openPython(t *testing.T) *python {
	t.Helper()
	library := uintptr(0)
	candidates := strings.Fields(os.Getenv("TUTTI_PYTHON_LIB"))
	for minor := 15; minor > 8; minor-- {
		candidates = append(candidates, fmt.Sprintf("libpython3.%d.so.1.0", minor))
	}
	for _, name := range candidates {
		handle, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_GLOBAL)
		if err == nil {
			library = handle
			break
		}
	}
	if library == 0 {
		t.Skipf("needs one of %v", candidates)
	}
	goruntime.LockOSThread()
	t.Cleanup(goruntime.UnlockOSThread)
	p := &python{rt: openCPU(t), box: make([]uint64, 3)}
	gpu, err := cuda.Open(0)
	if err == nil {
		t.Cleanup(func() { assert.NoError(t, gpu.Close()) })
		p.rt = gpu
		p.onGPU = true
	}
	export := purego.NewCallback(func(stream, format, number uintptr) uintptr {
		m, err := Export(p.tensors[number], int(int64(stream)), formats[format], func() { p.done.Add(1) })
		if err != nil {
			p.wrong = err
		}
		return m
	})
	p.words = []string{
		"BOX", fmt.Sprint(hostmem.Addr(p.box)),
		"EXPORT", fmt.Sprint(export),
		"GPU", map[bool]string{true: "True", false: "False"}[p.onGPU],
		"STREAM", fmt.Sprint(Stream(p.rt)),
	}
	var initialize func(int32)
	purego.RegisterLibFunc(&initialize, library, "Py_InitializeEx")
	purego.RegisterLibFunc(&p.execute, library, "PyRun_SimpleString")
	purego.RegisterLibFunc(&p.release, library, "PyEval_SaveThread")
	purego.RegisterLibFunc(&p.restore, library, "PyEval_RestoreThread")
	initialize(0)
	p.run(t, prelude)
	if p.box[0] == noLibrary {
		t.Skip("Python has neither PyTorch nor NumPy")
	}
	if p.onGPU && p.box[0] != onGPU {
		t.Skip("Python has no PyTorch that reaches the GPU")
	}
	return p
}

// prelude finds the library, and defines how scripts take tensors and give them.
const prelude = `
import ctypes, gc, threading
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
torch = lib is not None and lib.__name__ == "torch"
api = ctypes.pythonapi
api.PyCapsule_New.restype, api.PyCapsule_New.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
export = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint64)(EXPORT)
names = [b"dltensor_versioned", b"dltensor"]
class Exporter:
    def __init__(self, number=0): self.number = number
    def __dlpack_device__(self): return device
    def __dlpack__(self, stream=None, max_version=None, **rest):
        f = 0 if max_version and max_version >= (1, 0) else 1
        return api.PyCapsule_New(export(stream or 0, f, self.number), names[f], None)
def give(z): # leaves a struct in the box
    args = {"stream": STREAM} if device[0] == 2 else {}
    try: capsule = z.__dlpack__(max_version=(1, 1), **args)
    except TypeError: capsule = z.__dlpack__(**args)
    name = api.PyCapsule_GetName(capsule)
    box[1], box[2] = api.PyCapsule_GetPointer(capsule, name), names.index(name)
    used = b"used_" + name
    assert api.PyCapsule_SetName(capsule, used) == 0
    return capsule, used # which must live as long
def octets(y): # the bytes of a tensor
    if not torch: return list(y.tobytes())
    return y.cpu().contiguous().flatten().view(lib.uint8).tolist()
`

// run runs a script.
func (p *python) run(t *testing.T, script string) {
	t.Helper()
	require.Zero(t, p.execute(strings.NewReplacer(p.words...).Replace(script)), "the error is in the log")
	require.NoError(t, p.wrong)
}

// take makes a tensor of the struct in the box.
func (p *python) take(t *testing.T) *runtime.Tensor {
	t.Helper()
	x, err := Import(p.rt, uintptr(p.box[1]), formats[p.box[2]])
	require.NoError(t, err)
	return x
}

// set writes the bytes of a tensor.
func (p *python) set(t *testing.T, x *runtime.Tensor, data []byte) {
	t.Helper()
	address, err := x.Ptr()
	require.NoError(t, err)
	require.NoError(t, p.rt.CopyIn(address, data))
}

// bytes reads the first bytes of a tensor.
func (p *python) bytes(t *testing.T, x *runtime.Tensor, n int) []byte {
	t.Helper()
	address, err := x.Ptr()
	require.NoError(t, err)
	data := make([]byte, n)
	require.NoError(t, p.rt.CopyOut(data, address))
	return data
}

// TestPython exchanges tensors with Python, all in one Python: NumPy cannot start twice in a process.
func TestPython(t *testing.T) {
	p := openPython(t)
	p.sharesMemory(t)
	p.hasEachType(t)
	p.repeatsElements(t)
	p.givesBackElsewhere(t)
	p.isGivenBackElsewhere(t)
	p.ordersStreams(t)
	exports.Range(func(any, any) bool { t.Error("a struct is kept"); return false })
}

// Each side changes memory that the other sees.
func (p *python) sharesMemory(t *testing.T) {
	x, err := runtime.New(p.rt, dtype.F32, 2, 3)
	require.NoError(t, err)
	p.tensors = []*runtime.Tensor{x}
	p.set(t, x, hostmem.Bytes([]float32{1, 2, 3, 4, 5, 6}))
	p.done.Store(0)
	p.run(t, `
y = lib.from_dlpack(Exporter())
assert y.tolist() == [[1, 2, 3], [4, 5, 6]], y
if torch:
    y.mul_(2)
    if device[0] == 2: lib.cuda.synchronize()
`)
	if p.box[0] == onGPU {
		assert.Equal(t, hostmem.Bytes([]float32{2, 4, 6, 8, 10, 12}), p.bytes(t, x, 24))
	}
	assert.Zero(t, p.done.Load())
	p.run(t, "del y; gc.collect()")
	assert.EqualValues(t, 1, p.done.Load())
	require.NoError(t, x.Free())
	p.run(t, `
z = lib.arange(6, dtype=lib.float32).reshape(2, 3)
if device[0] == 2: z = z.cuda()
kept = give(z)
`)
	z := p.take(t)
	assert.Equal(t, []int{2, 3, 3, 1}, append(z.Shape(), z.Strides()...))
	assert.Equal(t, hostmem.Bytes([]float32{0, 1, 2, 3, 4, 5}), p.bytes(t, z, 24))
	p.set(t, z, hostmem.Bytes([]float32{7, 8, 9, 10, 11, 12}))
	require.NoError(t, p.rt.Synchronize(t.Context()))
	p.run(t, "assert z.tolist() == [[7, 8, 9], [10, 11, 12]], z")
	require.NoError(t, z.Free())
	p.run(t, "del kept, z; gc.collect()")
}

// Elements of each type that the library has keep their type and bytes, both ways.
func (p *python) hasEachType(t *testing.T) {
	const elements = 6
	for dt, name := range map[dtype.DType]string{
		dtype.I8: "int8", dtype.I16: "int16", dtype.I32: "int32", dtype.I64: "int64",
		dtype.U8: "uint8", dtype.U16: "uint16", dtype.U32: "uint32", dtype.U64: "uint64",
		dtype.F16: "float16", dtype.F32: "float32", dtype.F64: "float64",
		dtype.BF16: "bfloat16", dtype.Bool: "bool", dtype.FP8E4M3: "float8_e4m3fn", dtype.FP8E5M2: "float8_e5m2",
	} {
		data := make([]byte, elements*dt.Size())
		for i := range data {
			data[i] = byte(i + 1)
			if dt == dtype.Bool {
				data[i] = byte(i % 2)
			}
		}
		x, err := runtime.New(p.rt, dt, 2, 3)
		require.NoError(t, err)
		p.tensors = []*runtime.Tensor{x}
		p.set(t, x, data)
		want := strings.ReplaceAll(fmt.Sprint(data), " ", ",")
		p.box[1] = 0
		p.run(t, strings.NewReplacer("TYPE", name, "BYTES", want).Replace(`
if hasattr(lib, "TYPE"):
    y = lib.from_dlpack(Exporter())
    assert y.dtype == lib.TYPE, y.dtype
    assert octets(y) == BYTES, y
    kept = give(y.clone() if torch else y.copy())
    del y; gc.collect()
`))
		require.NoError(t, x.Free())
		if p.box[1] == 0 {
			t.Logf("the library has no %s", name)
			continue
		}
		if dt == dtype.FP8E4M3 || dt == dtype.FP8E5M2 { // have a code from 1.1 on
			require.Equal(t, capsuleVersioned, formats[p.box[2]])
			version := hostmem.Slice[uint32](uintptr(p.box[1]), 2)
			assert.EqualValues(t, 1, version[0])
			assert.GreaterOrEqual(t, version[1], uint32(1))
		}
		z := p.take(t)
		assert.Equal(t, dt, z.DType())
		assert.Equal(t, data, p.bytes(t, z, len(data)), name)
		require.NoError(t, z.Free())
		p.run(t, "del kept; gc.collect()")
	}
}

// A stride of 0 repeats elements on either side.
func (p *python) repeatsElements(t *testing.T) {
	x, err := runtime.New(p.rt, dtype.F32, 3)
	require.NoError(t, err)
	p.set(t, x, hostmem.Bytes([]float32{1, 2, 3}))
	address, err := x.Ptr()
	require.NoError(t, err)
	rows, err := runtime.Wrap(p.rt, address, dtype.F32, []int{2, 3}, []int{0, 1}, nil)
	require.NoError(t, err)
	p.tensors = []*runtime.Tensor{rows}
	p.box[1] = 0
	p.run(t, `
y = lib.from_dlpack(Exporter())
assert y.tolist() == [[1, 2, 3], [1, 2, 3]], y
del y; gc.collect()
z = lib.arange(3, dtype=lib.float32)
if device[0] == 2: z = z.cuda()
z = z.expand(2, 3) if torch else None
if torch: kept = give(z)
`)
	require.NoError(t, rows.Free())
	require.NoError(t, x.Free())
	if p.box[1] == 0 {
		return // NumPy's arrays that repeat elements are read-only
	}
	z := p.take(t)
	assert.Equal(t, []int{2, 3, 0, 1}, append(z.Shape(), z.Strides()...))
	assert.Equal(t, hostmem.Bytes([]float32{0, 1, 2}), p.bytes(t, z, 12))
	require.NoError(t, z.Free())
	p.run(t, "del kept, z; gc.collect()")
}

// The thread that gives a tensor back may be one that nobody here knows.
func (p *python) givesBackElsewhere(t *testing.T) {
	x, err := runtime.New(p.rt, dtype.F32, 4)
	require.NoError(t, err)
	p.tensors = []*runtime.Tensor{x}
	p.done.Store(0)
	p.run(t, `
held = [lib.from_dlpack(Exporter()) for _ in range(8)]
threads = [threading.Thread(target=held.pop) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
gc.collect()
`)
	assert.EqualValues(t, 8, p.done.Load())
	require.NoError(t, x.Free())
}

// Free may call the library's deleter on a thread that Python has never seen.
func (p *python) isGivenBackElsewhere(t *testing.T) {
	p.run(t, `
z = lib.ones(4, dtype=lib.float32)
if device[0] == 2: z = z.cuda()
kept = give(z)
`)
	z := p.take(t)
	state := p.release() // a deleter may take the lock
	freed := make(chan error)
	go func() {
		goruntime.LockOSThread() // a thread that ends with this goroutine
		freed <- z.Free()
	}()
	err := <-freed
	p.restore(state)
	require.NoError(t, err)
	p.run(t, "assert z.tolist() == [1, 1, 1, 1], z; del kept, z; gc.collect()")
}

// The library's stream waits for what this side has in flight, and this side for what the library's stream has when a
// tensor is returned, on whatever thread; the host waits for neither.
func (p *python) ordersStreams(t *testing.T) {
	if p.box[0] != onGPU {
		return
	}
	const elements, rounds = 16 << 20, 50
	x, err := runtime.New(p.rt, dtype.F32, elements)
	require.NoError(t, err)
	p.tensors = []*runtime.Tensor{x}
	p.done.Store(0)
	for i := range rounds {
		require.NoError(t, x.Fill(float64(i+1)))
	}
	p.run(t, `
side = lib.cuda.Stream()
with lib.cuda.stream(side):
    held = [lib.from_dlpack(Exporter())]
    seen = held[0][::4096].clone()
    for _ in range(50): held[0].add_(1)
thread = threading.Thread(target=held.pop)
thread.start()
thread.join()
gc.collect()
`)
	assert.EqualValues(t, 1, p.done.Load())
	want := make([]float32, elements)
	for i := range want {
		want[i] = 2 * rounds
	}
	assert.True(t, slices.Equal(hostmem.Bytes(want), p.bytes(t, x, 4*elements)), "what the library wrote is there")
	p.run(t, "side.synchronize(); assert (seen == 50).all(), seen; del seen, side")
	require.NoError(t, x.Free())
}
