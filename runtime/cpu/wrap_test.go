package cpu_test

import (
	"context"
	goruntime "runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// grow uses enough stack that Go moves it.
func grow(depth int) byte {
	var pad [1 << 10]byte
	pad[depth%len(pad)] = 1
	if depth == 0 {
		return pad[0]
	}
	return grow(depth-1) + pad[depth%len(pad)]
}

// The slice does not escape but for Wrap, so that the compiler would put it on
// the stack of the goroutine, which moves when it grows. A tensor that kept the
// address would write to where the stack was.
func TestWrapSliceThatWouldBeOnTheStack(t *testing.T) {
	rt := cpu.New()
	defer rt.Close()
	done := make(chan [4]float32)
	go func() { // a new goroutine has a small stack
		var array [4]float32
		data := array[:]
		for i := range data {
			data[i] = float32(i)
		}
		x, err := cpu.Wrap(rt, data)
		if assert.NoError(t, err) {
			grow(1000)
			assert.NoError(t, x.Fill(7))
			grow(2000)
			assert.NoError(t, x.Free())
		}
		done <- array
	}()
	assert.Equal(t, [4]float32{7, 7, 7, 7}, <-done)
}

// Memory that only the tensor refers to survives collections, until Free.
func TestWrapKeepsTheSlice(t *testing.T) {
	rt := cpu.New()
	defer rt.Close()
	collected := make(chan bool, 1)
	x := func() *runtime.Tensor {
		data := make([]float64, 1000)
		for i := range data {
			data[i] = float64(i)
		}
		goruntime.SetFinalizer(&data[0], func(*float64) { collected <- true })
		x, err := cpu.Wrap(rt, data, 10, 100)
		require.NoError(t, err)
		return x
	}()
	for range 3 {
		goruntime.GC()
	}
	values, err := cpu.Slice[float64](x)
	require.NoError(t, err)
	for i, v := range values {
		require.EqualValues(t, i, v)
	}
	values = nil
	assert.Empty(t, collected)
	require.NoError(t, x.Free())
	for len(collected) == 0 { // finalizers run some time after a collection
		goruntime.GC()
		goruntime.Gosched()
	}
	goruntime.KeepAlive(x)
}

func TestWrapSharesMemory(t *testing.T) {
	rt := cpu.New()
	data := []float32{1, 2, 3, 4, 5, 6}
	x, err := cpu.Wrap(rt, data, 2, 3)
	require.NoError(t, err)
	assert.Equal(t, "f32[2 3] on cpu:0", x.String())
	column, err := x.Index(1, 1)
	require.NoError(t, err)
	require.NoError(t, column.Fill(9))
	assert.Equal(t, []float32{1, 9, 3, 4, 9, 6}, data)
	back, err := cpu.Slice[float32](x)
	require.NoError(t, err)
	back[0] = 8
	assert.EqualValues(t, 8, data[0])

	raw, err := cpu.WrapBytes(rt, []byte{0, 1, 2, 255}, dtype.Bool)
	require.NoError(t, err)
	truth, err := cpu.Slice[bool](raw)
	require.NoError(t, err)
	assert.Equal(t, []bool{false, true, true, true}, truth)

	empty, err := cpu.Wrap(rt, []float32(nil))
	require.NoError(t, err)
	for _, y := range []*runtime.Tensor{x, raw, empty} {
		require.NoError(t, y.Free())
		require.NoError(t, y.Free(), "again")
		_, err = cpu.Slice[float32](y)
		assert.ErrorIs(t, err, runtime.ErrFreed)
	}
	assert.NoError(t, rt.Close())
}

func TestWrapWhatDoesNotFit(t *testing.T) {
	type identifier uint16
	rt := cpu.New()
	refused := func(want error, what string) func(*runtime.Tensor, error) {
		return func(x *runtime.Tensor, err error) {
			assert.ErrorIs(t, err, want, what)
			assert.Nil(t, x, what)
		}
	}
	refused(runtime.ErrShape, "shape")(cpu.Wrap(rt, make([]float32, 6), 2, 2))
	refused(runtime.ErrShape, "negative shape")(cpu.Wrap(rt, make([]float32, 6), -6))
	refused(runtime.ErrShape, "half an element")(cpu.WrapBytes(rt, make([]byte, 6), dtype.F32))
	refused(runtime.ErrArgument, "misaligned")(cpu.WrapBytes(rt, make([]byte, 64)[1:5], dtype.F32))
	refused(runtime.ErrDType, "no type")(cpu.WrapBytes(rt, make([]byte, 6), dtype.Invalid))
	refused(runtime.ErrDType, "no element")(cpu.Wrap(rt, make([]identifier, 6)))
	refused(runtime.ErrArgument, "no runtime")(cpu.Wrap(nil, make([]float32, 6)))

	x, err := cpu.Wrap(rt, make([]uint16, 6), 2, 3)
	require.NoError(t, err)
	_, err = cpu.Slice[int16](x)
	assert.ErrorIs(t, err, runtime.ErrDType)
	turned, err := x.Transpose(0, 1)
	require.NoError(t, err)
	_, err = cpu.Slice[uint16](turned)
	assert.ErrorIs(t, err, runtime.ErrNotContiguous)
	_, err = cpu.Slice[uint16](nil)
	assert.ErrorIs(t, err, runtime.ErrArgument)

	assert.ErrorIs(t, rt.Close(), runtime.ErrLeak, "a wrapped tensor was forgotten")
	assert.NoError(t, x.Free())
	assert.NoError(t, rt.Close(), "reported once")
	refused(runtime.ErrClosed, "closed")(cpu.Wrap(rt, make([]float32, 6)))
	assert.ErrorIs(t, rt.Synchronize(context.Background()), runtime.ErrClosed)
}
