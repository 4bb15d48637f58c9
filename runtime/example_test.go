package runtime_test

import (
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// A tensor is freed by its owner; views end with it.
func ExampleTensor() {
	rt := cpu.New()
	defer rt.Close()

	matrix, err := runtime.FromSlice(rt, []float32{1, 2, 3, 4, 5, 6}, 2, 3)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(matrix)

	transposed, _ := matrix.Transpose(0, 1)
	values, _ := runtime.ToSlice[float32](transposed)
	fmt.Println(transposed, values)

	_, err = transposed.Reshape(6)
	fmt.Println(errors.Is(err, runtime.ErrNotContiguous))

	fmt.Println(matrix.Free())
	_, err = transposed.Ptr()
	fmt.Println(errors.Is(err, runtime.ErrFreed))
	// Output:
	// f32[2 3] on cpu:0
	// f32[3 2] on cpu:0 with strides [1 3] [1 4 2 5 3 6]
	// true
	// <nil>
	// true
}

// Memory of a framework is wrapped where it lies, not copied.
func ExampleWrap() {
	rt := cpu.New()
	defer rt.Close()

	weights := []float32{1, 2, 3, 4} // on the Go heap, kept alive by its owner
	t, err := runtime.Wrap(rt, hostmem.Addr(weights), dtype.F32, []int{2, 2}, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	column, _ := t.Index(1, 0)
	fmt.Println(column.Fill(0), weights)
	// Output: <nil> [0 2 0 4]
}
