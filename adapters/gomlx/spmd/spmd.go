// Package spmd is a backend of GoMLX (https://github.com/gomlx/gomlx) whose devices are the ranks of a tutti
// communicator. Graphs that GoMLX distributes (SPMD) run on several processes and machines with it, on top of a
// backend with one device, such as GoMLX's Go backend.
package spmd

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// backend is a backend of GoMLX with one device on every rank.
type backend struct {
	compute.Backend                   // of this rank's device
	ctx             context.Context   // ends waits for other ranks
	world           comm.Communicator // one rank per device
	rt              *cpu.Runtime      // of memory on the host

	mu     sync.Mutex                   // serializes comparisons of graphs and the creation of communicators
	groups map[string]comm.Communicator // of devices that reduce together, by [groupName]; guarded by mu
}

// New returns a backend whose devices are the ranks of c: inner computes device r on rank r. Graphs that GoMLX
// distributes as SPMD run on all ranks at once, each rank with its own device. Their AllReduce
// (graph.Graph.Distributed) runs over c, in the order of a group's devices. Other graphs run on each rank separately,
// whichever device they name. ctx ends waits for other ranks.
//
// All ranks build, compile and run the same distributed graphs in the same order. When a graph with AllReduce is
// compiled, all ranks compare its reductions once. If their number, order, shape, operation or groups differ,
// compilation returns [comm.ErrMismatch] on every rank and names the ranks that differ.
//
// A graph gets the inputs of all devices, and a rank reads its device's inputs. A rank has the results of its
// device, and the results that are the same on all devices: those that follow from AllReduce over all devices, from
// constants, and from parameters with a replicated sharding (variables of package model). Reading any other result is
// an error that names the rank that has it.
//
// inner shares buffers with the host, as GoMLX's Go backend does. Finalize finalizes inner and closes the
// communicators of groups; c stays open.
func New(ctx context.Context, c comm.Communicator, inner compute.Backend) (compute.Backend, error) {
	if c == nil || inner == nil || !inner.HasSharedBuffers() {
		return nil, fmt.Errorf("spmd: %w: communicator %v; backend %v, want one that shares buffers with the host",
			comm.ErrArgument, c, inner)
	}
	return &backend{
		Backend: inner,
		ctx:     ctx,
		world:   c,
		rt:      cpu.New(),
		groups:  map[string]comm.Communicator{},
	}, nil
}

// Name implements [compute.Backend].
func (b *backend) Name() string { return "tutti:" + b.Backend.Name() }

// String implements [compute.Backend].
func (b *backend) String() string { return b.Name() }

// Description implements [compute.Backend].
func (b *backend) Description() string {
	return fmt.Sprintf("rank %d of %d: %s", b.world.Rank(), b.world.WorldSize(), b.Backend.Description())
}

// NumDevices implements [compute.Backend].
func (b *backend) NumDevices() int { return b.world.WorldSize() }

// DeviceDescription implements [compute.Backend].
func (b *backend) DeviceDescription(device compute.DeviceNum) string {
	return fmt.Sprint("rank ", device)
}

// Capabilities implements [compute.Backend].
func (b *backend) Capabilities() compute.Capabilities {
	c := b.Backend.Capabilities().Clone()
	c.Operations[compute.OpTypeAllReduce] = true
	return c
}

// Builder implements [compute.Backend].
func (b *backend) Builder(name string) compute.Builder { return newBuilder(b, name) }

// Finalize implements [compute.Backend].
func (b *backend) Finalize() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.groups {
		if c != nil { // nil if this rank is in no group
			_ = c.Close() // it logs its error
		}
	}
	clear(b.groups)
	_ = b.rt.Close()
	b.Backend.Finalize()
}

// device returns the device of this rank.
func (b *backend) device() compute.DeviceNum { return compute.DeviceNum(b.world.Rank()) }

// checkDevice returns an error for a device without a rank.
func (b *backend) checkDevice(device compute.DeviceNum) error {
	if device < 0 || int(device) >= b.NumDevices() {
		return fmt.Errorf("spmd: device %d of %d: device r is rank r", device, b.NumDevices())
	}
	return nil
}

// BufferFromFlatData implements [compute.DataInterface].
func (b *backend) BufferFromFlatData(device compute.DeviceNum, flat any, shape shapes.Shape) (compute.Buffer, error) {
	if err := b.checkDevice(device); err != nil {
		return nil, err
	}
	inner, err := b.Backend.BufferFromFlatData(0, flat, shape)
	if err != nil {
		return nil, err
	}
	return b.newBuffer(inner, device), nil
}

// NewSharedBuffer implements [compute.DataInterface].
func (b *backend) NewSharedBuffer(device compute.DeviceNum, shape shapes.Shape) (compute.Buffer, any, error) {
	if err := b.checkDevice(device); err != nil {
		return nil, nil, err
	}
	inner, flat, err := b.Backend.NewSharedBuffer(0, shape)
	if err != nil {
		return nil, nil, err
	}
	return b.newBuffer(inner, device), flat, nil
}

// memory is a buffer of the inner backend. Several devices hold it if their values are the same.
type memory struct {
	compute.Buffer
	holders atomic.Int32 // number of buffers that share it
}

// buffer is the value of a tensor on a device.
type buffer struct {
	backend *backend          // made the buffer
	device  compute.DeviceNum // holds the buffer
	shape   shapes.Shape      // of its value

	mu     sync.Mutex // guards memory
	memory *memory    // nil if it is on another rank; guarded by mu
}

