// Package dlpack shares tensors with other libraries in the process, without a copy: PyTorch, JAX, CuPy, NumPy and all
// others that support DLPack (https://dmlc.github.io/dlpack), version 1.
//
// Tensors are shared as a struct with a deleter, which the consumer calls when it no longer needs the memory. Python
// passes the struct's address in a capsule, whose name tells the kind of struct: "dltensor_versioned", or "dltensor"
// from older libraries.
//
// To import a PyTorch tensor, call t.__dlpack__(stream=…, max_version=(1, 0)) with the stream that [Stream] returns,
// pass the capsule's pointer to [Import], and rename the capsule "used_…". To export one to PyTorch, put the result of
// [Export] into a capsule and return it from the __dlpack__ method of an object, which receives the stream.
//
// # Order on GPUs
//
// The producer makes the consumer's stream wait for its own stream before the exchange. For an imported tensor the
// producer does so with the stream that Stream returns; for an exported one Export does so with the consumer's stream.
// Later work is not ordered: if either side writes again, it must synchronize with the other by events. The end of a
// tensor's use is ordered too. Free of an imported tensor waits for the compute stream before it calls the deleter.
// For an exported tensor, the compute stream waits for the consumer's stream before done is called.
package dlpack

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ebitengine/purego"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// The names of capsules, one for each struct of DLPack: version 1's DLManagedTensorVersioned, and its predecessor
// DLManagedTensor, which older libraries pass.
const (
	capsuleVersioned   = "dltensor_versioned"
	capsuleUnversioned = "dltensor"
)

// checkCapsule checks the name of a capsule.
func checkCapsule(name string) error {
	if name == capsuleVersioned || name == capsuleUnversioned {
		return nil
	}
	return fmt.Errorf("%w: capsule %q, want %q or %q", runtime.ErrArgument, name, capsuleVersioned, capsuleUnversioned)
}

// array is DLTensor.
type array struct {
	data           uintptr // address of the memory
	device, index  int32   // kind of device, and its number
	rank           int32   // number of dimensions
	code, bits     uint8   // kind of the elements, and their bits
	lanes          uint16  // elements of a vector, 1 for none
	shape, strides uintptr // of int64
	offset         uint64  // of the first element, in bytes
}

// managed is DLManagedTensor.
type managed struct {
	array
	_, deleter uintptr // the producer's context
}

// versioned is DLManagedTensorVersioned.
type versioned struct {
	major, minor uint32  // version of the protocol
	_, deleter   uintptr // the producer's context
	flags        uint64  // such as read-only
	array
}

// Versions of DLPack's struct.
const (
	major      = 1
	minor      = 0
	minorOfFP8 = 1 // the first with types of 8 bits
)

const readOnly = 1 // a flag

// DLDeviceType.
const (
	deviceCPU      = 1
	deviceCUDA     = 2
	devicePinned   = 3
	deviceManaged  = 13
	streamDisorder = -1
)

// types are DLDataTypeCode and bits of each element type.
var types = map[dtype.DType][2]uint8{
	dtype.I8: {0, 8}, dtype.I16: {0, 16}, dtype.I32: {0, 32}, dtype.I64: {0, 64},
	dtype.U8: {1, 8}, dtype.U16: {1, 16}, dtype.U32: {1, 32}, dtype.U64: {1, 64},
	dtype.F16: {2, 16}, dtype.F32: {2, 32}, dtype.F64: {2, 64},
	dtype.BF16: {4, 16}, dtype.Bool: {6, 8}, dtype.FP8E4M3: {10, 8}, dtype.FP8E5M2: {12, 8},
}

// Stream returns the stream argument for a producer's __dlpack__ with which the runtime's compute stream waits for the
// producer: the stream's handle, or 0 for a host, which Python passes as None.
func Stream(rt runtime.Runtime) uintptr {
	if r, ok := rt.(*cuda.Runtime); ok {
		return r.ComputeStream()
	}
	return 0
}

