package runtimetest

import (
	"math"

	"github.com/stretchr/testify/require"
	"github.com/x448/float16"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

var tensorTests = []test{
	{"round trip of every dtype", testTensorRoundTrip},
	{"views", testTensorViews},
	{"copy between layouts", testTensorCopies},
	{"fill", testTensorFill},
	{"wrap", testTensorWrap},
	{"memory goes back", testTensorMemory},
}

func testTensorRoundTrip(d *device) {
	roundTrip(d, 0, 1.5, -math.MaxFloat64, math.Inf(1))
	roundTrip[float32](d, 0, 1.5, -math.MaxFloat32, float32(math.Inf(-1)))
	roundTrip(d, float16.Frombits(0x7bff), float16.Frombits(1), float16.Frombits(0xfc00))
	roundTrip[dtype.BFloat16](d, 0, 0x3f80, 0xff80)
	roundTrip[dtype.Float8E4M3](d, 0, 0x38, 0x7e)
	roundTrip[dtype.Float8E5M2](d, 0, 0x3c, 0x7c)
	roundTrip[int64](d, 0, math.MinInt64, math.MaxInt64)
	roundTrip[int32](d, 0, math.MinInt32, math.MaxInt32)
	roundTrip[int16](d, 0, math.MinInt16, math.MaxInt16)
	roundTrip[int8](d, 0, math.MinInt8, math.MaxInt8)
	roundTrip[uint64](d, 0, math.MaxUint64)
	roundTrip[uint32](d, 0, math.MaxUint32)
	roundTrip[uint16](d, 0, math.MaxUint16)
	roundTrip[uint8](d, 0, math.MaxUint8)
	roundTrip(d, true, false, true)
}

// roundTrip sends the values, repeated, through tensors of several shapes.
func roundTrip[T dtype.Element](d *device, values ...T) {
	for _, shape := range [][]int{{0}, {1}, {7}, {3, 0, 2}, {3, 5}, {2, 3, 4, 5}, {1000}} {
		n := 1
		for _, size := range shape {
			n *= size
		}
		data := make([]T, n)
		for i := range data {
			data[i] = values[i%len(values)]
		}
		t, err := runtime.FromSlice(d.Runtime, data, shape...)
		require.NoError(d, err)
		require.Equal(d, dtype.Of[T](), t.DType())
		require.Equal(d, shape, t.Shape())
		require.Equal(d, n, t.Len())
		require.Equal(d, d.Device(), t.Device())
		require.Equal(d, data, toSlice[T](d, t))
		require.NoError(d, t.Free())
	}
}

func toSlice[T dtype.Element](d *device, t *runtime.Tensor) []T {
	data, err := runtime.ToSlice[T](t)
	require.NoError(d, err)
	return data
}

// holds compares the elements of t, in row-major order, with want.
func (d *device) holds(t *runtime.Tensor, want ...int32) {
	require.Equal(d, want, toSlice[int32](d, t))
}

// counting returns a tensor whose elements are their row-major positions.
func (d *device) counting(shape ...int) *runtime.Tensor {
	n := 1
	for _, size := range shape {
		n *= size
	}
	data := make([]int32, n)
	for i := range data {
		data[i] = int32(i)
	}
	t, err := runtime.FromSlice(d.Runtime, data, shape...)
	require.NoError(d, err)
	d.Cleanup(func() { require.NoError(d, t.Free()) })
	return t
}

// must returns a function that fails the test on an error.
func (d *device) must(t *runtime.Tensor, err error) *runtime.Tensor {
	require.NoError(d, err)
	return t
}

func testTensorViews(d *device) {
	t := d.counting(3, 4)
	transposed := d.must(t.Transpose(0, 1))
	d.holds(transposed, 0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11)
	rows := d.must(t.Slice(0, 1, 3))
	d.holds(rows, 4, 5, 6, 7, 8, 9, 10, 11)
	columns := d.must(t.Slice(1, 1, 3))
	d.holds(columns, 1, 2, 5, 6, 9, 10)
	row := d.must(t.Index(0, 1))
	d.holds(d.must(row.Index(0, 2)), 6)

	// Views share memory: what goes in through one shows in the others.
	require.NoError(d, runtime.CopyIn(columns, []int32{-1, -2, -5, -6, -9, -10}))
	d.holds(t, 0, -1, -2, 3, 4, -5, -6, 7, 8, -9, -10, 11)
	column := d.must(transposed.Index(0, 1))
	d.holds(column, -1, -5, -9)
}

func testTensorCopies(d *device) {
	src := d.counting(5, 6, 7)
	for _, dims := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 2, 0}, {0, 2, 1}} {
		view := d.must(src.Permute(dims...))
		want := toSlice[int32](d, view)
		dst := d.counting(view.Shape()...)
		require.NoError(d, dst.CopyFrom(view))
		require.Equal(d, want, toSlice[int32](d, dst))

		contiguous := d.must(view.Contiguous())
		require.True(d, contiguous.IsContiguous())
		require.Equal(d, want, toSlice[int32](d, contiguous))
		require.NoError(d, contiguous.Free())
		require.Equal(d, want, toSlice[int32](d, view), "the source outlives its contiguous form")
	}

	// Overlapping memory: shift by one, and transpose in place.
	line := d.counting(100)
	target := d.must(line.Slice(0, 1, 100))
	source := d.must(line.Slice(0, 0, 99))
	require.NoError(d, target.CopyFrom(source))
	first := d.must(line.Slice(0, 0, 4))
	d.holds(first, 0, 0, 1, 2)
	last := d.must(line.Slice(0, 98, 100))
	d.holds(last, 97, 98)
	square := d.counting(3, 3)
	transposed := d.must(square.Transpose(0, 1))
	require.NoError(d, square.CopyFrom(transposed))
	d.holds(square, 0, 3, 6, 1, 4, 7, 2, 5, 8)
}

