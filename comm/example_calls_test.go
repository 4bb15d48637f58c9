package comm_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Every collective of a communicator, on the memory of a program. Each is in order after the one before it: there is
// one Sync at the end.
func ExampleCommunicator() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		send, err := comm.Allocate(ctx, c, rt, 4*4) // symmetric memory, where the communicator has such
		if err != nil {
			return err
		}
		defer send.Free(ctx)
		recv, err := comm.Allocate(ctx, c, rt, 4*4)
		if err != nil {
			return err
		}
		defer recv.Free(ctx)
		if err := rt.Fill(send.Ptr, 4, dtype.I32, float64(c.Rank()+1)); err != nil {
			return err
		}
		ones := []int{1, 1}
		places := []int{0, 1}
		err = errors.Join(
			c.AllReduce(send.Ptr, send.Ptr, 4, dtype.I32, comm.Sum), // 3 3 3 3 on both ranks
			c.ReduceScatter(send.Ptr, recv.Ptr, 2, dtype.I32, comm.Max),
			c.AllGather(recv.Ptr, send.Ptr, 2, dtype.I32),
			c.AllToAll(send.Ptr, recv.Ptr, 2, dtype.I32),
			c.AllGatherV(recv.Ptr, send.Ptr, ones, places, dtype.I32),
			c.AllToAllV(send.Ptr, ones, places, recv.Ptr, ones, places, dtype.I32),
			c.Reduce(recv.Ptr, send.Ptr, 2, dtype.I32, comm.Sum, 0), // 6 6 on rank 0
			c.Broadcast(send.Ptr, 2, dtype.I32, 0),
			c.Scatter(send.Ptr, recv.Ptr, 1, dtype.I32, 0),
			c.Gather(recv.Ptr, send.Ptr, 1, dtype.I32, 0),
		)
		if err != nil {
			return err
		}
		if err := c.Sync(ctx); err != nil {
			return err
		}
		if c.Rank() == 0 {
			result := make([]byte, 8)
			if err := rt.CopyOut(result, send.Ptr); err != nil {
				return err
			}
			fmt.Println(result)
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: [6 0 0 0 6 0 0 0]
}

// One rank sends, the other receives. A message is matched by source, destination and tag.
func ExampleCommunicator_messages() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		buffer, err := rt.Allocate(8)
		if err != nil {
			return err
		}
		defer rt.Deallocate(buffer)
		const tag = 1
		if c.Rank() == 0 {
			if err := rt.Fill(buffer, 1, dtype.U8, 42); err != nil {
				return err
			}
			if err := c.Send(buffer, 1, dtype.U8, 1, tag); err != nil {
				return err
			}
			return c.Sync(ctx)
		}
		if err := c.Recv(buffer, 1, dtype.U8, 0, tag); err != nil {
			return err
		}
		if err := c.Sync(ctx); err != nil {
			return err
		}
		received := make([]byte, 1)
		err = rt.CopyOut(received, buffer)
		fmt.Println("received", received, err)
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: received [42] <nil>
}

// A rank that cannot go on says why, and its peer's wait ends with that.
func ExampleCommunicator_Abort() {
	world, err := local.New(2)
	if err != nil {
		fmt.Println(err)
		return
	}
	world[0].Abort(errors.New("the disk is full"))
	err = world[1].Barrier(context.Background())
	var failed *comm.OpError
	if errors.As(err, &failed) {
		fmt.Println(failed.Op, "on rank", failed.Rank, errors.Is(failed.Unwrap(), comm.ErrPeerFailed))
	}
	fmt.Println(errors.Is(world[0].Err(), comm.ErrBroken))
	for _, c := range world {
		_ = comm.CloseAll(c, err) // with sub-communicators, of which there are none here
	}
	// Output:
	// barrier on rank 1 true
	// true
}

// A panic of a body is an error of its rank.
func ExamplePanicError() {
	world, err := local.New(1)
	if err != nil {
		fmt.Println(err)
		return
	}
	errDivision := errors.New("division by zero")
	err = comm.Run(context.Background(), world, func(context.Context, comm.Communicator) error { panic(errDivision) })
	var panicked *comm.PanicError
	if errors.As(err, &panicked) {
		fmt.Println("rank", panicked.Rank, "panicked:", panicked.Unwrap())
	}
	// Output: rank 0 panicked: division by zero
}

// Code that knows its results are compared bit for bit asks whether reductions have a fixed order, and whether the
// communicator reaches the memory.
func ExampleFixedOrder() {
	rt := cpu.New()
	defer rt.Close()
	c := noop.New(rt)
	defer c.Close()
	fmt.Println(comm.FixedOrder(c), comm.CheckDevice(c, rt.Device()))
	// Output: true <nil>
}

// A wait of the program's own reports the end of its context as communicators do.
func ExampleContextError() {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	fmt.Println(errors.Is(comm.ContextError(ctx), comm.ErrCanceled))
	// Output: true
}

// logged is a decorator: a communicator that prints each call before it forwards it.
type logged struct {
	comm.Methods
	comm.Waits
	comm.Wrapped
}

func newLogged(c comm.Communicator) *logged {
	l := &logged{Wrapped: comm.Wrap(c)}
	l.Do = func(call comm.Call) error {
		fmt.Println(call)
		return call.Make(l.Unwrap())
	}
	l.Together = func(calls []comm.Call) error {
		fmt.Println(len(calls), "calls together")
		return l.Unwrap().Group(calls...)
	}
	l.Wait = func(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
		fmt.Println(w.Op)
		return w.Make(ctx, l.Unwrap())
	}
	return l
}

