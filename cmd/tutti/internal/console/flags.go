package console

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
)

// Value is a flag of any type with a parser.
type Value[T any] struct {
	Target *T                      // receives the parsed value; nil in a zero Value
	Parse  func(string) (T, error) // parses the flag's text
	Format func(T) string          // formats the default for the help
	Kind   string                  // shown in the help
}

// Set implements [pflag.Value].
func (f Value[T]) Set(text string) error {
	v, err := f.Parse(text)
	if err == nil {
		*f.Target = v
	}
	return err
}

// String implements [pflag.Value]. The flag package calls it on a zero value.
func (f Value[T]) String() string {
	if f.Target == nil {
		return ""
	}
	return f.Format(*f.Target)
}

// Type implements [pflag.Value].
func (f Value[T]) Type() string {
	return f.Kind
}

// restricted is a flag that accepts only some values of its type.
type restricted struct {
	pflag.Value
	accepts func() bool // checks the value that was set
	want    string      // in the error, such as "positive"
}

// Set implements [pflag.Value].
func (r restricted) Set(text string) error {
	err := r.Value.Set(text)
	if err == nil && !r.accepts() {
		err = errors.New("must be " + r.want)
	}
	return err
}

// Restrict limits a flag to the values that accepts reports true for. Its error calls them want.
func Restrict(flags *pflag.FlagSet, name, want string, accepts func() bool) {
	f := flags.Lookup(name)
	f.Value = restricted{f.Value, accepts, want}
}

// SizeFlag is a number of bytes, such as 8, 64K, 1.5M or 1G (powers of 1024).
func SizeFlag(target *int) pflag.Value {
	return Value[int]{
		Target: target,
		Parse:  parseSize,
		Format: FormatSize,
		Kind:   "size",
	}
}

var sizeUnits = []struct {
	suffix string
	bytes  int
}{{"G", 1 << 30}, {"M", 1 << 20}, {"K", 1 << 10}}

func parseSize(text string) (int, error) {
	number := strings.ToUpper(strings.TrimSpace(text))
	unit := 1
	number = strings.TrimSuffix(strings.TrimSuffix(number, "B"), "I")
	for _, u := range sizeUnits {
		if digits, ok := strings.CutSuffix(number, u.suffix); ok {
			number = digits
			unit = u.bytes
			break
		}
	}
	v, err := strconv.ParseFloat(number, 64)
	bytes := v * float64(unit)
	if err != nil || !(bytes >= 0 && bytes < math.MaxInt64) || bytes != math.Trunc(bytes) {
		return 0, fmt.Errorf("%q is not a size (want bytes such as 8, 64K, 16M or 1G)", text)
	}
	return int(bytes), nil
}

// FormatSize writes a number of bytes in the largest unit that leaves a whole number.
func FormatSize(bytes int) string {
	for _, u := range sizeUnits {
		if bytes >= u.bytes && bytes%u.bytes == 0 {
			return strconv.Itoa(bytes/u.bytes) + u.suffix
		}
	}
	return strconv.Itoa(bytes)
}

// NameFlag is a name in the form that parse returns.
func NameFlag(target *string, parse func(string) (string, error)) pflag.Value {
	return Value[string]{
		Target: target,
		Parse:  parse,
		Format: func(name string) string { return name },
		Kind:   "name",
	}
}

// DTypeFlag adds a flag that names an element type.
func DTypeFlag(flags *pflag.FlagSet, target *dtype.DType, name, usage string, types ...dtype.DType) {
	flags.Var(
		Value[dtype.DType]{
			Target: target,
			Parse:  dtype.Parse,
			Format: dtype.DType.String,
			Kind:   "name",
		},
		name,
		usage+": "+JoinNames(types),
	)
}

// PatternNames lists the values of a pattern flag.
func PatternNames() string {
	return sparse.Auto + " (the fastest here), " + strings.Join(sparsity.Patterns(), ", ")
}

// ParsePattern returns a pattern or auto by its name, in any case.
func ParsePattern(name string) (string, error) {
	return OneOf("pattern", name, append(sparsity.Patterns(), sparse.Auto), nil)
}

// JoinNames lists names.
func JoinNames[T fmt.Stringer](all []T) string {
	var names []string
	for _, v := range all {
		names = append(names, v.String())
	}
	return strings.Join(names, ", ")
}

// OneOf finds a name in a list, ignoring case. If there is none, its error suggests the name's alias or the nearest
// name.
func OneOf(kind, name string, names []string, aliases map[string]string) (string, error) {
	for _, n := range names {
		if strings.EqualFold(n, name) {
			return n, nil
		}
	}
	hint := ""
	near, ok := aliases[strings.ToLower(name)]
	if !ok {
		near = Nearest(name, names)
	}
	if near != "" {
		hint = fmt.Sprintf("; did you mean %q?", near)
	}
	return "", fmt.Errorf("unknown %s %q (want one of %s)%s", kind, name, strings.Join(names, ", "), hint)
}

// Nearest returns a name within two letters of text, or one that begins with text, and prefers one with text's first
// letter. It returns "" if there is none.
func Nearest(text string, names []string) string {
	c := cobra.Command{SuggestionsMinimumDistance: 2}
	for _, name := range names {
		c.AddCommand(&cobra.Command{Use: name, Run: func(*cobra.Command, []string) {}})
	}
	if near := c.SuggestionsFor(text); text != "" && len(near) > 0 {
		return near[max(0, slices.IndexFunc(near, func(name string) bool {
			return name[0] == text[0]
		}))]
	}
	return ""
}