// Import makes a tensor of a struct at an address, from a capsule with that name, on a runtime of its device. The
// tensor takes ownership of the struct, and its Free calls the deleter. After an error the struct belongs to the
// caller.
//
// Memory of another device is [runtime.ErrDevice], an element type that this module lacks [runtime.ErrDType], and a
// tensor that is read-only, or of another major version, [runtime.ErrUnsupported].
func Import(rt runtime.Runtime, address uintptr, capsule string) (*runtime.Tensor, error) {
	if address == 0 {
		return nil, fmt.Errorf("dlpack: nil struct: %w", runtime.ErrArgument)
	}
	if err := checkCapsule(capsule); err != nil {
		return nil, fmt.Errorf("dlpack: import: %w", err)
	}
	var a array
	var deleter uintptr
	if capsule == capsuleUnversioned {
		m := hostmem.Slice[managed](address, 1)[0]
		a = m.array
		deleter = m.deleter
	} else {
		m := &hostmem.Slice[versioned](address, 1)[0]
		switch {
		case m.major != major:
			return nil, fmt.Errorf("dlpack: struct of version %d.%d: %w", m.major, m.minor, runtime.ErrUnsupported)
		case m.flags&readOnly != 0:
			return nil, fmt.Errorf("dlpack: tensor is read-only: %w", runtime.ErrUnsupported)
		}
		a = m.array
		deleter = m.deleter
	}
	dt, shape, strides, err := a.check(rt)
	if err != nil {
		return nil, fmt.Errorf("dlpack: import: %w", err)
	}
	release := func() {
		if deleter != 0 {
			purego.SyscallN(deleter, address)
		}
	}
	p := a.data + uintptr(a.offset)
	if r, ok := rt.(*cuda.Runtime); ok {
		return r.WrapTensor(p, dt, shape, strides, func() {
			if drained(r) {
				release()
			}
		})
	}
	return runtime.Wrap(rt, p, dt, shape, strides, release)
}

// drainTime bounds the wait for work that uses a producer's memory. If the work does not end, the deleter is not
// called: a kernel may still write to the memory.
const drainTime = 30 * time.Second

func drained(r *cuda.Runtime) bool {
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	return r.Synchronize(ctx) == nil
}

// check returns the tensor's description, if a runtime can use it.
func (a *array) check(rt runtime.Runtime) (dt dtype.DType, shape, strides []int, err error) {
	d := rt.Device()
	switch {
	case d.Kind == runtime.CPU && (a.device == deviceCPU || a.device == devicePinned):
	case d.Kind == runtime.CUDA && (a.device == deviceCUDA && int(a.index) == d.Index || a.device == deviceManaged):
	default:
		return 0, nil, nil, fmt.Errorf("%w: memory of device type %d, number %d, on %v",
			runtime.ErrDevice, a.device, a.index, d)
	}
	for t, code := range types {
		if code == [2]uint8{a.code, a.bits} && a.lanes == 1 {
			dt = t
		}
	}
	if !dt.Valid() {
		return 0, nil, nil, fmt.Errorf("%w: type code %d of %d bits, %d lanes", runtime.ErrDType, a.code, a.bits, a.lanes)
	}
	if a.rank < 0 || a.rank > 0 && a.shape == 0 {
		return 0, nil, nil, fmt.Errorf("%w: %d dimensions, the shape at %#x", runtime.ErrArgument, a.rank, a.shape)
	}
	numbers := func(address uintptr) (list []int) {
		for _, n := range hostmem.Slice[int64](address, int(a.rank)) {
			list = append(list, int(n))
		}
		return list
	}
	shape = numbers(a.shape)
	if a.strides != 0 {
		strides = numbers(a.strides)
	}
	return dt, shape, strides, nil
}

// exported is a tensor that a consumer holds. The struct is in Go memory, which does not move.
type exported struct {
	versioned versioned     // for consumers of version 1
	managed   managed       // for others
	numbers   []int64       // shape, followed by strides
	after     *cuda.Stream  // the consumer's, nil if there is none
	rt        *cuda.Runtime // owner of the memory
	done      func()        // called when the consumer has released it
}

