package cuda

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"math"
	goruntime "runtime"
	"strings"
	"sync"
	"unsafe"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// Module is device code that is loaded into the GPU's context.
type Module struct{ object }

// LoadModule compiles PTX for the GPU and loads it. The first compilation takes up to seconds; the driver keeps the
// result on disk. The PTX may be compressed by gzip.
func (r *Runtime) LoadModule(ptx []byte) (*Module, error) {
	h, err := r.loadModule(ptx)
	if err != nil {
		return nil, err
	}
	return &Module{object{rt: r, handle: h}}, nil
}

func (r *Runtime) loadModule(ptx []byte) (uintptr, error) {
	text, err := moduleText(ptx, r.StartsEarly())
	if err != nil {
		return 0, err
	}
	h, err := r.create(r.drv.sym.ModuleLoadData, destructor{fn: r.drv.sym.ModuleUnload}, hostmem.Addr(text))
	goruntime.KeepAlive(text)
	return h, err
}

// moduleText is driverText. Tests with stand-ins, which open hundreds of runtimes, keep the texts.
var moduleText = driverText

// driverText returns PTX as the C string that the driver reads, for compute capability 9.0 if kernels may start early.
func driverText(ptx []byte, startsEarly bool) ([]byte, error) {
	ptx, err := decompress(ptx)
	if err != nil {
		return nil, err
	}
	if startsEarly && bytes.Contains(ptx, []byte(uncovers)) {
		ptx = []byte(forNewer.Replace(string(ptx)))
	}
	return append(ptx[:len(ptx):len(ptx)], 0), nil
}

// decompress returns PTX as plain text.
func decompress(ptx []byte) ([]byte, error) {
	const magic = "\x1f\x8b" // of gzip, RFC 1952
	if !bytes.HasPrefix(ptx, []byte(magic)) {
		return ptx, nil
	}
	r, err := gzip.NewReader(bytes.NewReader(ptx))
	if err != nil {
		return nil, err
	}
	return io.ReadAll(r)
}

// uncovers marks instructions of compute capability 9.0 in PTX for 8.0, see start in kernels/tutti.cuh; forNewer
// removes it.
const uncovers = "//sm_90 "

var forNewer = strings.NewReplacer(".version 7.5", ".version 7.8", ".target sm_80", ".target sm_90", uncovers, "")

// StartsEarly reports whether kernels may start early ([Geometry.Dependent]), also in graphs: on compute capability
// 9.0, with a driver for CUDA 12.3.
func (r *Runtime) StartsEarly() bool { return r.starts }

// Close unloads the module; its kernels must not be running, nor be launched again. Closing twice, or after the
// runtime, which unloads its modules, does nothing.
func (m *Module) Close() error {
	return m.close()
}

// Kernel is an entry point of a module.
type Kernel struct {
	module *Module // holds the code; open while the kernel is used
	name   string  // name in the module
	entry  uintptr // CUfunction
}

// Kernel finds an entry point.
func (m *Module) Kernel(name string) (*Kernel, error) {
	module, err := m.use("module")
	if err != nil {
		return nil, err
	}
	cname := append([]byte(name), 0)
	entry, err := m.rt.get(m.rt.drv.sym.ModuleGetFunc, module, hostmem.Addr(cname))
	goruntime.KeepAlive(cname)
	if err != nil {
		return nil, fmt.Errorf("kernel %s: %w", name, err)
	}
	return &Kernel{
		module: m,
		name:   name,
		entry:  entry,
	}, nil
}

// Dim is a number of blocks or threads in each dimension; zero counts as one.
type Dim struct{ X, Y, Z int }

// Geometry describes the threads of a launch.
type Geometry struct {
	Grid, Block Dim // blocks; Block: threads of each
	Shared      int // bytes of dynamic shared memory of a block
	// Cooperative makes all blocks run at the same time, so that they may wait for each other. More blocks than the
	// GPU can hold are an error.
	Cooperative bool
	// Dependent lets the kernel start before the one ahead of it in the stream has ended, if that one allows it. The
	// kernel waits itself (griddepcontrol, compute capability 9.0).
	Dependent bool
}

// launchConfig is CUlaunchConfig, the parameter of cuLaunchKernelEx in drivers since CUDA 11.8.
type launchConfig struct {
	grid, block [3]uint32 // blocks, and threads of each
	shared      uint32    // bytes of dynamic shared memory of a block
	_           uint32
	stream      uintptr // CUstream; 0 is the legacy default stream
	attributes  uintptr // address of launchAttributes; set when the memory is allocated
	count       uint32  // attributes in use; 0 for none
	_           uint32
}

