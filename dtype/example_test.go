package dtype_test

import (
	"encoding/json"
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

// An element type in a configuration reads and writes as its short name.
func ExampleDType_MarshalText() {
	var config struct{ Weights, Sums dtype.DType }
	if err := json.Unmarshal([]byte(`{"Weights": "bfloat16", "Sums": "float32"}`), &config); err != nil {
		fmt.Println(err)
	}
	text, err := json.Marshal(config)
	fmt.Printf("%s %v\n", text, err)
	// Output: {"Weights":"bf16","Sums":"f32"} <nil>
}

// All types, and the ranges that they hold.
func ExampleAll() {
	for _, d := range dtype.All() {
		if !d.IsFloat() && d.IsSigned() {
			fmt.Print(d, " ")
		}
	}
	fmt.Println(dtype.Invalid.Valid())
	// Output: i64 i32 i16 i8 false
}

// One element is rounded, one way or the other: as a Go type, or as bits of any type.
func ExampleRound() {
	fmt.Println(dtype.Round[dtype.BFloat16](0.1).Float32(), dtype.Round[dtype.Float8E5M2](0.1).Float32())
	bits, err := dtype.FromFloat64(dtype.F16, 0.1)
	if err != nil {
		fmt.Println(err)
	}
	value, err := dtype.ToFloat64(dtype.F16, bits)
	fmt.Printf("%#x %.6f %v\n", bits, value, err)
	// Output:
	// 0.100097656 0.09375
	// 0x2e66 0.099976 <nil>
}

// Weights of bf16 are read as float32.
func ExampleToFloat32() {
	weights := []dtype.BFloat16{0x3f80, 0xc000} // 1 and -2
	values := make([]float32, len(weights))
	err := dtype.ToFloat32(values, hostmem.Bytes(weights), dtype.BF16)
	fmt.Println(values, err)
	// Output: [1 -2] <nil>
}

// scale multiplies elements of any type that a tensor may have.
func scale[T dtype.Element](factor T, multiply func(a, b T) T, values []T) {
	for i := range values {
		values[i] = multiply(values[i], factor)
	}
}

func ExampleElement() {
	values := []int32{1, 2, 3}
	scale(2, func(a, b int32) int32 { return a * b }, values)
	fmt.Println(dtype.Of[int32](), values)
	// Output: i32 [2 4 6]
}
