package printable

import (
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
