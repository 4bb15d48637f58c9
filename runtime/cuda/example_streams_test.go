package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// The GPUs of this machine, and which of them reach each other's memory.
func ExampleDevices() {
	major, minor, err := cuda.DriverVersion()
	if err != nil {
		fmt.Println(err) // says which library is missing
		return
	}
	devices, err := cuda.Devices()
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("CUDA %d.%d\n", major, minor)
	for _, d := range devices {
		fmt.Println(d.Index, d.Name, d.MemoryBytes, d.Peers)
	}
}

// A batch is copied to the GPU while it computes with the one before: from pinned memory, on the stream for copies.
// It needs a GPU, so it is not run here.
func ExampleRuntime_CopyInAsync() {
	pass := func(ctx context.Context, rt *cuda.Runtime, batch, result *runtime.Tensor, compute func() error) error {
		pinned, err := rt.AllocatePinned(batch.Bytes())
		if err != nil {
			return err
		}
		defer rt.FreePinned(pinned)
		dst, err := batch.Ptr()
		if err != nil {
			return err
		}
		src, err := result.Ptr()
		if err != nil {
			return err
		}
		in, err := rt.CopyInStream()
		if err != nil {
			return err
		}
		if err := in.WaitFor(rt.Stream()); err != nil { // the former batch is of no use any more
			return err
		}
		if err := rt.CopyInAsync(in, dst, pinned); err != nil {
			return err
		}
		if err := rt.Stream().WaitFor(in); err != nil {
			return err
		}
		if err := compute(); err != nil {
			return err
		}

		out, err := rt.CopyOutStream()
		if err != nil {
			return err
		}
		if err := out.WaitFor(rt.Stream()); err != nil { // the result is there
			return err
		}
		if err := rt.CopyOutAsync(out, pinned[:result.Bytes()], src); err != nil {
			return err
		}
		return out.Synchronize(ctx)
	}
	_ = pass
}

// A step is recorded once as a graph, and launched as often as it is needed. It needs a GPU, so it is not run here.
func ExampleStream_Capture() {
	repeat := func(rt *cuda.Runtime, step func() error) error {
		if err := step(); err != nil { // allocates what the step needs
			return err
		}
		graph, err := rt.Stream().Capture(step)
		var failed *cuda.Error
		if errors.As(err, &failed) && failed.InCapture() {
			return fmt.Errorf("the step waits or allocates, which a graph cannot: status %d: %w", failed.Status, err)
		}
		if err != nil {
			return err
		}
		defer graph.Close()
		for range 1000 {
			if err := graph.Launch(rt.Stream()); err != nil {
				return err
			}
		}
		return nil
	}
	_ = repeat
}

// A side stream of high priority works beside the compute stream. Events order the two, and tell the host how far a
// stream has come; a word does so without asking the device. It needs a GPU, so it is not run here.
func ExampleRuntime_NewStream() {
	besides := func(rt *cuda.Runtime, submit func(s *cuda.Stream) error) error {
		_, greatest, err := rt.StreamPriorities()
		if err != nil {
			return err
		}
		side, err := rt.NewStream(greatest)
		if err != nil {
			return err
		}
		defer side.Close()
		ready, err := rt.NewEvent()
		if err != nil {
			return err
		}
		defer ready.Close()
		if err := rt.Stream().Record(ready); err != nil {
			return err
		}
		if err := side.Wait(ready); err != nil {
			return err
		}
		if err := submit(side); err != nil {
			return err
		}
		progress, err := rt.NewWord()
		if err != nil {
			return err
		}
		defer progress.Close()
		if err := side.Write(progress, 1); err != nil {
			return err
		}
		fmt.Println(progress.Load(), side.Idle())
		return rt.Stream().WaitFor(side)
	}
	_ = besides
}

// A framework has its own context, stream and events: the runtime works with them, and the framework's event orders
// its stream. It needs a GPU, so it is not run here.
func ExampleWithComputeStream() {
	adopt := func(index int, context, stream, event uintptr) error {
		rt, err := cuda.Open(index, cuda.WithContext(context), cuda.WithComputeStream(stream))
		if err != nil {
			return err
		}
		defer rt.Close()
		theirs := rt.WrapStream(stream)
		if err := rt.CheckStream(theirs.Handle()); err != nil {
			return err
		}
		wrapped := rt.WrapEvent(event)
		if err := rt.RecordEvent(wrapped.Handle(), stream); err != nil {
			return err
		}
		if err := rt.StreamWaitEvent(rt.ComputeStream(), event); err != nil {
			return err
		}
		return rt.Current(func() error {
			return nil // calls of other libraries on CUDA
		})
	}
	_ = adopt
}

// Memory of one GPU is mapped by another one, of this process or another, which gets the descriptor. It needs GPUs, so
// it is not run here.
func ExampleRuntime_AllocateShared() {
	share := func(owner, reader *cuda.Runtime) error {
		free, _, err := owner.MemoryInfo()
		if err != nil || free < 1<<21 {
			return errors.Join(err, runtime.ErrOutOfMemory)
		}
		memory, err := owner.AllocateShared(1 << 21)
		if err != nil {
			return err
		}
		defer memory.Close()
		fd, err := memory.Export()
		if err != nil {
			return err
		}
		defer os.NewFile(uintptr(fd), "memory").Close()
		mapped, err := reader.ImportShared(fd, memory.Bytes())
		if err != nil {
			return err
		}
		defer mapped.Close()
		return reader.CheckPointer(mapped.Address())
	}
	_ = share
}

// A side runtime has its own compute stream and pool on the same GPU. It needs a GPU, so it is not run here.
func ExampleRuntime_ForkStream() {
	fork := func(rt *cuda.Runtime) error {
		side, err := rt.ForkStream()
		if err != nil {
			return err
		}
		t, err := runtime.FromSlice(side, []float32{1, 2, 3})
		if err != nil {
			return errors.Join(err, side.Close())
		}
		return errors.Join(t.Free(), side.Close())
	}
	_ = fork
}
