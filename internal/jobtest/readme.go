package jobtest

import (
	"os"
	"strings"
	"testing"
)

// Readme fails unless the first diff of a document adds at most maxLines lines, and the program has them in this
// order.
func Readme(t *testing.T, document, program string, maxLines int) {
	t.Helper()
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	_, diff, _ := strings.Cut(string(text), "```diff\n")
	diff, _, _ = strings.Cut(diff, "```")
	remaining := string(file)
	added := 0
	for line := range strings.Lines(diff) {
		line, ok := strings.CutPrefix(line, "+")
		if !ok {
			continue
		}
		added++
		_, after, ok := strings.Cut(remaining, strings.TrimSpace(line)+"\n")
		if !ok {
			t.Errorf("%s has not, behind the lines before it: %s", program, line)
			continue
		}
		remaining = after
	}
	if added == 0 || added > maxLines {
		t.Errorf("the diff in %s adds %d lines, want 1 to %d", document, added, maxLines)
	}
}
