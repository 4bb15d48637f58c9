package dtype_test

import (
	"encoding/json"
	"flag"
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
		assert.Zero(t, d.Limits())
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

func TestLimits(t *testing.T) {
	for d, want := range map[dtype.DType]dtype.Limits{
		dtype.F16:     {Max: 65504, Lowest: -65504, Epsilon: 1. / 1024, SmallestNormal: 1. / 16384, SmallestNonzero: 0x1p-24},
		dtype.BF16:    {Max: 0x1.fep127, Lowest: -0x1.fep127, Epsilon: 1. / 128, SmallestNormal: 0x1p-126, SmallestNonzero: 0x1p-133},
		dtype.FP8E4M3: {Max: 448, Lowest: -448, Epsilon: .125, SmallestNormal: 1. / 64, SmallestNonzero: 1. / 512},
		dtype.FP8E5M2: {Max: 57344, Lowest: -57344, Epsilon: .25, SmallestNormal: 1. / 16384, SmallestNonzero: 1. / 65536},
		dtype.I8:      {Max: 127, Lowest: -128, Epsilon: 1, SmallestNormal: 1, SmallestNonzero: 1},
		dtype.U16:     {Max: 65535, Lowest: 0, Epsilon: 1, SmallestNormal: 1, SmallestNonzero: 1},
		dtype.I64:     {Max: 0x1p63, Lowest: -0x1p63, Epsilon: 1, SmallestNormal: 1, SmallestNonzero: 1},
		dtype.Bool:    {Max: 1, SmallestNormal: 1, SmallestNonzero: 1},
	} {
		assert.Equal(t, want, d.Limits(), d)
	}
	// What the limits say must agree with what conversion does.
	for _, d := range dtype.All() {
		l := d.Limits()
		for name, v := range map[string]float64{
			"max": l.Max, "lowest": l.Lowest, "smallest normal": l.SmallestNormal,
			"smallest": l.SmallestNonzero, "1+epsilon": 1 + l.Epsilon,
		} {
			assert.Equal(t, v, roundTrip(t, d, v), "%v %s", d, name)
		}
		if d != dtype.Bool {
			assert.Zero(t, roundTrip(t, d, l.SmallestNonzero/2), "%v: half the smallest ties to even", d)
		}
		if d.IsFloat() {
			assert.Equal(t, 1., roundTrip(t, d, 1+l.Epsilon/2), "%v: half of epsilon ties to even", d)
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
