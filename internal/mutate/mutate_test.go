package mutate

import (
	"go/parser"
	"go/token"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const source = `package p

const size = 1

func double(x int) int {
	y := x + x
	return y
}

func reset(x *int) { *x = 0 }
`

func TestFunctions(t *testing.T) {
	text, err := Functions(source, "chosen", []Variant{
		{1, "x + x", "x * x"},
		{2, "return y", "return y + 1"},
		{3, "*x = 0", "*x = 1"},
	})
	require.NoError(t, err)
	_, err = parser.ParseFile(token.NewFileSet(), "", text, 0)
	require.NoError(t, err, text)
	assert.Contains(t, text, "if chosen == 1 {\n\ty := x * x\n\treturn y\n}")
	assert.Contains(t, text, "if chosen == 2 {\n\ty := x + x\n\treturn y + 1\n}")
	assert.Contains(t, text, "if chosen == 3 { *x = 1 \nreturn\n}\n *x = 0 }")
	assert.Contains(t, text, "\ty := x + x\n\treturn y\n}\n", "the function itself stays")
}

// A text that is not there, is there twice, or is outside of functions would leave a mutant out
// without a word.
func TestTextsThatDoNotMatch(t *testing.T) {
	for _, old := range []string{"x - x", "y", "size = 1"} {
		_, err := Functions(source, "chosen", []Variant{{7, old, ""}})
		assert.ErrorContains(t, err, "variant 7", old)
	}
	_, err := Functions("no Go", "chosen", nil)
	assert.Error(t, err)
}
