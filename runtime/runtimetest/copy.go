package runtimetest

import (
	"context"
	"encoding/binary"
	"math"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

var copyTests = []test{
	{"sizes and offsets", testCopySizes},
	{"onto itself", testCopyOntoItself},
	{"strided, random layouts", testStridedRandom},
	{"strided, large transposes", testStridedLarge},
	{"fill", testFill},
	{"bad arguments", testCopyArguments},
	{"host copies", testHostCopies},
}

// guard is how many bytes around an array are watched.
const guard = 64

// testCopySizes copies in, within and out, at odd addresses, and sees that the
// bytes around the destination stay.
func testCopySizes(d *device) {
	for _, size := range []int{0, 1, 2, 3, 7, 8, 63, 64, 65, 1000, 4097, 1<<20 + 3} {
		for _, offset := range []int{0, 1, 4, 13} {
			background := d.randomBytes(guard + offset + size + guard)
			data := d.randomBytes(size)
			want := append([]byte(nil), background...)
			copy(want[guard+offset:], data)

			in := d.upload(background)
			require.NoError(d, d.CopyIn(in+uintptr(guard+offset), data))
			require.Equal(d, want, d.download(in, len(want)), "CopyIn, %d bytes, offset %d", size, offset)

			out := make([]byte, size)
			require.NoError(d, d.CopyOut(out, in+uintptr(guard+offset)))
			require.Equal(d, data, out, "CopyOut, %d bytes, offset %d", size, offset)

			dst := d.upload(background)
			require.NoError(d, d.Copy(dst+uintptr(guard+offset), in+uintptr(guard+offset), size))
			require.Equal(d, want, d.download(dst, len(want)), "Copy, %d bytes, offset %d", size, offset)
		}
	}
}

func testCopyOntoItself(d *device) {
	data := d.randomBytes(100_001)
	ptr := d.upload(data)
	require.NoError(d, d.Copy(ptr, ptr, len(data)))
	require.Equal(d, data, d.download(ptr, len(data)))
}

// testStridedRandom draws shapes of rank 0 to 5 and independent layouts of
// both sides: permuted, with gaps, reversed, and broadcast on the source side.
func testStridedRandom(d *device) {
	for range 400 {
		shape := make([]int, d.rng.IntN(6))
		for i := range shape {
			shape[i] = d.rng.IntN(6)
			if d.rng.IntN(8) > 0 {
				shape[i]++ // empty arrays are rare
			}
		}
		d.checkStrided(shape, d.randomStrides(shape, false), d.randomStrides(shape, true), 1<<d.rng.IntN(4))
	}
}

func testStridedLarge(d *device) {
	for _, elemSize := range []int{1, 2, 4, 8} {
		d.checkStrided([]int{65, 130}, []int{130, 1}, []int{1, 65}, elemSize)
		d.checkStrided([]int{130, 65}, []int{1, 140}, []int{65, 1}, elemSize)
		d.checkStrided([]int{17, 33, 40}, []int{33 * 40, 40, 1}, []int{1, 17 * 40, 17}, elemSize)
		d.checkStrided([]int{40, 33, 17}, []int{1, 17 * 40, 40}, []int{33 * 17, 17, 1}, elemSize)
		d.checkStrided([]int{3000}, []int{2}, []int{-3}, elemSize)
		d.checkStrided([]int{300, 70}, []int{70, 1}, []int{0, 1}, elemSize)
		d.checkStrided([]int{300, 70}, []int{70, 1}, []int{1, 0}, elemSize)
	}
}

// randomStrides lays the dimensions out in a random order, each with a random
// gap after it, some reversed and, if broadcast, some repeated.
func (d *device) randomStrides(shape []int, broadcast bool) []int {
	strides := make([]int, len(shape))
	step := 1 + d.rng.IntN(2)
	for _, i := range d.rng.Perm(len(shape)) {
		if broadcast && d.rng.IntN(6) == 0 {
			continue
		}
		strides[i] = step
		step = step*max(shape[i], 1) + d.rng.IntN(3)
		if d.rng.IntN(5) == 0 {
			strides[i] = -strides[i]
		}
	}
	return strides
}

// checkStrided compares CopyStrided with a loop over all index vectors.
func (d *device) checkStrided(shape, dstStrides, srcStrides []int, elemSize int) {
	dstFirst, dstLen := extent(shape, dstStrides)
	srcFirst, srcLen := extent(shape, srcStrides)
	srcBytes := d.randomBytes(srcLen * elemSize)
	want := d.randomBytes(guard + dstLen*elemSize + guard)
	src := d.upload(srcBytes)
	dst := d.upload(want)
	dstStart := guard + dstFirst*elemSize

	for _, index := range indexVectors(shape) {
		to := dstStart
		from := srcFirst * elemSize
		for i, x := range index {
			to += x * dstStrides[i] * elemSize
			from += x * srcStrides[i] * elemSize
		}
		copy(want[to:to+elemSize], srcBytes[from:from+elemSize])
	}
	err := d.CopyStrided(dst+uintptr(dstStart), dstStrides, src+uintptr(srcFirst*elemSize), srcStrides, shape, elemSize)
	require.NoError(d, err)
	require.Equal(d, want, d.download(dst, len(want)),
		"seed %d: shape %v, strides %v from %v, %d-byte elements", Seed, shape, dstStrides, srcStrides, elemSize)
}

// extent returns where in the memory of an array its first element lies, and
// how many elements long that memory is.
func extent(shape, strides []int) (first, length int) {
	length = 1
	for i, d := range shape {
		reach := strides[i] * max(d-1, 0)
		length += max(reach, -reach)
		first += max(-reach, 0)
	}
	return first, length
}

// indexVectors lists all index vectors of a shape.
func indexVectors(shape []int) [][]int {
	all := [][]int{{}}
	for _, d := range shape {
		var longer [][]int
		for _, prefix := range all {
			for x := range d {
				longer = append(longer, append(prefix[:len(prefix):len(prefix)], x))
			}
		}
		all = longer
	}
	return all
}

func testFill(d *device) {
	values := []float64{0, 1, -1.5, 2.5, 300, 1e30, math.Inf(1), math.Inf(-1), math.NaN()}
	for _, dt := range dtype.All() {
		for i, count := range []int{0, 1, 2, 7, 64, 1000, 1024, 1025, 65537} {
			for _, value := range []float64{values[i%len(values)], values[(i+4)%len(values)]} {
				size := dt.Size()
				bits, err := dtype.FromFloat64(dt, value)
				require.NoError(d, err)
				element := binary.NativeEndian.AppendUint64(nil, bits)[:size]

				want := d.randomBytes(guard + count*size + guard)
				ptr := d.upload(want)
				for i := range count {
					copy(want[guard+i*size:], element)
				}
				require.NoError(d, d.Fill(ptr+guard, count, dt, value))
				require.Equal(d, want, d.download(ptr, len(want)), "%d of %v filled with %v", count, dt, value)
			}
		}
	}
}

func testCopyArguments(d *device) {
	ptr := d.allocate(64)
	one := []int{1}
	data := make([]byte, 4)
	strided := func(dstStrides, srcStrides, shape []int, elemSize int) error {
		return d.CopyStrided(ptr, dstStrides, ptr, srcStrides, shape, elemSize)
	}
	for name, c := range map[string]struct {
		err  error
		want error
	}{
		"copy in to nil":        {d.CopyIn(0, data), runtime.ErrArgument},
		"copy out of nil":       {d.CopyOut(data, 0), runtime.ErrArgument},
		"copy to nil":           {d.Copy(0, ptr, 4), runtime.ErrArgument},
		"copy from nil":         {d.Copy(ptr, 0, 4), runtime.ErrArgument},
		"negative copy":         {d.Copy(ptr, ptr, -1), runtime.ErrArgument},
		"fill nil":              {d.Fill(0, 1, dtype.F32, 0), runtime.ErrArgument},
		"negative fill":         {d.Fill(ptr, -1, dtype.F32, 0), runtime.ErrArgument},
		"fill invalid":          {d.Fill(ptr, 1, dtype.Invalid, 0), runtime.ErrDType},
		"strided to nil":        {d.CopyStrided(0, one, ptr, one, one, 4), runtime.ErrArgument},
		"strided from nil":      {d.CopyStrided(ptr, one, 0, one, one, 4), runtime.ErrArgument},
		"element size 0":        {strided(one, one, one, 0), runtime.ErrArgument},
		"strides too few":       {strided(nil, one, one, 4), runtime.ErrShape},
		"strides too many":      {strided(one, []int{1, 1}, one, 4), runtime.ErrShape},
		"negative size":         {strided(one, one, []int{-1}, 4), runtime.ErrShape},
		"destination stride 0":  {strided([]int{0}, one, []int{2}, 4), runtime.ErrArgument},
		"stride beyond memory":  {strided([]int{math.MaxInt}, one, []int{2}, 4), runtime.ErrArgument},
		"strides beyond memory": {strided([]int{1 << 61, 1 << 61}, []int{1, 1}, []int{2, 2}, 1), runtime.ErrArgument},
		"lowest stride":         {strided([]int{1}, []int{math.MinInt}, []int{2}, 4), runtime.ErrArgument},
	} {
		require.ErrorIs(d, c.err, c.want, name)
	}
}

// Posted data gets to the host as it was then, and stays there until something else is.
func testHostCopies(d *device) {
	copier, ok := d.Runtime.(kernel.AsyncCopier)
	if !ok {
		d.Skip("the runtime is not asynchronous")
	}
	const words = 37
	_, err := copier.NewHostCopy(0)
	assert.ErrorIs(d, err, runtime.ErrArgument)
	n, err := copier.NewHostCopy(words * 4)
	require.NoError(d, err)
	ready, err := n.Ready()
	require.NoError(d, err)
	assert.True(d, ready, "nothing was posted")

	ptr := d.allocate(words * 4)
	read := func(want int32) {
		data, err := n.Read(context.Background())
		require.NoError(d, err)
		require.Len(d, data, words*4)
		for i := range words {
			require.Equal(d, want, int32(binary.LittleEndian.Uint32(data[4*i:])))
		}
	}
	for round := range int32(20) {
		require.NoError(d, d.Fill(ptr, words, dtype.I32, float64(round)))
		cut := int(round) % words * 4
		halves := []kernel.Span{
			{Ptr: ptr + uintptr(cut), Bytes: words*4 - cut},
			{Ptr: ptr, Bytes: cut},
		}
		require.NoError(d, n.Post(halves))
		read(round)
		require.NoError(d, d.Fill(ptr, words, dtype.I32, 1000))
		d.synchronize()
		read(round)
		ready, err := n.Ready()
		require.NoError(d, err)
		assert.True(d, ready)
	}
	second := d.allocate(words * 4)
	require.NoError(d, d.Fill(second, words, dtype.I32, 2000))
	require.NoError(d, n.Post([]kernel.Span{{Ptr: ptr, Bytes: words * 4}}))
	require.NoError(d, n.Post([]kernel.Span{{Ptr: second, Bytes: words * 4}}))
	read(2000)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = n.Read(ctx)
	assert.ErrorIs(d, err, context.Canceled)
	for _, wrong := range [][]kernel.Span{
		nil,
		{{Bytes: words * 4}},
		{{Ptr: ptr, Bytes: words*4 - 1}},
		{{Ptr: ptr, Bytes: words * 4}, {Ptr: ptr, Bytes: 1}},
		{{Ptr: ptr, Bytes: -1}, {Ptr: ptr, Bytes: words*4 + 1}},
	} {
		assert.ErrorIs(d, n.Post(wrong), runtime.ErrArgument, "%v", wrong)
	}
	require.NoError(d, n.Close())
	require.NoError(d, n.Close())
}
