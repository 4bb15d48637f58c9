package runtime_test

import (
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// open returns a runtime that must be empty again at the end of the test.
func open(t *testing.T) *cpu.Runtime {
	rt := cpu.New()
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	return rt
}

// counting returns a tensor whose elements are their row-major positions.
func counting(t *testing.T, rt runtime.Runtime, shape ...int) *runtime.Tensor {
	t.Helper()
	n := 1
	for _, d := range shape {
		n *= d
	}
	data := make([]int32, n)
	for i := range data {
		data[i] = int32(i)
	}
	x, err := runtime.FromSlice(rt, data, shape...)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, x.Free()) })
	return x
}

func TestNewDescribesItself(t *testing.T) {
	rt := open(t)
	x, err := runtime.New(rt, dtype.BF16, 2, 3, 4)
	require.NoError(t, err)
	assert.Equal(t, dtype.BF16, x.DType())
	assert.Equal(t, []int{2, 3, 4}, x.Shape())
	assert.Equal(t, []int{12, 4, 1}, x.Strides())
	assert.Equal(t, 3, x.Rank())
	assert.Equal(t, 24, x.Len())
	assert.Equal(t, 48, x.Bytes())
	assert.Same(t, rt, x.Runtime())
	assert.Equal(t, runtime.Device{Kind: runtime.CPU}, x.Device())
	assert.True(t, x.IsContiguous())
	assert.Equal(t, "bf16[2 3 4] on cpu:0", x.String())

	x.Shape()[0], x.Strides()[0] = 99, 99
	assert.Equal(t, []int{2, 3, 4}, x.Shape(), "the caller's slice is a copy")
	assert.Equal(t, []int{12, 4, 1}, x.Strides())

	y, err := x.Transpose(0, 2)
	require.NoError(t, err)
	assert.Equal(t, "bf16[4 3 2] on cpu:0 with strides [1 4 12]", y.String())
	require.NoError(t, x.Free())
	assert.Equal(t, "bf16[2 3 4] on cpu:0 (freed)", x.String())
}

func TestScalarsAndEmptyTensors(t *testing.T) {
	rt := open(t)
	scalar, err := runtime.New(rt, dtype.I64)
	require.NoError(t, err)
	assert.Zero(t, scalar.Rank())
	assert.Equal(t, 1, scalar.Len())
	assert.True(t, scalar.IsContiguous())
	require.NoError(t, runtime.CopyIn(scalar, []int64{-7}))
	row, err := scalar.Reshape(1, 1)
	require.NoError(t, err)
	assert.Equal(t, []int{1, 1}, row.Shape())
	values, err := runtime.ToSlice[int64](row)
	require.NoError(t, err)
	assert.Equal(t, []int64{-7}, values)
	require.NoError(t, scalar.Free())

	empty, err := runtime.New(rt, dtype.F32, 3, 0, 5)
	require.NoError(t, err)
	assert.Zero(t, empty.Len())
	assert.True(t, empty.IsContiguous())
	ptr, err := empty.Ptr()
	require.NoError(t, err)
	assert.Zero(t, ptr)
	require.NoError(t, empty.Fill(1))
	require.NoError(t, empty.CopyFrom(empty))
	none, err := runtime.ToSlice[float32](empty)
	require.NoError(t, err)
	assert.Empty(t, none)
	for _, view := range []func() (*runtime.Tensor, error){
		func() (*runtime.Tensor, error) { return empty.Transpose(0, 2) },
		func() (*runtime.Tensor, error) { return empty.Slice(0, 3, 3) },
		func() (*runtime.Tensor, error) { return empty.Reshape(0) },
		func() (*runtime.Tensor, error) { return empty.Contiguous() },
		func() (*runtime.Tensor, error) { return empty.Index(2, 4) },
	} {
		v, err := view()
		require.NoError(t, err)
		assert.Zero(t, v.Len())
		assert.True(t, v.IsContiguous())
		require.NoError(t, v.Fill(1))
	}
	require.NoError(t, empty.Free())

	vector, err := runtime.FromSlice(rt, []float32(nil))
	require.NoError(t, err)
	assert.Equal(t, []int{0}, vector.Shape())
	require.NoError(t, vector.Free())
}

