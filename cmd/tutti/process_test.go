//go:build unix

package main

import (
	"bufio"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// build makes the command.
func build(t *testing.T) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "tutti")
	out, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return path
}

// A signal ends a measurement that would go on for hours, with the exit code
// that shells expect.
func TestSignalsEndTheCommand(t *testing.T) {
	tutti := build(t)
	for signal, want := range map[syscall.Signal]struct {
		text string
		code int
	}{
		syscall.SIGINT:  {"tutti: interrupted\n", 130},
		syscall.SIGTERM: {"tutti: terminated\n", 143},
	} {
		cmd := command(t, tutti, "bench", "allreduce", "--ranks", "2", "--max", "8", "--iters", "1000000000", "--rounds", "1")
		// The note that such a job gets on stderr says that it is about to begin.
		cmd.Env = append(cmd.Env, "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=0")
		stderr, err := cmd.StderrPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		lines := bufio.NewReader(stderr)
		note, err := lines.ReadString('\n')
		require.NoError(t, err)
		require.Contains(t, note, "started 2 processes")
		require.NoError(t, cmd.Process.Signal(signal))
		var rest strings.Builder
		_, err = lines.WriteTo(&rest)
		require.NoError(t, err)
		var exit *exec.ExitError
		require.ErrorAs(t, cmd.Wait(), &exit)
		assert.Equal(t, want.code, exit.ExitCode())
		assert.Equal(t, want.text, rest.String())
	}
}
