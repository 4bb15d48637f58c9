package dl

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/windows"
)

// A library that lies in the current directory, or on the PATH, is opened by its
// path only.
func TestNamesAreLookedUpInTheSystemsDirectory(t *testing.T) {
	system, err := windows.GetSystemDirectory()
	require.NoError(t, err)
	image, err := os.ReadFile(filepath.Join(system, "msvcrt.dll"))
	require.NoError(t, err)
	dir, err := os.MkdirTemp("", "") // stays: the library cannot be closed
	require.NoError(t, err)
	const name = "tutti-planted.dll"
	require.NoError(t, os.WriteFile(filepath.Join(dir, name), image, 0o600))
	t.Setenv("PATH", dir)
	t.Chdir(dir)
	_, err = Open(name)
	assert.Error(t, err)
	for _, path := range []string{filepath.Join(dir, name), `.\` + name} {
		lib, err := Open(path)
		require.NoError(t, err)
		_, found := lib.Lookup("abs")
		assert.True(t, found)
	}
}