func TestBadShapes(t *testing.T) {
	rt := open(t)
	big := math.MaxInt/8 + 1
	for _, shape := range [][]int{{-1}, {2, -3}, {big}, {1 << 32, 1 << 32}, {0, big, 2}, {math.MaxInt, math.MaxInt}, {math.MinInt}} {
		_, err := runtime.New(rt, dtype.F64, shape...)
		assert.ErrorIs(t, err, runtime.ErrShape, "%v", shape)
		_, err = runtime.Wrap(rt, 64, dtype.F64, shape, nil, nil)
		assert.ErrorIs(t, err, runtime.ErrShape, "%v", shape)
	}
	for _, strides := range [][]int{{}, {1, 2, 3}, {math.MaxInt, 1}, {1 << 61, 1}, {1, math.MinInt}, {1 << 59, 1 << 59}} {
		_, err := runtime.Wrap(rt, 64, dtype.F64, []int{3, 2}, strides, nil)
		assert.ErrorIs(t, err, runtime.ErrShape, "%v", strides)
	}
	_, err := runtime.New(rt, dtype.F64, math.MaxInt/16)
	assert.ErrorIs(t, err, runtime.ErrOutOfMemory)
	_, err = runtime.FromSlice(rt, []float32{1, 2, 3}, 2, 2)
	assert.ErrorIs(t, err, runtime.ErrShape)
	assert.Zero(t, rt.Stats().LiveBytes, "nothing stays behind")
}

func TestBadArguments(t *testing.T) {
	rt := open(t)
	_, err := runtime.New(nil, dtype.F32, 1)
	assert.ErrorIs(t, err, runtime.ErrArgument)
	_, err = runtime.New(rt, dtype.Invalid, 1)
	assert.ErrorIs(t, err, runtime.ErrDType)
	_, err = runtime.Wrap(nil, 64, dtype.F32, []int{1}, nil, nil)
	assert.ErrorIs(t, err, runtime.ErrArgument)
	_, err = runtime.Wrap(rt, 0, dtype.F32, []int{1}, nil, nil)
	assert.ErrorIs(t, err, runtime.ErrArgument)
	_, err = runtime.Wrap(rt, 66, dtype.F32, []int{1}, nil, nil)
	assert.ErrorIs(t, err, runtime.ErrArgument, "misaligned")

	x := counting(t, rt, 3, 4)
	for name, view := range map[string]func() (*runtime.Tensor, error){
		"slice of dimension -1":  func() (*runtime.Tensor, error) { return x.Slice(-1, 0, 1) },
		"slice of dimension 2":   func() (*runtime.Tensor, error) { return x.Slice(2, 0, 1) },
		"slice from -1":          func() (*runtime.Tensor, error) { return x.Slice(0, -1, 1) },
		"slice backwards":        func() (*runtime.Tensor, error) { return x.Slice(0, 2, 1) },
		"slice to 4 of 3":        func() (*runtime.Tensor, error) { return x.Slice(0, 0, 4) },
		"index 3 of 3":           func() (*runtime.Tensor, error) { return x.Index(0, 3) },
		"index -1":               func() (*runtime.Tensor, error) { return x.Index(0, -1) },
		"index in dimension 2":   func() (*runtime.Tensor, error) { return x.Index(2, 0) },
		"transpose dimension 2":  func() (*runtime.Tensor, error) { return x.Transpose(0, 2) },
		"permute too few":        func() (*runtime.Tensor, error) { return x.Permute(0) },
		"permute too many":       func() (*runtime.Tensor, error) { return x.Permute(0, 1, 0) },
		"permute none":           func() (*runtime.Tensor, error) { return x.Permute() },
		"permute twice the same": func() (*runtime.Tensor, error) { return x.Permute(1, 1) },
		"permute out of range":   func() (*runtime.Tensor, error) { return x.Permute(0, -1) },
	} {
		_, err := view()
		assert.ErrorIs(t, err, runtime.ErrArgument, name)
	}
	_, err = x.Reshape(5, 3)
	assert.ErrorIs(t, err, runtime.ErrShape)
	_, err = x.Reshape(-1, -12)
	assert.ErrorIs(t, err, runtime.ErrShape)
	transposed, err := x.Transpose(0, 1)
	require.NoError(t, err)
	_, err = transposed.Reshape(12)
	assert.ErrorIs(t, err, runtime.ErrNotContiguous)

	_, err = runtime.ToSlice[float32](x)
	assert.ErrorIs(t, err, runtime.ErrDType, "i32 is no f32 although both have four bytes")
	assert.ErrorIs(t, runtime.CopyIn(x, make([]uint32, 12)), runtime.ErrDType)
	assert.ErrorIs(t, runtime.CopyIn(x, make([]int32, 11)), runtime.ErrShape)
	assert.ErrorIs(t, runtime.CopyOut(make([]int32, 13), x), runtime.ErrShape)

	var none *runtime.Tensor
	assert.ErrorIs(t, x.CopyFrom(none), runtime.ErrArgument)
	_, err = none.Ptr()
	assert.ErrorIs(t, err, runtime.ErrArgument)
	_, err = runtime.ToSlice[int32](none)
	assert.ErrorIs(t, err, runtime.ErrArgument)
}

