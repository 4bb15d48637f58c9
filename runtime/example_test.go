package runtime_test

import (
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/dtype"
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

// Memory of a framework is wrapped where it lies, not copied. Memory of a device
// or of a C library is wrapped by its address; Free tells the owner.
func ExampleWrap() {
	rt := cpu.New()
	defer rt.Close()

	buffer, err := rt.Allocate(16) // the owner's, who knows only its address
	if err != nil {
		fmt.Println(err)
		return
	}
	t, err := runtime.Wrap(rt, buffer, dtype.F32, []int{2, 2}, nil, func() { fmt.Println(rt.Deallocate(buffer)) })
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(t, t.Fill(1))
	fmt.Println(t.Free())
	// Output:
	// f32[2 2] on cpu:0 <nil>
	// <nil>
	// <nil>
}
