package dtype_test

import (
	"encoding/json"
	"flag"
	"math"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/x448/float16"

	"github.com/tutti-go/tutti/dtype"
)

// goType ties a DType to the Go type that should represent it.
func goType[T dtype.Element](want dtype.DType) func(*testing.T) {
	return func(t *testing.T) {
		var zero T
		assert.Equal(t, want, dtype.Of[T]())
		assert.Equal(t, int(unsafe.Sizeof(zero)), want.Size())
	}
}

func TestOfCoversEveryType(t *testing.T) {
	tests := map[dtype.DType]func(*testing.T){
		dtype.F64:     goType[float64](dtype.F64),
		dtype.F32:     goType[float32](dtype.F32),
		dtype.F16:     goType[float16.Float16](dtype.F16),
		dtype.BF16:    goType[dtype.BFloat16](dtype.BF16),
		dtype.FP8E4M3: goType[dtype.Float8E4M3](dtype.FP8E4M3),
		dtype.FP8E5M2: goType[dtype.Float8E5M2](dtype.FP8E5M2),
		dtype.I64:     goType[int64](dtype.I64),
		dtype.I32:     goType[int32](dtype.I32),
		dtype.I16:     goType[int16](dtype.I16),
		dtype.I8:      goType[int8](dtype.I8),
		dtype.U64:     goType[uint64](dtype.U64),
		dtype.U32:     goType[uint32](dtype.U32),
		dtype.U16:     goType[uint16](dtype.U16),
		dtype.U8:      goType[uint8](dtype.U8),
		dtype.Bool:    goType[bool](dtype.Bool),
	}
	require.Len(t, dtype.All(), len(tests))
	for _, d := range dtype.All() {
		t.Run(d.String(), tests[d])
	}
}

func TestInvalidIsHarmless(t *testing.T) {
	for _, d := range []dtype.DType{dtype.Invalid, dtype.Bool + 1, 255} {
		assert.False(t, d.Valid())
		assert.Zero(t, d.Size())
		assert.False(t, d.IsFloat())
		assert.False(t, d.IsSigned())
		assert.Equal(t, "invalid", d.String())
		_, err := d.MarshalText()
		assert.Error(t, err)
		_, err = dtype.FromFloat64(d, 1)
		assert.Error(t, err)
		_, err = dtype.ToFloat64(d, 1)
		assert.Error(t, err)
		assert.Error(t, dtype.ToFloat32(nil, nil, d))
		assert.Error(t, dtype.FromFloat32(nil, d, nil))
	}
}

func TestKinds(t *testing.T) {
	floats, unsigned := 0, 0
	for _, d := range dtype.All() {
		if d.IsFloat() {
			floats++
			assert.True(t, d.IsSigned(), d)
		}
		if !d.IsSigned() {
			unsigned++
		}
	}
	assert.Equal(t, 6, floats)
	assert.Equal(t, 5, unsigned, "four unsigned integers and Bool")
}

