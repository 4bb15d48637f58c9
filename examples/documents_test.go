package examples

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestDocuments finds each Go block of the documents in a compiled file: an example, or the test of one. A line of
// dots stands for omitted lines. Pages that a document links to exist, and so do the examples that it names there.
func TestDocuments(t *testing.T) {
	if _, err := os.Stat("../README.md"); err != nil {
		t.Skip("the examples were copied out of the repository")
	}
	compiled := map[string][]string{}
	err := filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".go" {
			return err
		}
		if strings.HasPrefix(path, "../examples/") || strings.HasPrefix(path, "../delta/example/") || entry.Name() == "example_test.go" {
			text, err := os.ReadFile(path)
			compiled[path] = lines(string(text))
			return err
		}
		return nil
	})
	require.NoError(t, err)

	documents, err := filepath.Glob("../docs/*.md")
	require.NoError(t, err)
	block := regexp.MustCompile("(?ms)^ *```go\n(.*?)^ *```")
	link := regexp.MustCompile("\\[`?([^]`]*)`?\\]\\(([^)#:]+)(#[^)]*)?\\)")
	for _, document := range append(documents, "../README.md", "../CONTRIBUTING.md") {
		text, err := os.ReadFile(document)
		require.NoError(t, err)
		for _, match := range block.FindAllStringSubmatch(string(text), -1) {
			found := false
			for _, file := range compiled {
				found = found || contains(file, lines(match[1]))
			}
			assert.True(t, found, "no example has this block of %s:\n%s", document, match[1])
		}
		for _, match := range link.FindAllStringSubmatch(block.ReplaceAllString(string(text), ""), -1) {
			at := filepath.Join(filepath.Dir(document), match[2])
			assert.True(t, exists(at), "%s links to %s", document, at)
			if strings.HasPrefix(match[1], "Example") {
				assert.Contains(t, compiled[at], "func "+match[1]+"() {", "%s names an example", document)
			}
		}
	}
}

// TestAdapters checks that the number of lines that an adapter takes equals the number that its page adds, and that
// the program has those lines.
func TestAdapters(t *testing.T) {
	page, err := os.ReadFile("../docs/adapters.md")
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("the examples were copied out of the repository")
	}
	require.NoError(t, err)
	row := regexp.MustCompile(`(?m)^\| .* \| \[[^]]*\]\(([^)]*)\) \| \[[^]]*\]\(([^)]*)\) \| (\d+) \|$`)
	rows := row.FindAllStringSubmatch(string(page), -1)
	require.NotEmpty(t, rows)
	block := regexp.MustCompile("(?ms)^```(diff|go)\n(.*?)^```")
	for _, match := range rows {
		adapter := filepath.Join("../docs", match[1])
		program, err := os.ReadFile(filepath.Join("../docs", match[2]))
		require.NoError(t, err)
		readme, err := os.ReadFile(filepath.Join(adapter, "README.md"))
		require.NoError(t, err)
		var counts []string
		for _, piece := range block.FindAllStringSubmatch(string(readme), -1) {
			added := lines(piece[2])
			if piece[1] == "diff" {
				added = slices.DeleteFunc(added, func(line string) bool { return line[0] != '+' })
			}
			known := true
			for _, line := range added {
				known = known && strings.Contains(string(program), strings.TrimSpace(strings.TrimPrefix(line, "+"))+"\n")
			}
			if known {
				counts = append(counts, fmt.Sprint(len(added)))
			}
		}
		assert.Contains(t, counts, match[3], "%s: the pieces of its page that %s has", match[1], match[2])
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// lines returns the nonblank lines of a text without indentation.
func lines(text string) []string {
	var all []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			all = append(all, line)
		}
	}
	return all
}

// contains reports whether a file contains the pieces of a block in order.
func contains(file, block []string) bool {
	for len(block) > 0 {
		n := slices.IndexFunc(block, func(line string) bool { return line == "…" || line == "..." })
		piece, rest := block, []string(nil)
		if n >= 0 {
			piece, rest = block[:n], block[n+1:]
		}
		at := 0
		for ; at+len(piece) <= len(file) && !slices.Equal(file[at:at+len(piece)], piece); at++ {
		}
		if at+len(piece) > len(file) {
			return false
		}
		file, block = file[at+len(piece):], rest
	}
	return true
}
