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

// CaptureMode is a CUstreamCaptureMode: which threads may make calls that could disturb a capture.
type CaptureMode uintptr

// The modes.
const (
	CaptureGlobal      CaptureMode = iota // none: what PyTorch's torch.cuda.graph has
	CaptureThreadLocal                    // others than the one that captures
	CaptureRelaxed                        // all
)

func (m CaptureMode) String() string {
	return [...]string{"global", "thread local", "relaxed"}[m]
}

// framework makes the driver's calls itself, as a framework does that this module knows nothing of.
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

// capture returns the graph of what submit gives to a stream, and to those that are ordered with it.
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

// ForeignCapture has a framework capture an allreduce, and launch the graph: the results are those of what
// the buffers have at each launch. The framework captures the communicator's stream, or a separate one that is
// ordered with it.
func ForeignCapture(
	ctx context.Context, c comm.Communicator, rt *cuda.Runtime, mode CaptureMode, separate bool,
) (err error) {
	const n, launches = 1000, 3
	f, err := openFramework()
	if err != nil {
		return err
	}
	order, ok := comm.As[comm.StreamOrder](c)
	if !ok {
		return fmt.Errorf("%T has no stream", c)
	}
	stream := rt.WrapStream(order.CommStream())
	submit := func(send, recv uintptr) error { return c.AllReduce(send, recv, n, dtype.F32, comm.Sum) }
	inside := submit
	if separate {
		if stream, err = rt.NewStream(0); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, stream.Close()) }()
		inside = func(send, recv uintptr) error {
			return errors.Join(order.CommAfter(stream.Handle()), submit(send, recv), order.AfterComm(stream.Handle()))
		}
	}
	send, err := rt.Allocate(8 * n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Deallocate(send)) }()
	recv := send + 4*n
	set := func(value float64) error {
		return errors.Join(rt.Fill(send, n, dtype.F32, value), rt.Fill(recv, n, dtype.F32, 0), rt.Synchronize(ctx))
	}
	sums := func(want float32) error {
		got := make([]float32, n)
		if err := rt.CopyOut(hostmem.Bytes(got), recv); err != nil {
			return err
		}
		for i, x := range got {
			if x != want {
				return fmt.Errorf("element %d is %v, want %v", i, x, want)
			}
		}
		return nil
	}
	// The first call compiles kernels, which a capture cannot.
	if err := errors.Join(set(1), submit(send, recv), c.Sync(ctx), set(1)); err != nil {
		return err
	}
	graph, err := f.capture(rt, stream.Handle(), mode, func() error { return inside(send, recv) })
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Current(func() error { return status(f.DestroyExec, graph) })) }()
	if err := sums(0); err != nil {
		return fmt.Errorf("a captured call ran: %w", err)
	}
	for i := range launches {
		if err := errors.Join(set(float64(i+2)), c.Barrier(ctx)); err != nil {
			return err
		}
		err := rt.Current(func() error { return status(f.Launch, graph, stream.Handle()) })
		if err := errors.Join(err, stream.Synchronize(ctx)); err != nil {
			return err
		}
		if err := sums(float32((i + 2) * c.WorldSize())); err != nil {
			return fmt.Errorf("launch %d: %w", i, err)
		}
	}
	return c.Barrier(ctx)
}

// ForeignWait waits for a communicator whose stream a framework captures, and returns what the wait and the end
// of the capture say.
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
