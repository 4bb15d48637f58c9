package checkpoint

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFolder makes folders where there is nothing or an empty one, and leaves nothing behind after an error, nor
// touches what is there.
func TestFolder(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	fill := func(root *os.Root) error { return root.WriteFile("f", []byte("content"), 0o666) }
	require.NoError(t, os.Mkdir(path("empty"), 0o777))
	for _, name := range []string{"absent", "empty", "trailing/"} {
		require.NoError(t, writeFolder(path(name), fill))
		got, err := os.ReadFile(filepath.Join(path(name), "f"))
		require.NoError(t, err)
		require.Equal(t, "content", string(got))
	}
	require.ErrorIs(t, writeFolder(path("absent"), fill), fs.ErrExist)
	require.ErrorContains(t, writeFolder(path("absent/f"), fill), "is not a folder")
	require.ErrorIs(t, writeFolder(path("none/within"), fill), fs.ErrNotExist)
	failed := errors.New("failed")
	require.ErrorIs(t, writeFolder(path("fails"), func(root *os.Root) error {
		return errors.Join(fill(root), failed)
	}), failed)
	require.Panics(t, func() { _ = writeFolder(path("panics"), func(*os.Root) error { panic("filling") }) })
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 3, "absent, empty and trailing")
}
