package dtype

import (
	"fmt"
	"strings"
)

// aliases are names of other libraries that Parse reads too.
var aliases = map[string]DType{
	"float64":       F64,
	"fp64":          F64,
	"double":        F64,
	"float32":       F32,
	"fp32":          F32,
	"float16":       F16,
	"fp16":          F16,
	"half":          F16,
	"bfloat16":      BF16,
	"float8_e4m3fn": FP8E4M3,
	"float8_e4m3":   FP8E4M3,
	"float8e4m3":    FP8E4M3,
	"fp8_e4m3":      FP8E4M3,
	"e4m3":          FP8E4M3,
	"float8_e5m2":   FP8E5M2,
	"float8e5m2":    FP8E5M2,
	"fp8_e5m2":      FP8E5M2,
	"e5m2":          FP8E5M2,
	"int64":         I64,
	"int32":         I32,
	"int16":         I16,
	"int8":          I8,
	"uint64":        U64,
	"uint32":        U32,
	"uint16":        U16,
	"uint8":         U8,
	"byte":          U8,
	"boolean":       Bool,
}

// Parse reads the name of an element type, in any case: the short names that
// String writes, and the common names of other libraries (float32, fp32, half,
// bfloat16, float8_e4m3fn, int32, uint8, byte, …).
func Parse(s string) (DType, error) {
	name := strings.ToLower(s)
	for _, d := range All() {
		if infos[d].name == name {
			return d, nil
		}
	}
	if d, ok := aliases[name]; ok {
		return d, nil
	}
	return Invalid, fmt.Errorf("dtype: unknown element type %q (want %s)", s, names())
}

func names() string {
	all := make([]string, 0, numTypes)
	for _, d := range All() {
		all = append(all, d.String())
	}
	last := len(all) - 1
	return strings.Join(all[:last], ", ") + " or " + all[last]
}

// MarshalText writes the short name, so that a DType is readable in JSON and
// as the default of a flag. An invalid DType is an error.
func (d DType) MarshalText() ([]byte, error) {
	if !d.Valid() {
		return nil, errInvalid(d)
	}
	return []byte(d.String()), nil
}

// UnmarshalText reads a name as [Parse] does.
func (d *DType) UnmarshalText(text []byte) error {
	parsed, err := Parse(string(text))
	if err == nil {
		*d = parsed
	}
	return err
}