// elsewhere is a runtime that says it is another device.
type elsewhere struct{ *cpu.Runtime }

func (elsewhere) Device() runtime.Device { return runtime.Device{Kind: runtime.CUDA, Index: 3} }

func TestCopyFromChecks(t *testing.T) {
	rt := open(t)
	x := counting(t, rt, 2, 3)
	foreign := counting(t, elsewhere{open(t)}, 2, 3)
	assert.ErrorIs(t, x.CopyFrom(foreign), runtime.ErrDevice)
	assert.ErrorContains(t, x.CopyFrom(foreign), "cuda:3")
	assert.ErrorIs(t, x.CopyFrom(counting(t, rt, 3, 2)), runtime.ErrShape)
	assert.ErrorIs(t, x.CopyFrom(counting(t, rt, 6)), runtime.ErrShape)

	floats, err := runtime.New(rt, dtype.F32, 2, 3)
	require.NoError(t, err)
	assert.ErrorIs(t, x.CopyFrom(floats), runtime.ErrDType)
	require.NoError(t, floats.Free())

	same := counting(t, open(t), 2, 3)
	require.NoError(t, x.Fill(0))
	require.NoError(t, x.CopyFrom(same), "another runtime of the same device")
	values, err := runtime.ToSlice[int32](x)
	require.NoError(t, err)
	assert.Equal(t, []int32{0, 1, 2, 3, 4, 5}, values)
}

