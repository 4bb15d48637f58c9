package cuda_test

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// A tensor on the first GPU. It needs a GPU, so it is not run here.
func ExampleOpen() {
	rt, err := cuda.Open(0)
	if err != nil {
		fmt.Println(err) // says which library or device is missing
		return
	}
	defer rt.Close()
	t, err := runtime.FromSlice(rt, []float32{1, 2, 3})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer t.Free()
	fmt.Println(t, rt.Info().Name)
}

// A kernel of one's own, from PTX. It needs a GPU, so it is not run here;
// examples/overlap has a complete program.
func ExampleRuntime_LoadModule() {
	const ptx = `
.version 7.0
.target sm_80
.address_size 64
.visible .entry increment(.param .u64 address)
{
	.reg .b64 %address, %i;
	.reg .b32 %thread;
	.reg .f32 %value;
	ld.param.u64 %address, [address];
	cvta.to.global.u64 %address, %address;
	mov.u32 %thread, %tid.x;
	mul.wide.u32 %i, %thread, 4;
	add.s64 %address, %address, %i;
	ld.global.f32 %value, [%address];
	add.f32 %value, %value, 0f3f800000;
	st.global.f32 [%address], %value;
	ret;
}`
	rt, err := cuda.Open(0)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer rt.Close()
	run := func() error {
		module, err := rt.LoadModule([]byte(ptx))
		if err != nil {
			return err
		}
		defer module.Close()
		increment, err := module.Kernel("increment")
		if err != nil {
			return err
		}
		t, err := runtime.FromSlice(rt, []float32{1, 2, 3})
		if err != nil {
			return err
		}
		defer t.Free()
		p, err := t.Ptr()
		if err != nil {
			return err
		}
		if err := increment.Launch(rt.Stream(), cuda.Geometry{Block: cuda.Dim{X: t.Len()}}, uint64(p)); err != nil {
			return err
		}
		// LaunchWith takes parameters of other sizes, as they lie in memory.
		parameters := binary.NativeEndian.AppendUint64(nil, uint64(p))
		if err := increment.LaunchWith(rt.Stream(), cuda.Geometry{Block: cuda.Dim{X: t.Len()}}, parameters); err != nil {
			return err
		}
		if err := rt.Synchronize(context.Background()); err != nil {
			return err
		}
		values, err := runtime.ToSlice[float32](t)
		fmt.Println(values)
		return err
	}
	fmt.Println(run())
}
