package printable

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestText: what is visible stays, and what a terminal obeys becomes visible.
func TestText(t *testing.T) {
	for text, want := range map[string]string{
		"":                              "",
		"rank 3 on höst: 'x' \"y\" \\n": "rank 3 on höst: 'x' \"y\" \\n",
		"\x1b]0;owned\a\x1b[2J":         `\x1b]0;owned\a\x1b[2J`,
		"one\ntutti: two\r\t\x00\x7f":   `one\ntutti: two\r\t\x00\x7f`,
		"\u009b31m\u202egnp.exe\u2028":  `\u009b31m\u202egnp.exe\u2028`,
		"\xff\x9b":                      `\xff\x9b`,
	} {
		assert.Equal(t, want, Text(text), "%q", text)
	}
}

// Names are bounded, and have nothing that a terminal obeys.
func TestCheckName(t *testing.T) {
	for _, name := range []string{"", "rank 3 on höst", strings.Repeat("j", 2048)} {
		assert.NoError(t, CheckName(name))
	}
	assert.EqualError(t, CheckName(strings.Repeat("j", 2049)), "names have at most 2048 bytes, and this one has 2049")
	for _, name := range []string{"a\tb", "a\nb", "\x1b[2J", "a\u202eb"} {
		assert.ErrorContains(t, CheckName(name), fmt.Sprintf("unlike %q", name))
	}
}