// TestFreed calls every method on a tensor that was freed, on a view that was
// freed, and on a view whose base was.
func TestFreed(t *testing.T) {
	rt := open(t)
	newTensor := func() *runtime.Tensor {
		x, err := runtime.New(rt, dtype.F32, 2, 3)
		require.NoError(t, err)
		return x
	}
	viewOf := func(x *runtime.Tensor) *runtime.Tensor {
		v, err := x.Slice(0, 0, 1)
		require.NoError(t, err)
		return v
	}
	base := newTensor()
	viewOfFreed := viewOf(viewOf(base))
	require.NoError(t, base.Free())
	alive := newTensor()
	freedView := viewOf(alive)
	require.NoError(t, freedView.Free())

	for name, x := range map[string]*runtime.Tensor{"base": base, "view of freed base": viewOfFreed, "freed view": freedView} {
		for method, call := range map[string]func() error{
			"Ptr":        func() error { _, err := x.Ptr(); return err },
			"Slice":      func() error { _, err := x.Slice(0, 0, 1); return err },
			"Index":      func() error { _, err := x.Index(0, 0); return err },
			"Permute":    func() error { _, err := x.Permute(0, 1); return err },
			"Transpose":  func() error { _, err := x.Transpose(0, 1); return err },
			"Reshape":    func() error { _, err := x.Reshape(x.Len()); return err },
			"Contiguous": func() error { _, err := x.Contiguous(); return err },
			"CopyFrom":   func() error { return x.CopyFrom(alive) },
			"copied":     func() error { return alive.CopyFrom(x) },
			"Fill":       func() error { return x.Fill(1) },
			"CopyIn":     func() error { return runtime.CopyIn(x, make([]float32, x.Len())) },
			"CopyOut":    func() error { return runtime.CopyOut(make([]float32, x.Len()), x) },
			"ToSlice":    func() error { _, err := runtime.ToSlice[float32](x); return err },
		} {
			assert.ErrorIs(t, call(), runtime.ErrFreed, "%s of %s", method, name)
		}
		assert.NoError(t, x.Free(), "free again: %s", name)
	}
	require.NoError(t, alive.Fill(1), "freeing a view leaves its base")
	require.NoError(t, alive.Free())
}

func TestWrappedMemoryIsNotFreed(t *testing.T) {
	rt := open(t)
	data := []float32{1, 2, 3, 4, 5, 6}
	x, err := runtime.Wrap(rt, hostmem.Addr(data), dtype.F32, []int{3, 2}, nil, nil)
	require.NoError(t, err)
	view, err := x.Index(0, 1)
	require.NoError(t, err)
	require.NoError(t, view.Fill(9))
	assert.Equal(t, []float32{1, 2, 9, 9, 5, 6}, data, "wrapping copies nothing")
	require.NoError(t, x.Free())
	_, err = view.Ptr()
	assert.ErrorIs(t, err, runtime.ErrFreed)
	assert.Zero(t, rt.Stats().Allocations)
}

func TestFreeNil(t *testing.T) {
	x, err := runtime.New(open(t), dtype.F32, -1)
	require.Error(t, err)
	assert.NoError(t, x.Free())
}

func TestFreeConcurrently(t *testing.T) {
	rt := open(t)
	for range 200 {
		x, err := runtime.New(rt, dtype.F32, 100)
		require.NoError(t, err)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() { assert.NoError(t, x.Free()) })
		}
		wg.Wait()
	}
	assert.Zero(t, rt.Stats().LiveBlocks)
}

func TestFreeAfterClose(t *testing.T) {
	rt := cpu.New()
	x, err := runtime.New(rt, dtype.F32, 8)
	require.NoError(t, err)
	require.ErrorIs(t, rt.Close(), runtime.ErrLeak)
	assert.ErrorIs(t, x.Free(), runtime.ErrClosed)
	assert.NoError(t, x.Free())
}

func TestIsContiguous(t *testing.T) {
	rt := open(t)
	for _, c := range []struct {
		shape, strides []int
		want           bool
	}{
		{nil, nil, true},
		{[]int{4}, []int{1}, true},
		{[]int{4}, []int{2}, false},
		{[]int{4}, []int{-1}, false},
		{[]int{4}, []int{0}, false},
		{[]int{1}, []int{7}, true},
		{[]int{2, 3}, []int{3, 1}, true},
		{[]int{2, 3}, []int{4, 1}, false},
		{[]int{2, 3}, []int{1, 2}, false},
		{[]int{1, 3}, []int{99, 1}, true},
		{[]int{3, 1, 2}, []int{2, 5, 1}, true},
		{[]int{3, 1, 2}, []int{1, 5, 3}, false},
		{[]int{0, 3}, []int{7, 7}, true},
	} {
		x, err := runtime.Wrap(rt, 4096, dtype.F32, c.shape, c.strides, nil)
		require.NoError(t, err)
		assert.Equal(t, c.want, x.IsContiguous(), "%v %v", c.shape, c.strides)
	}
}

