package dlpack_test

import (
	"fmt"

	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/dlpack"
)

// A tensor passes from one library to another without a copy. Both are this module here; PyTorch, JAX and NumPy are
// given the address in a capsule of that name.
func ExampleExport() {
	rt := cpu.New()
	defer rt.Close()
	tensor, err := runtime.FromSlice(rt, []float32{1, 2, 3})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer tensor.Free()
	const capsule = "dltensor_versioned"
	fmt.Println("the consumer's stream:", dlpack.Stream(rt)) // 0 on a host: Python's None
	address, err := dlpack.Export(tensor, -1, capsule, func() { fmt.Println("the consumer is done") })
	if err != nil {
		fmt.Println(err)
		return
	}
	shared, err := dlpack.Import(rt, address, capsule)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(shared.Fill(7))
	fmt.Println(shared.Free())
	values, err := runtime.ToSlice[float32](tensor)
	fmt.Println(values, err)
	// Output:
	// the consumer's stream: 0
	// <nil>
	// the consumer is done
	// <nil>
	// [7 7 7] <nil>
}