// exports are the exported tensors of the process, by the address of the struct.
var exports sync.Map

// deleter is the function that consumers call, on any thread.
var deleter = sync.OnceValue(func() uintptr {
	return purego.NewCallback(func(address uintptr) uintptr {
		if v, found := exports.LoadAndDelete(address); found {
			e := v.(*exported)
			if e.after != nil { // after an error the consumer must order the streams
				_ = e.rt.Stream().WaitFor(e.after)
				_ = e.after.Close()
			}
			if e.done != nil {
				e.done()
			}
		}
		return 0
	})
})

// Export makes a struct of a tensor, for a capsule with that name and one consumer, and returns its address. Do not
// free the tensor before done is called. The call comes from a thread of the consumer and must not block; done may be
// nil. stream is the consumer's argument to __dlpack__: the handle of its stream, 1 for CUDA's legacy default stream,
// or -1 for no order. It is ignored on a host (Python's None). The stream must stay open until done is called.
//
// A stream of another context is [runtime.ErrDevice], and the per-thread default stream, 2, is [runtime.ErrArgument],
// as in [cuda.Runtime.CheckStream].
func Export(t *runtime.Tensor, stream int, capsule string, done func()) (address uintptr, err error) {
	if err := checkCapsule(capsule); err != nil {
		return 0, fmt.Errorf("dlpack: export: %w", err)
	}
	e := &exported{done: done}
	a := array{
		device: deviceCPU,
		rank:   int32(t.Rank()),
		lanes:  1,
	}
	if t.Len() > 0 {
		if a.data, err = t.Ptr(); err != nil {
			return 0, fmt.Errorf("dlpack: export: %w", err)
		}
	}
	code, ok := types[t.DType()]
	if !ok {
		return 0, fmt.Errorf("dlpack: export: %w: %v", runtime.ErrDType, t.DType())
	}
	a.code = code[0]
	a.bits = code[1]
	switch r, ok := t.Runtime().(*cuda.Runtime); {
	case ok:
		a.device = deviceCUDA
		a.index = int32(t.Device().Index)
		if err := e.order(r, stream); err != nil {
			return 0, fmt.Errorf("dlpack: export: %w", err)
		}
	case t.Device().Kind != runtime.CPU:
		return 0, fmt.Errorf("dlpack: export: %w: tensor on %v", runtime.ErrUnsupported, t.Device())
	}
	for _, n := range slices.Concat(t.Shape(), t.Strides()) {
		e.numbers = append(e.numbers, int64(n))
	}
	if a.rank > 0 {
		a.shape = hostmem.Addr(e.numbers)
		a.strides = hostmem.Addr(e.numbers[a.rank:])
	}
	if capsule == capsuleUnversioned {
		e.managed = managed{array: a, deleter: deleter()}
		address = hostmem.AddrOf(&e.managed)
	} else {
		e.versioned = versioned{
			major:   major,
			minor:   minor,
			deleter: deleter(),
			array:   a,
		}
		if t.DType() == dtype.FP8E4M3 || t.DType() == dtype.FP8E5M2 {
			e.versioned.minor = minorOfFP8
		}
		address = hostmem.AddrOf(&e.versioned)
	}
	exports.Store(address, e)
	return address, nil
}

// order makes the consumer's stream wait for the runtime's.
func (e *exported) order(r *cuda.Runtime, stream int) error {
	switch {
	case stream == streamDisorder:
		return nil
	case stream == 0:
		return fmt.Errorf("%w: stream 0 is ambiguous in DLPack", runtime.ErrArgument)
	}
	if err := r.CheckStream(uintptr(stream)); err != nil {
		return err
	}
	if uintptr(stream) == r.ComputeStream() {
		return nil
	}
	e.rt = r
	e.after = r.WrapStream(uintptr(stream))
	return e.after.WaitFor(r.Stream())
}
