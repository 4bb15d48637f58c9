package cu_test

import (
	"context"
	goruntime "runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gorgonia.org/cu"

	tutti "github.com/tutti-go/tutti/adapters/cu"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/jobtest"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// newContext makes a context of cu that is current on this thread until the test ends.
func newContext(t *testing.T) (cu.Device, cu.CUContext) {
	goruntime.LockOSThread()
	t.Cleanup(goruntime.UnlockOSThread)
	device, err := cu.GetDevice(0)
	require.NoError(t, err)
	ctx, err := device.MakeContext(cu.SchedAuto)
	require.NoError(t, err)
	return device, ctx
}

// TestContext checks that a runtime works in a context of cu, beside one in the primary context, and that both
// contexts outlive it.
func TestContext(t *testing.T) {
	device, ctx := newContext(t)
	rt, err := tutti.Open(int(device), ctx)
	require.NoError(t, err)
	assert.Equal(t, ctx, tutti.Context(rt))
	primary, err := device.RetainPrimaryCtx()
	require.NoError(t, err)
	other, err := tutti.Open(int(device), primary)
	require.NoError(t, err)
	plain, err := cuda.Open(int(device))
	require.NoError(t, err)
	assert.Equal(t, plain.Context(), other.Context())
	assert.NotEqual(t, rt.Context(), other.Context())
	assert.ErrorIs(t, rt.CheckStream(other.ComputeStream()), runtime.ErrDevice)
	for _, r := range []*cuda.Runtime{plain, other, rt} {
		require.NoError(t, r.Close())
	}

	require.NoError(t, cu.SetCurrentContext(ctx))
	p, err := cu.MemAlloc(64)
	require.NoError(t, err, "the context is still there")
	require.NoError(t, cu.MemFree(p))
	require.NoError(t, ctx.Destroy())
	require.NoError(t, device.ReleasePrimaryCtx())
}

// TestPointers checks that memory of cu is a tensor of tutti and vice versa, and that a collective reduces it in
// place.
func TestPointers(t *testing.T) {
	device, ctx := newContext(t)
	stream, err := cu.MakeStream(cu.DefaultStream)
	require.NoError(t, err)
	rt, err := tutti.Open(int(device), ctx, tutti.WithStream(stream))
	require.NoError(t, err)
	assert.Equal(t, stream, tutti.Stream(rt))

	host := []float32{1, 2, 3, 4}
	p, err := cu.MemAlloc(16)
	require.NoError(t, err)
	require.NoError(t, cu.MemcpyHtoD(p, unsafe.Pointer(&host[0]), 16))
	tensor, err := tutti.Wrap(rt, p, dtype.F32, 2, 2)
	require.NoError(t, err)
	back, err := tutti.Pointer(tensor)
	require.NoError(t, err)
	assert.Equal(t, p, back)
	values, err := runtime.ToSlice[float32](tensor)
	require.NoError(t, err)
	assert.Equal(t, host, values)

	c := noop.New(rt)
	require.NoError(t, distributed.AllReduce(context.Background(), c, tensor, comm.Avg))
	require.NoError(t, c.Close())
	require.NoError(t, tensor.Fill(7))
	require.NoError(t, rt.Synchronize(context.Background()))
	require.NoError(t, cu.MemcpyDtoH(unsafe.Pointer(&host[0]), p, 16))
	assert.Equal(t, []float32{7, 7, 7, 7}, host)
	require.NoError(t, tensor.Free())
	require.NoError(t, cu.MemFree(p))

	own, err := runtime.FromSlice(rt, []float32{5, 6})
	require.NoError(t, err)
	p, err = tutti.Pointer(own)
	require.NoError(t, err)
	require.NoError(t, cu.MemcpyDtoH(unsafe.Pointer(&host[0]), p, 8))
	assert.Equal(t, []float32{5, 6}, host[:2])
	require.NoError(t, own.Free())
	_, err = tutti.Wrap(rt, cu.DevicePtr(uintptr(unsafe.Pointer(&host[0]))), dtype.F32, 4)
	assert.ErrorIs(t, err, runtime.ErrDevice)
	require.NoError(t, rt.Close())
	require.NoError(t, stream.Destroy(), "the stream was left to cu")
	require.NoError(t, ctx.Destroy())
}

// TestEvents checks that each library records and waits for the other's events.
func TestEvents(t *testing.T) {
	device, ctx := newContext(t)
	rt, err := tutti.Open(int(device), ctx)
	require.NoError(t, err)
	stream, err := cu.MakeStream(cu.DefaultStream)
	require.NoError(t, err)
	theirs, err := cu.MakeEvent(cu.DisableTiming)
	require.NoError(t, err)
	require.NoError(t, theirs.Record(stream))
	require.NoError(t, rt.Stream().Wait(tutti.WrapEvent(rt, theirs)))
	require.NoError(t, tutti.WrapStream(rt, stream).WaitFor(rt.Stream()))

	mine, err := rt.NewEvent()
	require.NoError(t, err)
	require.NoError(t, rt.Stream().Record(mine))
	require.NoError(t, stream.Wait(tutti.Event(mine), 0))
	require.NoError(t, mine.Synchronize(context.Background()))
	require.NoError(t, mine.Close())
	require.NoError(t, cu.DestroyEvent(&theirs))
	require.NoError(t, stream.Destroy())
	require.NoError(t, rt.Close())
	require.NoError(t, ctx.Destroy())
}

// TestReadme checks that the program contains the README's code.
func TestReadme(t *testing.T) { jobtest.Readme(t, "README.md", "gradients/main.go", 10) }
