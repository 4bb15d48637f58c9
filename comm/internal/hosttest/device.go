package hosttest

import (
	"errors"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
	"github.com/tutti-go/tutti/internal/window"
	"github.com/tutti-go/tutti/runtime"
)

// Device is memory of the host that counts as a device's, which has windows ([window.Opener]).
type Device struct {
	runtime.Runtime
	Failure error           // of OpenWindow; set before it is called
	Working func(works int) // called before each work of a window, with the number of those before; nil for nothing

	mu     sync.Mutex // guards counts
	counts Counts     // guarded by mu
}

// Counts are what the windows of a device have done.
type Counts struct {
	Open       int // windows now
	Opened     int // windows so far
	Reductions int // that were submitted
	Works      int // copies and reductions that were done
}

// NewDevice returns a device whose memory is that of a runtime.
func NewDevice(memory runtime.Runtime) *Device { return &Device{Runtime: memory} }

// Device implements [runtime.Runtime].
func (*Device) Device() runtime.Device { return runtime.Device{Kind: "apart"} }

// Counts returns the counts so far.
func (d *Device) Counts() Counts {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counts
}

// OpenWindow implements [window.Opener].
func (d *Device) OpenWindow([]byte) (window.Window, error) {
	if d.Failure != nil {
		return nil, d.Failure
	}
	d.add(Counts{Open: 1, Opened: 1})
	return &hostWindow{device: d}, nil
}

func (d *Device) add(c Counts) (before Counts) {
	d.mu.Lock()
	defer d.mu.Unlock()
	before = d.counts
	d.counts.Open += c.Open
	d.counts.Opened += c.Opened
	d.counts.Reductions += c.Reductions
	d.counts.Works += c.Works
	return before
}

// hostWindow does all work in Wait, so that nobody finds it done earlier.
type hostWindow struct {
	device   *Device    // whose memory it copies
	work     []work     // submitted
	operands []uintptr  // of the reductions in work
	dst      [1]uintptr // of one of them
	closed   bool
}

// work is a copy, or a reduction.
type work struct {
	dst, src    uintptr       // of a copy; a reduction has operands instead of src
	n           int           // bytes of a copy, elements of a reduction
	first, last int           // operands of a reduction; 0 and 0 of a copy
	dt          dtype.DType   // of a reduction
	op          comm.ReduceOp // likewise
}

func (w *hostWindow) Begin() error { return nil }

func (w *hostWindow) CopyOut(dst []byte, src uintptr) error {
	w.work = append(w.work, work{dst: hostmem.Addr(dst), src: src, n: len(dst)})
	return nil
}

func (w *hostWindow) CopyIn(dst uintptr, src []byte) error {
	w.work = append(w.work, work{dst: dst, src: hostmem.Addr(src), n: len(src)})
	return nil
}

func (w *hostWindow) Reduce(dst uintptr, operands []uintptr, n int, dt dtype.DType, op comm.ReduceOp) error {
	first := len(w.operands)
	w.operands = append(w.operands, operands...)
	w.work = append(w.work, work{dst: dst, n: n, first: first, last: len(w.operands), dt: dt, op: op})
	w.device.add(Counts{Reductions: 1})
	return nil
}

func (w *hostWindow) Wait() error {
	for _, x := range w.work {
		before := w.device.add(Counts{Works: 1})
		if w.device.Working != nil {
			w.device.Working(before.Works)
		}
		if x.last == 0 {
			hostops.Copy(x.dst, x.src, x.n, false)
			continue
		}
		w.dst[0] = x.dst
		hostops.Reduce(w.dst[:], w.operands[x.first:x.last], x.n, x.dt, x.op, false)
	}
	w.work = w.work[:0]
	w.operands = w.operands[:0]
	return nil
}

func (w *hostWindow) Close() error {
	if w.closed {
		return errors.New("closed twice")
	}
	w.closed = true
	w.device.add(Counts{Open: -1})
	return nil
}
