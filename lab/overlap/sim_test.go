package overlap

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tutti-go/tutti/cmd/tutti/lab/cublas"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// simDevice is a device with streams whose clocks are simulated. The host does the work when it is submitted, so
// values are real. The test sets the durations, so times are exact.
type simDevice struct {
	runtime.Runtime
	now    time.Duration // of the compute stream
	events map[uintptr]time.Duration
	next   uintptr

	perMAC  float64 // nanoseconds of a product per multiplication and addition
	limited float64 // perMAC while multiprocessors are limited
	limit   int
	limits  []int // arguments of SetMultiprocessors
}

func newSimDevice() *simDevice {
	return &simDevice{Runtime: cpu.New(), events: map[uintptr]time.Duration{}}
}

// ComputeStream implements [runtime.Runtime].
func (d *simDevice) ComputeStream() uintptr { return 1 }

// Multiply implements [Compute].
func (d *simDevice) Multiply(c, a, b cublas.Matrix) error {
	load := func(m cublas.Matrix) (func(i, j int) float32, int) {
		stride := max(m.Stride, m.Columns)
		from, to := span(m)
		raw := hostmem.Slice[byte](from, int(to-from))
		x := make([]float32, len(raw)/Element.Size())
		if err := dtype.ToFloat32(x, raw, Element); err != nil {
			panic(err)
		}
		if m.Transposed {
			return func(i, j int) float32 { return x[j*stride+i] }, m.Rows
		}
		return func(i, j int) float32 { return x[i*stride+j] }, m.Columns
	}
	for _, factor := range []cublas.Matrix{a, b} {
		if from, to := span(factor); from < c.Addr+uintptr(c.Rows*c.Columns*Element.Size()) && c.Addr < to {
			return errors.New("a product overwrites its factor")
		}
	}
	shape := func(m cublas.Matrix) [2]int {
		if m.Transposed {
			return [2]int{m.Columns, m.Rows}
		}
		return [2]int{m.Rows, m.Columns}
	}
	if x, y := shape(a), shape(b); c.Transposed || x[0] != c.Rows || x[1] != y[0] || y[1] != c.Columns {
		return fmt.Errorf("%v·%v is no %d×%d matrix", x, y, c.Rows, c.Columns)
	}
	left, inner := load(a)
	right, _ := load(b)
	product := make([]float32, c.Rows*c.Columns)
	for i := range c.Rows {
		for j := range c.Columns {
			for l := range inner {
				product[i*c.Columns+j] += left(i, l) * right(l, j)
			}
		}
	}
	perMAC := d.perMAC
	if d.limit > 0 {
		perMAC = d.limited
	}
	d.now += time.Duration(float64(len(product)*inner) * perMAC)
	return dtype.FromFloat32(hostmem.Slice[byte](c.Addr, len(product)*Element.Size()), Element, product)
}

// span is the memory between a matrix's first and last element.
func span(m cublas.Matrix) (from, to uintptr) {
	elements := (m.Rows-1)*max(m.Stride, m.Columns) + m.Columns
	return m.Addr, m.Addr + uintptr(elements*Element.Size())
}

// SetMultiprocessors implements [Compute].
func (d *simDevice) SetMultiprocessors(n int) error {
	d.limit = n
	d.limits = append(d.limits, n)
	return nil
}

// CreateTimer implements [Compute].
func (d *simDevice) CreateTimer() (uintptr, error) {
	d.next++
	d.events[d.next] = -1 // not recorded
	return d.next, nil
}

// DestroyTimer implements [Compute].
func (d *simDevice) DestroyTimer(event uintptr) error {
	if _, ok := d.events[event]; !ok {
		return errors.New("no such event")
	}
	delete(d.events, event)
	return nil
}

// Elapsed implements [Compute].
func (d *simDevice) Elapsed(from, to uintptr) (time.Duration, error) {
	start, end := d.events[from], d.events[to]
	if start < 0 || end < 0 {
		return 0, errors.New("an event was not recorded")
	}
	return end - start, nil
}

