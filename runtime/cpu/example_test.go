package cpu_test

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func ExampleNew() {
	rt := cpu.New()
	buffer, err := rt.Allocate(1000)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("aligned:", buffer%64 == 0)
	fmt.Println("live bytes:", rt.Stats().LiveBytes)
	fmt.Println(rt.Deallocate(buffer))
	fmt.Println("freed twice:", errors.Is(rt.Deallocate(buffer), runtime.ErrDoubleFree))
	fmt.Println("cached bytes:", rt.Stats().CachedBytes)
	fmt.Println(rt.Close())
	// Output:
	// aligned: true
	// live bytes: 1024
	// <nil>
	// freed twice: true
	// cached bytes: 1024
	// <nil>
}

// Memory of a framework is wrapped where it lies, not copied.
func ExampleWrap() {
	rt := cpu.New()
	defer rt.Close()

	weights := []float32{1, 2, 3, 4}
	t, err := cpu.Wrap(rt, weights, 2, 2)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer t.Free()
	column, _ := t.Index(1, 0)
	fmt.Println(column.Fill(0), weights)
	// Output: <nil> [0 2 0 4]
}

// The elements of a tensor are read and written where they lie.
func ExampleSlice() {
	rt := cpu.New()
	defer rt.Close()

	t, err := runtime.FromSlice(rt, []int32{3, 1, 2})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer t.Free()
	values, _ := cpu.Slice[int32](t)
	slices.Sort(values)
	sorted, _ := runtime.ToSlice[int32](t)
	fmt.Println(sorted)
	// Output: [1 2 3]
}

// Weights that were read from a file are a tensor of their type, where they lie.
func ExampleWrapBytes() {
	rt := cpu.New()
	defer rt.Close()
	weights := []byte{0x80, 0x3f, 0x00, 0xc0} // 1 and -2, in bf16
	t, err := cpu.WrapBytes(rt, weights, dtype.BF16)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer t.Free()
	values, err := cpu.Slice[dtype.BFloat16](t)
	fmt.Println(t, values[1].Float32(), err)
	// Output: bf16[2] on cpu:0 -2 <nil>
}

// Rows with gaps between them are copied by their strides, in elements: here the second column of a matrix.
func ExampleRuntime_CopyStrided() {
	rt := cpu.New()
	defer rt.Close()
	matrix, err := rt.Allocate(4)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer rt.Deallocate(matrix)
	column, err := rt.Allocate(2)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer rt.Deallocate(column)
	if err := rt.CopyIn(matrix, []byte{1, 2, 3, 4}); err != nil {
		fmt.Println(err)
	}
	if err := rt.CopyStrided(column, []int{1}, matrix+1, []int{2}, []int{2}, 1); err != nil {
		fmt.Println(err)
	}
	values := make([]byte, 2)
	err = rt.CopyOut(values, column)
	fmt.Println(values, err)
	// Output: [2 4] <nil>
}