func testTensorFill(d *device) {
	t := d.counting(3, 4)
	columns := d.must(t.Slice(1, 1, 3))
	require.NoError(d, columns.Fill(-7))
	d.holds(t, 0, -7, -7, 3, 4, -7, -7, 7, 8, -7, -7, 11)
	require.NoError(d, t.Fill(9))
	d.holds(t, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9)

	scalar := d.must(runtime.New(d.Runtime, dtype.F64))
	require.NoError(d, scalar.Fill(.1))
	require.Equal(d, []float64{.1}, toSlice[float64](d, scalar))
	require.NoError(d, scalar.Free())

	// A device may store any non-zero byte for true; a Go bool may not.
	stored := d.upload([]byte{0, 1, 2, 255})
	flags := d.must(runtime.Wrap(d.Runtime, stored, dtype.Bool, []int{4}, nil, nil))
	require.Equal(d, []bool{false, true, true, true}, toSlice[bool](d, flags))
}

func testTensorWrap(d *device) {
	ptr := d.upload([]byte{1, 2, 3, 4, 5, 6})
	shape := []int{2, 3}
	t := d.must(runtime.Wrap(d.Runtime, ptr+5, dtype.U8, shape, []int{-3, -1}, nil))
	require.Equal(d, []uint8{6, 5, 4, 3, 2, 1}, toSlice[uint8](d, t))
	broadcast := d.must(runtime.Wrap(d.Runtime, ptr, dtype.U8, shape, []int{0, 1}, nil))
	require.Equal(d, []uint8{1, 2, 3, 1, 2, 3}, toSlice[uint8](d, broadcast))
	require.NoError(d, t.Free())
	require.Equal(d, []byte{1, 2, 3, 4, 5, 6}, d.download(ptr, 6), "freeing a wrapper leaves the memory")
}

// testTensorMemory: owning tensors return their memory once, and nothing that
// the operations allocate on the way stays behind.
func testTensorMemory(d *device) {
	zeros := make([]float32, 1000)
	t := d.must(runtime.FromSlice(d.Runtime, zeros, 10, 100))
	view := d.must(t.Transpose(0, 1))
	live := d.Stats().LiveBlocks
	toSlice[float32](d, view)
	require.NoError(d, view.Fill(1))
	require.NoError(d, runtime.CopyIn(view, zeros))
	contiguous := d.must(view.Contiguous())
	require.NoError(d, contiguous.Free())
	target := d.must(t.Slice(1, 1, 9))
	source := d.must(t.Slice(1, 0, 8))
	require.NoError(d, target.CopyFrom(source))
	require.Equal(d, live, d.Stats().LiveBlocks)
	require.NoError(d, view.Free())
	require.Equal(d, live, d.Stats().LiveBlocks, "freeing a view frees no memory")
	require.NoError(d, t.Free())
	require.NoError(d, t.Free())
	require.Equal(d, live-1, d.Stats().LiveBlocks)
}
