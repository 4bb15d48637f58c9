package cpu_test

import (
	"errors"
	"fmt"
	"slices"

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