// simComm is a communicator with a stream on a simulated device.
type simComm struct {
	comm.Communicator
	device  *simDevice
	now     time.Duration // of its stream
	perByte float64       // nanoseconds
	reduced []int         // bytes of each allreduce
}

// AllReduce implements [comm.Communicator].
func (c *simComm) AllReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	c.reduced = append(c.reduced, count*dt.Size())
	c.now += time.Duration(float64(count*dt.Size()) * c.perByte)
	if err := c.Communicator.AllReduce(send, recv, count, dt, op); err != nil {
		return err
	}
	return c.Sync(context.Background())
}

// CreateEvent implements [comm.StreamSyncOps].
func (c *simComm) CreateEvent() (uintptr, error) { return c.device.CreateTimer() }

// DestroyEvent implements [comm.StreamSyncOps].
func (c *simComm) DestroyEvent(event uintptr) error { return c.device.DestroyTimer(event) }

// RecordOnCommStream implements [comm.StreamSyncOps].
func (c *simComm) RecordOnCommStream(event uintptr) error {
	c.device.events[event] = c.now
	return nil
}

// RecordOnStream implements [comm.StreamSyncOps].
func (c *simComm) RecordOnStream(event, _ uintptr) error {
	c.device.events[event] = c.device.now
	return nil
}

// CommStreamWaitEvent implements [comm.StreamSyncOps].
func (c *simComm) CommStreamWaitEvent(event uintptr) error {
	c.now = max(c.now, c.device.events[event])
	return nil
}

// StreamWaitEvent implements [comm.StreamSyncOps].
func (c *simComm) StreamWaitEvent(_, event uintptr) error {
	c.device.now = max(c.device.now, c.device.events[event])
	return nil
}

// SyncCommStream implements [comm.StreamSyncOps].
func (c *simComm) SyncCommStream() error { return nil }

// CommStream implements [comm.StreamOrder].
func (c *simComm) CommStream() uintptr { return 1 }

// CommAfter implements [comm.StreamOrder].
func (c *simComm) CommAfter(uintptr) error {
	c.now = max(c.now, c.device.now)
	return nil
}

// AfterComm implements [comm.StreamOrder].
func (c *simComm) AfterComm(uintptr) error {
	c.device.now = max(c.device.now, c.now)
	return nil
}

// symmetricComm also has memory that all ranks allocate and free together.
type symmetricComm struct {
	*simComm
	live  []uintptr
	frees int // calls of FreeSymmetric
}

// AllocateSymmetric implements [comm.SymmetricAllocator].
func (c *symmetricComm) AllocateSymmetric(_ context.Context, bytes int) (uintptr, error) {
	addr, err := c.device.Allocate(bytes)
	c.live = append(c.live, addr)
	return addr, err
}

// FreeSymmetric implements [comm.SymmetricAllocator].
func (c *symmetricComm) FreeSymmetric(ctx context.Context, addr uintptr) error {
	c.frees++
	c.live = slices.DeleteFunc(c.live, func(other uintptr) bool { return other == addr })
	return errors.Join(c.Barrier(ctx), c.device.Deallocate(addr))
}

// Close implements [comm.Communicator].
func (c *symmetricComm) Close() error {
	errs := []error{c.simComm.Close()}
	for _, addr := range c.live {
		errs = append(errs, c.device.Deallocate(addr))
	}
	c.live = nil
	return errors.Join(errs...)
}

// brokenDevice fails in the operations whose errors are set.
type brokenDevice struct {
	*simDevice
	multiply, allocate error
}

// Multiply implements [Compute].
func (d brokenDevice) Multiply(c, a, b cublas.Matrix) error {
	if d.multiply != nil {
		return d.multiply
	}
	return d.simDevice.Multiply(c, a, b)
}

// Allocate implements [runtime.Runtime].
func (d brokenDevice) Allocate(bytes int) (uintptr, error) {
	if d.allocate != nil {
		return 0, d.allocate
	}
	return d.simDevice.Allocate(bytes)
}
