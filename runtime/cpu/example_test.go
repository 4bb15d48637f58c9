package cpu_test

import (
	"errors"
	"fmt"

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
