package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// foreign are texts of the system and of other programs that readers search for as well.
var foreign = []string{
	"i/o timeout", "connection refused", "address already in use", "signal: killed", "out of memory",
	"There are not enough slots", "Duplicate GPU detected",
}

// sources returns the texts in the Go files of the library and of the command. A text on several lines is one.
func sources(t *testing.T) string {
	var all strings.Builder
	joint := regexp.MustCompile(`["` + "`" + `]\s*\+\s*["` + "`" + `]`)
	err := filepath.WalkDir("../..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		all.WriteString(joint.ReplaceAllString(string(text), ""))
		return err
	})
	require.NoError(t, err)
	return all.String()
}

// The texts in docs/troubleshooting.md equal the programs' texts, except for names and numbers.
func TestSymptomsAreTexts(t *testing.T) {
	page, err := os.ReadFile("../../docs/troubleshooting.md")
	require.NoError(t, err)
	code := sources(t)
	quote := regexp.MustCompile("`([^`]+)`")
	varying := regexp.MustCompile(`\branks? |\d+(\.\d+)*\w*|\b[A-Z]+\b|"[^"]*"|…|%\S+`)
	looked := 0
	for line := range strings.Lines(string(page)) {
		cell, isRow := strings.CutPrefix(line, "| ")
		if !isRow {
			continue
		}
		cell, _, _ = strings.Cut(cell, " | ") // the symptom; other cells are remedies
		for _, quoted := range quote.FindAllStringSubmatch(cell, -1) {
			if !strings.Contains(quoted[1], " ") || isForeign(quoted[1]) {
				continue // a name, or a text of another program
			}
			for _, piece := range varying.Split(quoted[1], -1) {
				piece = strings.Trim(piece, " ,;:()=|")
				if len(piece) < 8 {
					continue
				}
				looked++
				assert.True(t, strings.Contains(code, piece), "%q of %q: nothing says this", piece, quoted[1])
			}
		}
	}
	assert.Greater(t, looked, 20)
}

// isForeign reports whether another program writes a text.
func isForeign(text string) bool {
	for _, known := range foreign {
		if strings.Contains(text, known) {
			return true
		}
	}
	return false
}
