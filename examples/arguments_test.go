package examples

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Examples refuse unknown flags and words, and numbers without meaning. The error names the flag or the setting. To link
// a program takes longer than to run it, so those with such numbers stand for the others unless TUTTI_EXTENDED is set.
func TestWrongArguments(t *testing.T) {
	if testing.Short() {
		t.Skip("builds examples")
	}
	mains, err := filepath.Glob("*/main.go")
	require.NoError(t, err)
	require.NotEmpty(t, mains)
	if os.Getenv("TUTTI_EXTENDED") == "" {
		mains = slices.DeleteFunc(mains, func(file string) bool { return !counts(filepath.Dir(file)) })
	}
	dir := t.TempDir()
	// Debug information would take as long again.
	args := []string{"build", "-ldflags=-s -w", "-o", dir + string(filepath.Separator)}
	for _, file := range mains {
		args = append(args, "./"+filepath.Dir(file))
	}
	out, err := exec.Command("go", args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	says := maps.Clone(meaningless)
	for _, file := range mains {
		name := filepath.Base(filepath.Dir(file))
		says[name+" -nosuch"] = "nosuch"
		says[name+" stray"] = "stray"
	}
	for arguments, text := range says {
		words := strings.Fields(arguments)
		command, err := filepath.Glob(filepath.Join(dir, words[0]) + "*")
		require.NoError(t, err)
		require.NotEmpty(t, command)
		out, err := exec.Command(command[0], words[1:]...).CombinedOutput()
		assert.True(t, errors.As(err, new(*exec.ExitError)), "%s: %s", arguments, out)
		assert.Contains(t, string(out), text, arguments)
	}
}

// counts reports whether an example has flags that are meaningless numbers below.
func counts(name string) bool {
	for arguments := range meaningless {
		if strings.HasPrefix(arguments, name+" ") {
			return true
		}
	}
	return false
}

// meaningless maps commands with meaningless numbers to the errors of the programs.
var meaningless = map[string]string{
	"data-parallel -epochs -1":   "-epochs is -1",
	"data-parallel -epochs 0":    "-epochs is 0",
	"data-parallel -density 0":   "-density is 0",
	"data-parallel -density 1.5": "-density is 1.5",
	"data-parallel -density NaN": "-density is NaN",
	"data-parallel -clip NaN":    "-clip is NaN",
	"data-parallel -clip -1":     "-clip is -1",
	"data-parallel -ranks -1":    "-1 ranks",
	"gradients -steps 0":         "-steps is 0",
	"gradients -steps -1":        "-steps",
	"outer -every 0":             "-every is 0",
	"outer -every -3":            "-every is -3",
	"outer -density 7":           "Density is 7",
	"outer -density NaN":         "Density is NaN",
}

// TestNumbersAreChecked checks that programs compare each number that a flag sets. Exceptions are -ranks, which
// tutti.Run checks, and the flags listed last, which the library checks.
func TestNumbersAreChecked(t *testing.T) {
	byLibrary := []string{"ranks", "outer: density"}
	var mains []string
	for _, pattern := range []string{"*/main.go", "../delta/*/main.go", "../adapters/*/*/main.go", "../adapters/*/*/*/main.go"} {
		found, err := filepath.Glob(pattern)
		require.NoError(t, err)
		mains = append(mains, found...)
	}
	numbers := regexp.MustCompile(`flag\.(?:Int|Uint|Int64|Uint64|Float64|Duration)(?:Var)?\((?:&[\w.]+, )?"(\w+)"`)
	for _, file := range mains {
		if strings.Contains(filepath.ToSlash(file), "/cmd/") {
			continue // not an example
		}
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, found := range numbers.FindAllStringSubmatch(string(text), -1) {
			known := slices.Contains(byLibrary, found[1]) || slices.Contains(byLibrary, filepath.Base(filepath.Dir(file))+": "+found[1])
			assert.True(t, known || strings.Contains(string(text), `log.Fatalf("-`+found[1]+" is "), "%s: -%s", file, found[1])
		}
	}
}

// Programs check for stray words.
func TestStrayWords(t *testing.T) {
	var mains []string
	for _, pattern := range []string{"*/main.go", "../adapters/*/*/main.go", "../adapters/*/*/*/main.go", "../delta/*/main.go", "../lab/*/*/main.go"} {
		found, err := filepath.Glob(pattern)
		require.NoError(t, err)
		mains = append(mains, found...)
	}
	for _, file := range mains { // a copy of the examples alone has none
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		if strings.Contains(string(text), "flag.Parse()") {
			assert.Contains(t, string(text), "flag.NArg()", file)
		}
	}
}

// TestRun checks that programs begin with tutti.Run, or say in their package comment what they do instead.
func TestRun(t *testing.T) {
	var mains []string
	for _, pattern := range []string{"*/main.go", "../delta/*/main.go", "../adapters/*/*/main.go", "../adapters/*/*/*/main.go"} {
		found, err := filepath.Glob(pattern)
		require.NoError(t, err)
		mains = append(mains, found...)
	}
	for _, path := range mains {
		if regexp.MustCompile(`[/\\](cmd|generate)[/\\]`).MatchString(path) {
			continue // not an example
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments|parser.ImportsOnly)
		require.NoError(t, err)
		begins := slices.ContainsFunc(file.Imports, func(i *ast.ImportSpec) bool {
			return i.Path.Value == `"github.com/tutti-go/tutti"`
		})
		if !begins {
			assert.Contains(t, file.Doc.Text(), "tutti.Run", path)
		}
	}
}
