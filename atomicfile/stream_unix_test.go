//go:build unix

package atomicfile_test

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/atomicfile"
)

// TestMain is also a program that writes to a path, and says what went wrong.
func TestMain(m *testing.M) {
	path := os.Getenv("TUTTI_TEST_PATH")
	if path == "" {
		os.Exit(m.Run())
	}
	syscall.Umask(0o077)
	if err := atomicfile.Write(path, text("written\n")); err != nil {
		os.Stderr.WriteString(err.Error())
		os.Exit(1)
	}
}

// program is a process that writes to a path.
func program(t *testing.T, path string) *exec.Cmd {
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "TUTTI_TEST_PATH="+path)
	return cmd
}

// TestDescriptors: a path that means a descriptor goes on where the descriptor is.
func TestDescriptors(t *testing.T) {
	const self, thread = "/proc/self/fd/1", "/proc/thread-self/fd/1"
	for _, name := range []string{"/dev/stdout", "/dev/fd/1", self, thread, "/dev/fd/3", "link"} {
		if strings.HasPrefix(name, "/proc") && !exists("/proc/self/fd") {
			continue
		}
		dir := t.TempDir()
		path := name
		if name == "link" {
			path = filepath.Join(dir, "link")
			require.NoError(t, os.Symlink("/dev/stdout", path))
		}
		for _, flag := range []int{os.O_APPEND, 0} {
			log := create(t, dir, "log", "before\n", 0o644)
			f, err := os.OpenFile(log, os.O_WRONLY|flag, 0)
			require.NoError(t, err)
			_, err = f.Seek(0, io.SeekEnd)
			require.NoError(t, err)
			cmd := program(t, path)
			cmd.Stdout, cmd.ExtraFiles = f, []*os.File{f}
			out := new(strings.Builder)
			cmd.Stderr = out
			require.NoError(t, cmd.Run(), "%s: %s", name, out)
			_, err = f.WriteString("after\n")
			require.NoError(t, err)
			require.NoError(t, f.Close())
			assert.Equal(t, "before\nwritten\nafter\n", content(t, log), "%s %d", name, flag)
		}
		require.ErrorContains(t, atomicfile.Replace(path, func(*os.File) error { return nil }), "not a regular file")
	}
	out, err := program(t, "/dev/stdout").Output() // a pipe
	require.NoError(t, err)
	assert.Equal(t, "written\n", string(out))
	require.ErrorContains(t, atomicfile.Write("/dev/fd/99999", text("")), "bad file descriptor")
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// TestUmask: a file that is made has the permissions that the umask leaves.
func TestUmask(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	out, err := program(t, path).CombinedOutput()
	require.NoError(t, err, string(out))
	info, err := os.Stat(path)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode())
}

// TestPipes: a named pipe and a device are written as they are.
func TestPipes(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o666))
	link(t, "pipe", filepath.Join(dir, "link"))
	for _, path := range []string{pipe, filepath.Join(dir, "link")} {
		var reading sync.WaitGroup
		reading.Go(func() { assert.Equal(t, "through", content(t, pipe)) })
		require.NoError(t, atomicfile.Write(path, text("through")))
		reading.Wait()
		require.ErrorContains(t, atomicfile.Replace(path, func(*os.File) error { return nil }), "not a regular file")
	}
	assert.Equal(t, []string{"link", "pipe"}, names(t, dir))
	require.NoError(t, atomicfile.Write(os.DevNull, text("nowhere")))
	info, err := os.Stat(os.DevNull)
	require.NoError(t, err)
	assert.Equal(t, os.ModeDevice|os.ModeCharDevice, info.Mode().Type())
	if exists("/dev/full") {
		require.ErrorIs(t, atomicfile.Write("/dev/full", text("x")), syscall.ENOSPC)
	}
}
