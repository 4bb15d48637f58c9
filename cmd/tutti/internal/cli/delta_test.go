package cli

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestDelta makes a delta of two files, applies it, and counts changes.
func TestDelta(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	const header = `{"w":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}`
	content := append([]byte{byte(len(header)), 0, 0, 0, 0, 0, 0, 0}, header+"\x01\x3f\x02\x3f\x03\x3f\x04\x3f"...)
	require.NoError(t, os.WriteFile(path("old"), content, 0o666))
	content[len(content)-2]++
	require.NoError(t, os.WriteFile(path("new"), content, 0o666))

	code, out, stderr := execute(t, "delta", "diff", path("old"), path("new"), "-o", path("d"))
	require.Equal(t, exitOK, code, stderr)
	assert.Contains(t, stderr, "1 of 4 weights changed (25 %)")
	assert.Empty(t, out, "which may be where the delta goes")
	code, _, stderr = execute(t, "delta", "apply", path("old"), path("d"), "-o", path("again"))
	require.Equal(t, exitOK, code, stderr)
	got, err := os.ReadFile(path("again"))
	require.NoError(t, err)
	assert.Equal(t, content, got)
	code, out, stderr = execute(t, "delta", "stat", path("d"), "--json")
	require.Equal(t, exitOK, code, stderr)
	info, err := os.Stat(path("d"))
	require.NoError(t, err)
	assert.Equal(t, map[string]any{"weights": 4.0, "changed": 1.0, "bytes": float64(info.Size())}, jsonLines(t, out)[0])

	code, _, stderr = execute(t, "delta", "export", path("old"), path("d"), "-o", path("weight_v000003"), "--checksum", "adler32")
	require.Equal(t, exitOK, code, stderr)
	index, err := os.ReadFile(path("weight_v000003/model.safetensors.index.json"))
	require.NoError(t, err)
	assert.Contains(t, string(index), `"version":"000003","base_version":"000002","delta_encoding":"xor"`)
	assert.Contains(t, string(index), `"checksum_format":"adler32"`)
	code, _, stderr = execute(t, "delta", "import", path("old"), path("weight_v000003"), "-o", path("imported"))
	require.Equal(t, exitOK, code, stderr)
	code, _, stderr = execute(t, "delta", "apply", path("old"), path("imported"), "-o", path("again"))
	require.Equal(t, exitOK, code, stderr)
	got, err = os.ReadFile(path("again"))
	require.NoError(t, err)
	assert.Equal(t, content, got)

	whole, err := os.ReadFile(path("d"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path("cut"), whole[:len(whole)-3], 0o666))
	require.NoError(t, os.WriteFile(path("empty"), nil, 0o666))
	for _, c := range []struct {
		text string
		code int
		args []string
	}{
		{"which file is the old one", exitUsage, []string{"diff", path("old"), "-o", path("x")}},
		{"-o is missing", exitUsage, []string{"apply", path("old"), path("d")}},
		{"which delta?", exitUsage, []string{"stat"}},
		{"the folder or URL of the delta?", exitUsage, []string{"import", path("old")}},
		{"does not name a version", exitFailure, []string{"export", path("old"), path("d"), "-o", path("x")}},
		{"the delta makes one file: name it, such as", exitFailure, []string{"apply", path("old"), path("d"), "-o", path("x") + string(filepath.Separator)}},
		{"the delta makes one file: name it, such as", exitFailure, []string{"apply", path("old"), path("d"), "-o", filepath.Dir(path("x"))}},
		{"for another base", exitFailure, []string{"import", path("new"), path("weight_v000003"), "-o", path("x")}},
		{"unknown command", exitUsage, []string{"patch"}},
		{"again is not the file that", exitFailure, []string{"apply", path("again"), path("d"), "-o", path("x")}},
		{"cut: invalid delta: it ends before its length", exitFailure, []string{"stat", path("cut")}},
		{"empty: invalid delta: it ends before its length", exitFailure, []string{"apply", path("old"), path("empty"), "-o", path("x")}},
		{"no such file", exitFailure, []string{"stat", path("none")}},
		{"new is both read and written", exitFailure, []string{"diff", path("old"), path("new"), "-o", path("new")}},
		{"d is both read and written", exitFailure, []string{"apply", path("old"), path("d"), "-o", path("d")}},
		{"not a safetensors file", exitFailure, []string{"diff", path("old"), path("d"), "-o", path("x")}},
	} {
		code, _, stderr := execute(t, append([]string{"delta"}, c.args...)...)
		assert.Equal(t, c.code, code, c.args)
		assert.Contains(t, stderr, c.text)
		assert.NoFileExists(t, path("x"))
	}
}