// launchAttribute is CUlaunchAttribute.
type launchAttribute struct {
	id    uint32 // CUlaunchAttributeID
	_     uint32
	value [64]byte // a union: 1 in the first byte means yes
}

const (
	attributeCooperative = 2 // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
	attributeDependent   = 6 // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
)

// The keys of the array "extra" of a launch.
const (
	extraEnd    = 0 // CU_LAUNCH_PARAM_END
	extraBuffer = 1 // CU_LAUNCH_PARAM_BUFFER_POINTER
	extraSize   = 2 // CU_LAUNCH_PARAM_BUFFER_SIZE
)

// maxParameters is the maximum size of a kernel's parameters, the lowest that any version of PTX guarantees.
const maxParameters = 4096

// launchMemory is the memory that the driver reads in a launch. It is on the heap, and reused through a pool.
type launchMemory struct {
	config     launchConfig        // of cuLaunchKernelEx
	attributes [2]launchAttribute  // of config; config.count are in use
	extra      [5]uintptr          // parameters of cuLaunchKernel; set when the memory is allocated
	size       uintptr             // bytes of buffer in use
	buffer     [maxParameters]byte // parameters in the layout of the kernel's structure
}

var launchPool = sync.Pool{New: func() any {
	m := new(launchMemory)
	m.config.attributes = hostmem.Addr(m.attributes[:])
	m.extra = [5]uintptr{extraBuffer, hostmem.Addr(m.buffer[:]), extraSize, hostmem.AddrOf(&m.size), extraEnd}
	return m
}}

// Launch submits the kernel to a stream of its GPU. Its parameters are 64-bit
// words: addresses, 64-bit integers and bits of float64. See LaunchWith for
// others.
func (k *Kernel) Launch(s *Stream, g Geometry, words ...uint64) error {
	return k.LaunchWith(s, g, hostmem.Bytes(words))
}

// LaunchWith is Launch with the parameters in memory layout, one after the other, each aligned as in C. It allocates
// nothing.
func (k *Kernel) LaunchWith(s *Stream, g Geometry, parameters []byte) error {
	r := k.module.rt
	if _, err := k.module.use("module"); err != nil {
		return err
	}
	stream, err := r.on(s)
	if err != nil {
		return err
	}
	if len(parameters) > maxParameters {
		return r.argument("kernel %s: %d bytes of parameters, %d at most", k.name, len(parameters), maxParameters)
	}
	widest := max(g.Grid.X, g.Grid.Y, g.Grid.Z, g.Block.X, g.Block.Y, g.Block.Z, g.Shared)
	if widest > math.MaxInt32 || g.Shared < 0 {
		return r.argument("kernel %s: %+v", k.name, g) // the driver would see only the low bits
	}
	m := launchPool.Get().(*launchMemory)
	defer launchPool.Put(m)
	m.size = uintptr(copy(m.buffer[:], parameters))
	grid := g.Grid.words()
	block := g.Block.words()
	if !g.Cooperative && !g.Dependent {
		return r.do(r.drv.sym.LaunchKernel.As(k.name), k.entry,
			uintptr(grid[0]), uintptr(grid[1]), uintptr(grid[2]),
			uintptr(block[0]), uintptr(block[1]), uintptr(block[2]),
			uintptr(g.Shared), stream, 0, hostmem.Addr(m.extra[:]))
	}
	if !r.drv.sym.LaunchKernelEx.Found() {
		return fmt.Errorf("cuda:%d: %w: launches with attributes, which need a driver for CUDA 11.8",
			r.index, runtime.ErrUnsupported)
	}
	m.config.grid = grid
	m.config.block = block
	m.config.shared = uint32(g.Shared)
	m.config.stream = stream
	m.config.count = 0
	if g.Cooperative {
		m.set(attributeCooperative)
	}
	if g.Dependent {
		m.set(attributeDependent)
	}
	return r.do(r.drv.sym.LaunchKernelEx.As(k.name), hostmem.AddrOf(&m.config), k.entry, 0, hostmem.Addr(m.extra[:]))
}

// set adds an attribute to the configuration of a launch.
func (m *launchMemory) set(id uint32) {
	m.attributes[m.config.count] = launchAttribute{id: id, value: [64]byte{1}}
	m.config.count++
}

func (d Dim) words() [3]uint32 {
	return [3]uint32{uint32(max(d.X, 1)), uint32(max(d.Y, 1)), uint32(max(d.Z, 1))}
}

var _ = [1]struct{}{}[unsafe.Sizeof(launchConfig{})-56] // the size of CUlaunchConfig
