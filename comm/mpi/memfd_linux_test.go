package mpi

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/memfd"
)

// TestSharedMemory maps memory twice, and refuses what is not that memory.
func TestSharedMemory(t *testing.T) {
	fd, a, err := createShared("tutti-test", 4096)
	require.NoError(t, err)
	b, err := openShared(os.Getpid(), fd, "tutti-test", 4096)
	require.NoError(t, err)
	a[17] = 42
	assert.Equal(t, byte(42), b[17])

	_, err = openShared(os.Getpid(), fd, "tutti-other", 4096)
	assert.ErrorContains(t, err, "memfd:tutti-test", "another job's memory")
	r, w, err := os.Pipe()
	require.NoError(t, err)
	_, err = openShared(os.Getpid(), int(r.Fd()), "tutti-test", 4096)
	assert.ErrorContains(t, err, "pipe", "what another host's process has under that number")
	require.NoError(t, r.Close())
	require.NoError(t, w.Close())

	memfd.Close(fd)
	_, err = openShared(os.Getpid(), fd, "tutti-test", 4096)
	assert.Error(t, err, "nobody finds it any more")
	a[18] = 43
	assert.Equal(t, byte(43), b[18], "and those that have it keep it")
	memfd.Unmap(a)
	memfd.Unmap(b)
}

// TestOtherNamespace refuses memory of a process that is not meant to share any.
func TestOtherNamespace(t *testing.T) {
	other := exec.CommandContext(t.Context(), "unshare", "--ipc", "cat")
	in, err := other.StdinPipe()
	require.NoError(t, err)
	out, err := other.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, other.Start())
	_, _ = in.Write([]byte("."))
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Skip("needs the right to make namespaces")
	}
	_, err = openShared(other.Process.Pid, 0, "tutti-test", 4096)
	assert.ErrorContains(t, err, "another IPC namespace")
	require.NoError(t, in.Close())
	require.NoError(t, other.Wait())
}