func TestParse(t *testing.T) {
	for _, d := range dtype.All() {
		for _, name := range []string{d.String(), strings.ToUpper(d.String())} {
			got, err := dtype.Parse(name)
			require.NoError(t, err)
			assert.Equal(t, d, got, name)
		}
	}
	for name, want := range map[string]dtype.DType{
		"float32": dtype.F32, "FP32": dtype.F32, "double": dtype.F64, "Half": dtype.F16,
		"bfloat16": dtype.BF16, "float8_e4m3fn": dtype.FP8E4M3, "e5m2": dtype.FP8E5M2,
		"Int32": dtype.I32, "uint8": dtype.U8, "byte": dtype.U8, "boolean": dtype.Bool,
	} {
		got, err := dtype.Parse(name)
		require.NoError(t, err)
		assert.Equal(t, want, got, name)
	}
	for _, name := range []string{"", "f31", "invalid", " f32", "int", "f32\x00"} {
		got, err := dtype.Parse(name)
		require.Error(t, err, name)
		assert.Equal(t, dtype.Invalid, got)
		for _, d := range dtype.All() {
			assert.ErrorContains(t, err, d.String())
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, d := range dtype.All() {
		f.Add(d.String())
	}
	f.Add("Float8_E4M3FN")
	f.Fuzz(func(t *testing.T, s string) {
		d, err := dtype.Parse(s)
		if (err == nil) != d.Valid() {
			t.Fatalf("Parse(%q) = %v, %v", s, d, err)
		}
		if err != nil {
			return
		}
		if again, err := dtype.Parse(d.String()); err != nil || again != d {
			t.Fatalf("Parse(%q) = %v, whose name reads as %v, %v", s, d, again, err)
		}
	})
}

func TestTextRoundTrip(t *testing.T) {
	type config struct {
		Type dtype.DType            `json:"type"`
		Map  map[dtype.DType]string `json:"map"`
	}
	in := config{Type: dtype.BF16, Map: map[dtype.DType]string{dtype.I8: "small"}}
	text, err := json.Marshal(in)
	require.NoError(t, err)
	assert.JSONEq(t, `{"type":"bf16","map":{"i8":"small"}}`, string(text))
	var out config
	require.NoError(t, json.Unmarshal(text, &out))
	assert.Equal(t, in, out)
	assert.ErrorContains(t, json.Unmarshal([]byte(`{"type":"f31"}`), &out), "f31")
	assert.Equal(t, dtype.BF16, out.Type, "a failed read leaves the value alone")

	d := dtype.F32
	flags := flag.NewFlagSet("test", flag.ContinueOnError)
	flags.TextVar(&d, "dtype", dtype.F32, "element type")
	require.NoError(t, flags.Parse([]string{"-dtype", "Half"}))
	assert.Equal(t, dtype.F16, d)
}

// limits are the largest and the most negative finite number of a type, the
// distance from 1 to the next larger number, and the smallest positive numbers
// with full precision and without.
type limits struct{ max, lowest, epsilon, normal, smallest float64 }

// limitsOf has them from the definitions of the types. Limits of 64-bit integers are rounded up to a float64.
var limitsOf = map[dtype.DType]limits{
	dtype.F64:     {math.MaxFloat64, -math.MaxFloat64, 0x1p-52, 0x1p-1022, 0x1p-1074},
	dtype.F32:     {math.MaxFloat32, -math.MaxFloat32, 0x1p-23, 0x1p-126, 0x1p-149},
	dtype.F16:     {65504, -65504, 0x1p-10, 0x1p-14, 0x1p-24},
	dtype.BF16:    {0x1.fep127, -0x1.fep127, 0x1p-7, 0x1p-126, 0x1p-133},
	dtype.FP8E4M3: {448, -448, 0x1p-3, 0x1p-6, 0x1p-9},
	dtype.FP8E5M2: {57344, -57344, 0x1p-2, 0x1p-14, 0x1p-16},
	dtype.I64:     {0x1p63, -0x1p63, 1, 1, 1},
	dtype.I32:     {0x1p31 - 1, -0x1p31, 1, 1, 1},
	dtype.I16:     {0x1p15 - 1, -0x1p15, 1, 1, 1},
	dtype.I8:      {127, -128, 1, 1, 1},
	dtype.U64:     {0x1p64, 0, 1, 1, 1},
	dtype.U32:     {0x1p32 - 1, 0, 1, 1, 1},
	dtype.U16:     {65535, 0, 1, 1, 1},
	dtype.U8:      {255, 0, 1, 1, 1},
	dtype.Bool:    {1, 0, 0, 1, 1},
}

func TestLimits(t *testing.T) {
	for _, d := range dtype.All() {
		l := limitsOf[d]
		for name, v := range map[string]float64{
			"max": l.max, "lowest": l.lowest, "smallest normal": l.normal, "smallest": l.smallest, "1+epsilon": 1 + l.epsilon,
		} {
			assert.Equal(t, v, roundTrip(t, d, v), "%v %s", d, name)
		}
		if d != dtype.Bool {
			assert.Zero(t, roundTrip(t, d, l.smallest/2), "%v: half the smallest ties to even", d)
		}
		if d.IsFloat() {
			assert.Equal(t, 1., roundTrip(t, d, 1+l.epsilon/2), "%v: half of epsilon ties to even", d)
		}
	}
}

func roundTrip(t *testing.T, d dtype.DType, v float64) float64 {
	t.Helper()
	bits, err := dtype.FromFloat64(d, v)
	require.NoError(t, err)
	back, err := dtype.ToFloat64(d, bits)
	require.NoError(t, err)
	return back
}