// array is a reference for views: it knows the value at every index vector.
type array struct {
	shape []int
	at    func(index []int) int32
}

func (a array) flatten() []int32 {
	flat := []int32{}
	index := make([]int, len(a.shape))
	var walk func(dim int)
	walk = func(dim int) {
		if dim == len(a.shape) {
			flat = append(flat, a.at(index))
			return
		}
		for index[dim] = 0; index[dim] < a.shape[dim]; index[dim]++ {
			walk(dim + 1)
		}
	}
	walk(0)
	return flat
}

// TestChainsOfViews applies random views one after the other to a tensor and
// to functions of the index vector, which must stay the same array.
func TestChainsOfViews(t *testing.T) {
	rt := open(t)
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 0))
		shape := []int{1 + rng.IntN(4), 1 + rng.IntN(4), 1 + rng.IntN(4)}
		x := counting(t, rt, shape...)
		want := array{shape, func(i []int) int32 { return int32((i[0]*shape[1]+i[1])*shape[2] + i[2]) }}
		for range 6 {
			x, want = randomView(t, rng, x, want)
			got, err := runtime.ToSlice[int32](x)
			require.NoError(t, err)
			require.Equal(t, want.shape, x.Shape(), "seed %d", seed)
			require.Equal(t, want.flatten(), got, "seed %d", seed)
		}
	}
}

func randomView(t *testing.T, rng *rand.Rand, x *runtime.Tensor, a array) (*runtime.Tensor, array) {
	t.Helper()
	rank := len(a.shape)
	if rank == 0 {
		return x, a
	}
	dim := rng.IntN(rank)
	var view *runtime.Tensor
	var err error
	b := array{shape: append([]int(nil), a.shape...)}
	switch kind := rng.IntN(4); {
	case kind == 0:
		from := rng.IntN(a.shape[dim] + 1)
		to := from + rng.IntN(a.shape[dim]-from+1)
		view, err = x.Slice(dim, from, to)
		b.shape[dim] = to - from
		b.at = func(i []int) int32 {
			j := append([]int(nil), i...)
			j[dim] += from
			return a.at(j)
		}
	case kind == 1 && a.shape[dim] > 0:
		at := rng.IntN(a.shape[dim])
		view, err = x.Index(dim, at)
		b.shape = append(b.shape[:dim], b.shape[dim+1:]...)
		b.at = func(i []int) int32 {
			j := append(append(append([]int(nil), i[:dim]...), at), i[dim:]...)
			return a.at(j)
		}
	case kind == 2:
		dims := rng.Perm(rank)
		view, err = x.Permute(dims...)
		for i, old := range dims {
			b.shape[i] = a.shape[old]
		}
		b.at = func(i []int) int32 {
			j := make([]int, rank)
			for k, old := range dims {
				j[old] = i[k]
			}
			return a.at(j)
		}
	default:
		other := rng.IntN(rank)
		view, err = x.Transpose(dim, other)
		b.shape[dim], b.shape[other] = b.shape[other], b.shape[dim]
		b.at = func(i []int) int32 {
			j := append([]int(nil), i...)
			j[dim], j[other] = j[other], j[dim]
			return a.at(j)
		}
	}
	require.NoError(t, err)
	return view, b
}

func TestHotPathsDoNotAllocate(t *testing.T) {
	rt := open(t)
	x, y := counting(t, rt, 100), counting(t, rt, 100)
	data := make([]int32, 100)
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		_, _ = x.Ptr()
		_ = x.Len() + x.Bytes() + x.Rank()
		_ = x.IsContiguous()
		_ = x.CopyFrom(y)
		_ = x.Fill(1)
		_ = runtime.CopyIn(x, data)
	}))
}
