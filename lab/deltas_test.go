package main

import (
	"encoding/csv"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// fakeDeltas stands in for programs that write deltas: with the number of bytes given there, or the length of the
// file's header.
const (
	fakeDelta = `#!/bin/sh
case "$2" in
stat) echo '{"weights":4,"changed":2,"bytes":9}' ;;
*) for out; do :; done; printf 123456789 > "$out" ;;
esac
`
	fakeDiff = `#!/bin/sh
for out; do :; done
printf 123456789012345678 > "$out"
`
)

// TestDeltas compares files with the one before, and the last one with its variants, which must be complete.
func TestDeltas(t *testing.T) {
	dir := t.TempDir()
	put := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o700))
		return path
	}
	tutti := put("tutti", fakeDelta)
	for _, name := range []string{"zstd", "xdelta3", "bsdiff"} {
		put(name, fakeDiff)
	}
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
	header := `{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}}`
	file := string(rune(len(header))) + "\x00\x00\x00\x00\x00\x00\x00" + header + "aaab"
	first := put("first", file)
	second := put("second", file)
	out, _, err := execute(t, "deltas", "--tutti", tutti, first, second)
	require.NoError(t, err)
	lines, err := csv.NewReader(strings.NewReader(out)).ReadAll()
	require.NoError(t, err)
	require.Equal(t, [][]string{
		{"old", "new", "weights", "changed", "tutti", "zstd", "xdelta3", "bsdiff", "of the best other"},
		{"first", "second", "4", "2", "9", "18", "18", "18", "0.50"},
		{"second", "other order", "4", "2", "9", "18", "18", "18", "0.50"},
		{"second", "other metadata", "4", "2", "9", "18", "18", "18", "0.50"},
	}, lines)
	_, _, err = execute(t, "deltas", "--tutti", tutti, put("text", "no checkpoint"))
	require.ErrorContains(t, err, "not a safetensors file")
	require.True(t, json.Valid([]byte(header)))
}