// newBuffer returns the buffer of a device that is the only holder of inner.
func (b *backend) newBuffer(inner compute.Buffer, device compute.DeviceNum) *buffer {
	shape, _ := inner.Shape() // the buffer was just made
	m := &memory{Buffer: inner}
	m.holders.Store(1)
	return &buffer{
		backend: b,
		device:  device,
		shape:   shape,
		memory:  m,
	}
}

// Backend implements [compute.Buffer].
func (b *buffer) Backend() compute.Backend { return b.backend }

// Shape implements [compute.Buffer].
func (b *buffer) Shape() (shapes.Shape, error) { return b.shape, nil }

// DeviceNum implements [compute.Buffer].
func (b *buffer) DeviceNum() (compute.DeviceNum, error) { return b.device, nil }

// release drops the memory, and returns it if no other device holds it.
func (b *buffer) release() compute.Buffer {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.memory
	b.memory = nil
	if m == nil || m.holders.Add(-1) > 0 {
		return nil
	}
	return m.Buffer
}

// Finalize implements [compute.Buffer].
func (b *buffer) Finalize() error {
	inner := b.release()
	if inner == nil {
		return nil
	}
	return inner.Finalize()
}

// remoteError is the error of reading a value that only another rank has.
func (b *buffer) remoteError() error {
	return fmt.Errorf("spmd: %s of device %d is on rank %d alone, this is rank %d: read it there, or make it the same "+
		"on all devices (AllReduce)", b.shape, b.device, b.device, b.backend.world.Rank())
}

// inner returns the memory for reading.
func (b *buffer) inner() (compute.Buffer, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.memory == nil {
		return nil, b.remoteError()
	}
	return b.memory.Buffer, nil
}

// ToFlatData implements [compute.Buffer].
func (b *buffer) ToFlatData(flat any) error {
	inner, err := b.inner()
	if err != nil {
		return err
	}
	return inner.ToFlatData(flat)
}

// Data implements [compute.Buffer]. The caller may write to the result, so devices no longer share the memory.
func (b *buffer) Data() (any, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.memory == nil {
		return nil, b.remoteError()
	}
	if b.memory.holders.Load() > 1 {
		inner, err := duplicate(b.backend.Backend, b.memory.Buffer)
		if err != nil {
			return nil, err
		}
		b.memory.holders.Add(-1)
		b.memory = b.backend.newBuffer(inner, b.device).memory
	}
	return b.memory.Data()
}

// CopyToDevice implements [compute.Buffer].
func (b *buffer) CopyToDevice(device compute.DeviceNum) (compute.Buffer, error) {
	if err := b.backend.checkDevice(device); err != nil {
		return nil, err
	}
	inner, err := b.inner()
	if err != nil {
		return nil, err
	}
	fresh, err := duplicate(b.backend.Backend, inner)
	if err != nil {
		return nil, err
	}
	return b.backend.newBuffer(fresh, device), nil
}

// duplicate returns another buffer with the same contents.
func duplicate(b compute.Backend, original compute.Buffer) (compute.Buffer, error) {
	shape, err := original.Shape()
	if err != nil {
		return nil, err
	}
	result, flat, err := b.NewSharedBuffer(0, shape)
	if err != nil {
		return nil, err
	}
	return result, original.ToFlatData(flat)
}

// reductions are the reductions of GoMLX.
var reductions = map[compute.ReduceOpType]comm.ReduceOp{
	compute.ReduceOpSum:     comm.Sum,
	compute.ReduceOpProduct: comm.Prod,
	compute.ReduceOpMax:     comm.Max,
	compute.ReduceOpMin:     comm.Min,
}

// elementType returns tutti's type for a type of GoMLX.
func elementType(t dtypes.DType) (dtype.DType, error) {
	dt, err := dtype.Parse(t.String())
	if err != nil {
		return dt, fmt.Errorf("spmd: AllReduce of %s: %w", t, compute.ErrNotImplemented)
	}
	return dt, nil
}

// group returns the communicator of the group that contains this rank's device, nil if there is none. It is
// collective, including ranks outside all groups.
func (b *backend) group(groups [][]compute.DeviceNum) (comm.Communicator, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	name := fmt.Sprint(groups)
	if c, ok := b.groups[name]; ok {
		return c, nil
	}
	color := -1
	key := 0
	for i, devices := range groups {
		if place := slices.Index(devices, b.device()); place >= 0 {
			color = i
			key = place
		}
	}
	c, err := b.world.Split(b.ctx, color, key)
	if err != nil {
		return nil, err
	}
	b.groups[name] = c
	return c, nil
}

// gather returns the data of all ranks. It is collective.
func (b *backend) gather(data []byte) ([][]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return distributed.AllGatherBytes(b.ctx, b.rt, b.world, data)
}

// reduce reduces buffers of the inner backend in place.
func (b *backend) reduce(c comm.Communicator, buffers []compute.Buffer, op comm.ReduceOp) error {
	tensors := make([]*runtime.Tensor, len(buffers))
	defer func() {
		for _, t := range tensors {
			if t != nil {
				_ = t.Free()
			}
		}
	}()
	for i, buffer := range buffers {
		shape, err := buffer.Shape()
		if err != nil {
			return err
		}
		dt, err := elementType(shape.DType)
		if err != nil {
			return err
		}
		flat, err := buffer.Data()
		if err != nil {
			return err
		}
		tensors[i], err = cpu.WrapBytes(b.rt, dtypes.UnsafeByteSliceFromAny(flat), dt, shape.Dimensions...)
		if err != nil {
			return err
		}
	}
	return distributed.AllReduceAll(b.ctx, c, tensors, op)
}
