// Package printable makes text from elsewhere, such as a peer, a store or a file, safe for a terminal.
package printable

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Text replaces characters that a terminal would obey instead of showing, including line ends and invalid bytes, by
// their Go escapes.
func Text(text string) string {
	var shown strings.Builder
	for i := 0; i < len(text); {
		c, size := utf8.DecodeRuneInString(text[i:])
		switch {
		case c == utf8.RuneError && size == 1:
			fmt.Fprintf(&shown, `\x%02x`, text[i])
		case strconv.IsPrint(c):
			shown.WriteRune(c)
		default:
			shown.WriteString(strings.Trim(strconv.QuoteRune(c), "'"))
		}
		i += size
	}
	return shown.String()
}

// LongestName bounds a name of a process or a job, in bytes.
const LongestName = 2 << 10

// CheckName returns an error if text cannot be the name of a process or a job, which others print.
func CheckName(text string) error {
	if len(text) > LongestName {
		return fmt.Errorf("names have at most %d bytes, and this one has %d", LongestName, len(text))
	}
	for _, c := range text {
		if !strconv.IsPrint(c) {
			return fmt.Errorf("names have printable characters only, unlike %q", text)
		}
	}
	return nil
}
