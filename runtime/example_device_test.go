package runtime_test

import (
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// A batch of images comes with its channels last. Permute moves them first without a copy, and Contiguous copies.
func ExampleTensor_Permute() {
	rt := cpu.New()
	defer rt.Close()
	images, err := runtime.FromSlice(rt, []float32{1, 10, 2, 20}, 1, 2, 2) // image, pixel, channel
	if err != nil {
		fmt.Println(err)
		return
	}
	defer images.Free()
	planes, err := images.Permute(0, 2, 1)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(planes.Strides(), planes.IsContiguous(), planes.Device())

	copied, err := planes.Contiguous()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer copied.Free()
	flat, err := copied.Reshape(4)
	if err != nil {
		fmt.Println(err)
		return
	}
	values, err := runtime.ToSlice[float32](flat)
	fmt.Println(values, err)
	fmt.Println(planes.CopyFrom(copied)) // strides may differ, not the shape
	// Output:
	// [4 1 2] false cpu:0
	// [1 2 10 20] <nil>
	// <nil>
}

// A training loop that must not allocate freezes the pool after its first step: what would need memory of the system
// is an error from then on.
func ExampleFreezer() {
	var rt runtime.Runtime = cpu.New()
	defer rt.Close()
	step := func() error {
		activations, err := rt.Allocate(1 << 20)
		if err != nil {
			return err
		}
		return rt.Deallocate(activations)
	}
	if err := step(); err != nil { // fills the pool
		fmt.Println(err)
	}
	if pool, ok := rt.(runtime.Freezer); ok {
		pool.Freeze()
		fmt.Println(step())
		_, err := rt.Allocate(1 << 30)
		fmt.Println(errors.Is(err, runtime.ErrFrozen))
		pool.Unfreeze()
		returned, err := pool.Trim() // all that is not in use
		fmt.Println(returned >= 1<<20, err)
	}
	fmt.Println(rt.Device(), rt.Stats().LiveBytes)
	// Output:
	// <nil>
	// true
	// true <nil>
	// cpu:0 0
}

// A side stream computes beside the runtime's own stream. Devices without streams have none.
func ExampleStreamForker() {
	var rt runtime.Runtime = cpu.New()
	defer rt.Close()
	forker, ok := rt.(runtime.StreamForker)
	if !ok {
		fmt.Println(rt.Device(), "has one stream")
		return
	}
	side, err := forker.ForkStream()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer side.Close()
	// Output: cpu:0 has one stream
}
