package gputest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// CaptureMode is a CUstreamCaptureMode: the threads that may make calls which could disturb a capture.
type CaptureMode uintptr

// The modes.
const (
	CaptureGlobal      CaptureMode = iota // none: PyTorch's torch.cuda.graph
	CaptureThreadLocal                    // streams other than the capturing one
	CaptureRelaxed                        // all
)

// String returns the driver documentation's name of the mode.
func (m CaptureMode) String() string {
	return [...]string{"global", "thread local", "relaxed"}[m]
}

// framework makes the driver's calls itself, like a framework unknown to this module.
type framework struct {
	Begin       dl.Func `sym:"cuStreamBeginCapture_v2"`
	End         dl.Func `sym:"cuStreamEndCapture"`
	Instantiate dl.Func `sym:"cuGraphInstantiateWithFlags"`
	Launch      dl.Func `sym:"cuGraphLaunch"`
	Destroy     dl.Func `sym:"cuGraphDestroy"`
	DestroyExec dl.Func `sym:"cuGraphExecDestroy"`
}

func openFramework() (*framework, error) {
	lib, err := dl.Open(cmp.Or(os.Getenv(DriverVariable), "libcuda.so.1"))
	if err != nil {
		return nil, err
	}
	f := &framework{}
	return f, lib.Bind(f)
}

// status is the driver's.
func status(f dl.Func, args ...uintptr) error {
	if s := f.Int(args...); s != 0 {
		return fmt.Errorf("%s: status %d", f.Name(), s)
	}
	return nil
}

// capture returns the graph of the work that submit gives to a stream, and to streams that are ordered with it.
func (f *framework) capture(
	rt *cuda.Runtime, stream uintptr, mode CaptureMode, submit func() error,
) (exec uintptr, err error) {
	out := make([]uintptr, 2)
	err = rt.Current(func() error {
		if err := status(f.Begin, stream, uintptr(mode)); err != nil {
			return err
		}
		err := submit()
		if err := errors.Join(err, status(f.End, stream, hostmem.Addr(out))); err != nil {
			return err
		}
		return errors.Join(status(f.Instantiate, hostmem.Addr(out[1:]), out[0], 0), status(f.Destroy, out[0]))
	})
	return out[1], err
}

// captured are the buffers of an allreduce that a framework captures.
type captured struct {
	rt         *cuda.Runtime
	send, recv uintptr
}

// capturedLen is the number of elements.
const capturedLen = 1000

// set fills the send buffer, and clears the receive buffer.
func (b captured) set(ctx context.Context, value float64) error {
	return errors.Join(
		b.rt.Fill(b.send, capturedLen, dtype.F32, value),
		b.rt.Fill(b.recv, capturedLen, dtype.F32, 0),
		b.rt.Synchronize(ctx),
	)
}

// check compares the receive buffer.
func (b captured) check(want float32) error {
	got := make([]float32, capturedLen)
	if err := b.rt.CopyOut(hostmem.Bytes(got), b.recv); err != nil {
		return err
	}
	for i, x := range got {
		if x != want {
			return fmt.Errorf("element %d is %v, want %v", i, x, want)
		}
	}
	return nil
}

// ForeignCapture makes a framework capture an allreduce, and launch the graph: each launch reduces the current
// contents of the buffers. The framework captures the communicator's stream, or a separate one that is ordered with
// it.
func ForeignCapture(
	ctx context.Context, c comm.Communicator, rt *cuda.Runtime, mode CaptureMode, separate bool,
) (err error) {
	f, err := openFramework()
	if err != nil {
		return err
	}
	order, ok := comm.As[comm.StreamOrder](c)
	if !ok {
		return fmt.Errorf("%T has no stream", c)
	}
	send, err := rt.Allocate(2 * capturedLen * dtype.F32.Size())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Deallocate(send)) }()
	b := captured{rt: rt, send: send, recv: send + uintptr(capturedLen*dtype.F32.Size())}
	reduce := func() error { return c.AllReduce(b.send, b.recv, capturedLen, dtype.F32, comm.Sum) }
	// The first call compiles kernels, which a capture cannot.
	if err := errors.Join(b.set(ctx, 1), reduce(), c.Sync(ctx), b.set(ctx, 1)); err != nil {
		return err
	}
	stream := rt.WrapStream(order.CommStream())
	submit := reduce
	if separate {
		if stream, err = rt.NewStream(0); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, stream.Close()) }()
		submit = func() error {
			return errors.Join(order.CommAfter(stream.Handle()), reduce(), order.AfterComm(stream.Handle()))
		}
	}
	graph, err := f.capture(rt, stream.Handle(), mode, submit)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Current(func() error { return status(f.DestroyExec, graph) })) }()
	if err := b.check(0); err != nil {
		return fmt.Errorf("a captured call ran: %w", err)
	}
	for value := 2; value < 5; value++ {
		if err := errors.Join(b.set(ctx, float64(value)), c.Barrier(ctx)); err != nil {
			return err
		}
		err := rt.Current(func() error { return status(f.Launch, graph, stream.Handle()) })
		if err := errors.Join(err, stream.Synchronize(ctx), b.check(float32(value*c.WorldSize()))); err != nil {
			return fmt.Errorf("launch with %d: %w", value, err)
		}
	}
	return c.Barrier(ctx)
}

// ForeignWait waits for a communicator whose stream a framework captures, and returns the errors of the wait and of
// the end of the capture.
func ForeignWait(rt *cuda.Runtime, stream uintptr, wait func() error) (waited, captured error) {
	f, err := openFramework()
	if err != nil {
		return nil, err
	}
	_, captured = f.capture(rt, stream, CaptureGlobal, func() error {
		waited = wait()
		return nil
	})
	return waited, captured
}
