package dtype_test

import (
	"fmt"

	"github.com/x448/float16"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

func ExampleParse() {
	for _, name := range []string{"bf16", "Float32", "half", "float8_e4m3fn"} {
		d, err := dtype.Parse(name)
		fmt.Println(d, d.Size(), d.IsFloat(), err)
	}
	_, err := dtype.Parse("f31")
	fmt.Println(err)
	// Output:
	// bf16 2 true <nil>
	// f32 4 true <nil>
	// f16 2 true <nil>
	// fp8e4m3 1 true <nil>
	// dtype: unknown element type "f31" (want f64, f32, f16, bf16, fp8e4m3, fp8e5m2, i64, i32, i16, i8, u64, u32, u16, u8 or bool)
}

func ExampleOf() {
	fmt.Println(dtype.Of[float64](), dtype.Of[dtype.BFloat16](), dtype.Of[uint8](), dtype.Of[bool]())
	// Output: f64 bf16 u8 bool
}

// half is the float16 of another library.
type half uint16

func (h half) Float32() float32 { return float16.Frombits(uint16(h)).Float32() }

func ExampleOf_otherLibraries() {
	fmt.Println(dtype.Of[half](), dtype.Of[uint16]())
	// Output: f16 u16
}

func ExampleFromFloat32() {
	values := []float32{1, 0.1, -3.14159, 1000}
	narrow := make([]dtype.Float8E4M3, len(values))
	if err := dtype.FromFloat32(hostmem.Bytes(narrow), dtype.FP8E4M3, values); err != nil {
		fmt.Println(err)
	}
	for _, f := range narrow {
		fmt.Println(f.Float32())
	}
	// Output:
	// 1
	// 0.1015625
	// -3.25
	// 448
}