// A decorator is made of three functions: one for a call, one for a group, one for a wait. Calls are values, which
// print themselves and say what they do.
func ExampleMethods() {
	rt := cpu.New()
	defer rt.Close()
	buffer, err := rt.Allocate(64)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer rt.Deallocate(buffer)
	c := newLogged(noop.New(rt))
	defer c.Close()

	one := []int{1}
	zero := []int{0}
	calls := []comm.Call{
		comm.AllReduceCall(buffer, buffer, 4, dtype.F32, comm.Sum),
		comm.ReduceCall(buffer, buffer, 4, dtype.F32, comm.Max, 0),
		comm.ReduceScatterCall(buffer, buffer, 4, dtype.F32, comm.Sum),
		comm.BroadcastCall(buffer, 4, dtype.F32, 0),
		comm.AllGatherCall(buffer, buffer, 4, dtype.F32),
		comm.AllGatherVCall(buffer, buffer, one, zero, dtype.F32),
		comm.AllToAllCall(buffer, buffer+32, 4, dtype.F32),
		comm.AllToAllVCall(buffer, one, zero, buffer+32, one, zero, dtype.F32),
		comm.GatherCall(buffer, buffer, 4, dtype.F32, 0),
		comm.ScatterCall(buffer, buffer, 4, dtype.F32, 0),
	}
	rooted := 0
	for _, call := range calls {
		if err := call.Make(c); err != nil {
			fmt.Println(err)
		}
		if call.Op.MovesData() && call.Op.HasRoot() {
			rooted++
		}
	}
	fmt.Println(rooted, "of them have a root")
	fmt.Println(c.Group(comm.SendCall(buffer, 1, dtype.F32, 0, 1), comm.RecvCall(buffer+32, 1, dtype.F32, 0, 1)))
	fmt.Println(c.Sync(context.Background()))
	// Output:
	// allreduce of 4 f32, sum
	// reduce of 4 f32, max, root 0
	// reducescatter of 4 f32, sum
	// broadcast of 4 f32, root 0
	// allgather of 4 f32
	// allgatherv of f32
	// alltoall of 4 f32
	// alltoallv of f32
	// gather of 4 f32, root 0
	// scatter of 4 f32, root 0
	// 4 of them have a root
	// 2 calls together
	// <nil>
	// sync
	// <nil>
}

// A program names parts of its time for the timeline, where a communicator in the chain keeps one.
func ExampleTracer() {
	rt := cpu.New()
	defer rt.Close()
	c := noop.New(rt)
	defer c.Close()
	started := time.Now()
	// … load a batch
	tracer, ok := comm.As[comm.Tracer](c)
	if ok {
		tracer.Span("load", started)
	}
	fmt.Println(ok)
	// Output: false
}

// A kernel that computes a gradient runs on its own stream. Two events order the allreduce after it, and what
// follows after the allreduce, without the host. It needs a GPU, so it is not run here.
func ExampleStreamSyncOps() {
	average := func(c comm.Communicator, gradient uintptr, n int, compute uintptr) error {
		streams, ok := comm.As[comm.StreamSyncOps](c)
		if !ok {
			return fmt.Errorf("the communicator has no stream: %w", comm.ErrUnsupported)
		}
		event, err := streams.CreateEvent()
		if err != nil {
			return err
		}
		defer streams.DestroyEvent(event)
		if err := streams.RecordOnStream(event, compute); err != nil { // the gradient is ready
			return err
		}
		if err := streams.CommStreamWaitEvent(event); err != nil {
			return err
		}
		if err := c.AllReduce(gradient, gradient, n, dtype.F32, comm.Avg); err != nil {
			return err
		}
		if err := streams.RecordOnCommStream(event); err != nil { // the average is ready
			return err
		}
		if err := streams.StreamWaitEvent(compute, event); err != nil {
			return err
		}
		return streams.SyncCommStream() // only where the host reads the average
	}
	_ = average
}

// The same without events: the communicator keeps what it needs.
func ExampleStreamOrder() {
	average := func(c comm.Communicator, gradient uintptr, n int, compute uintptr) error {
		order, ok := comm.As[comm.StreamOrder](c)
		if !ok || order.CommStream() == compute {
			return c.AllReduce(gradient, gradient, n, dtype.F32, comm.Avg)
		}
		if err := order.CommAfter(compute); err != nil {
			return err
		}
		if err := c.AllReduce(gradient, gradient, n, dtype.F32, comm.Avg); err != nil {
			return err
		}
		return order.AfterComm(compute)
	}
	_ = average
}

// Memory that all ranks allocate together, kept by the program and freed together too. [comm.Allocate] is the usual
// way, and takes other memory where there is none.
func ExampleSymmetricAllocator() {
	scratch := func(ctx context.Context, c comm.Communicator) error {
		allocator, ok := comm.As[comm.SymmetricAllocator](c)
		if !ok {
			return nil
		}
		buffer, err := allocator.AllocateSymmetric(ctx, 1<<20)
		if err != nil {
			return err
		}
		return allocator.FreeSymmetric(ctx, buffer)
	}
	_ = scratch
}

// A supervisor ends a rank together with its sub-communicators when the program is to stop.
func ExampleAbortAll() {
	world, err := local.New(1)
	if err != nil {
		fmt.Println(err)
		return
	}
	half, err := world[0].Split(context.Background(), 0, 0)
	if err != nil {
		fmt.Println(err)
		return
	}
	comm.AbortAll(world[0], comm.ErrCanceled)
	fmt.Println(errors.Is(half.Err(), comm.ErrBroken))
	_ = comm.CloseAll(world[0], nil) // closes both; its error is the abort's
	// Output: true
}
