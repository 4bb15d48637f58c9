//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/jobtest"
)

// result is a line of `tutti train --json` without the times.
type result struct {
	Pattern  string  `json:"pattern"`
	Ranks    int     `json:"ranks"`
	Accuracy float64 `json:"accuracy"`
	Elements float64 `json:"sent_elements_per_rank_step"`
	Bytes    float64 `json:"sent_bytes_per_rank_step"`
	Ratio    float64 `json:"ratio_to_dense"`
}

// command makes a command with a time limit.
func command(t *testing.T, program string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = jobtest.Environment(t)
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// execute runs a program to its end.
func execute(t *testing.T, program string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	cmd := command(t, program, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// lines parses an object from each line.
func lines[T any](t *testing.T, text string) []T {
	t.Helper()
	var all []T
	for line := range strings.Lines(text) {
		var v T
		require.NoError(t, json.Unmarshal([]byte(line), &v), line)
		all = append(all, v)
	}
	return all
}

// Ranks that are processes of an MPI job do the same as ranks in one process.
func TestMPIJobs(t *testing.T) {
	t.Parallel()
	var launchers []string
	for _, name := range []string{"mpirun.openmpi", "mpirun.mpich"} {
		if path, err := exec.LookPath(name); err == nil {
			launchers = append(launchers, path)
		}
	}
	if len(launchers) == 0 {
		t.Skip("needs mpirun.openmpi or mpirun.mpich; install Debian's openmpi-bin or mpich")
	}
	tutti := build(t)
	train := []string{"train", "--epochs", "1", "--pattern", "dense,topkA,oktopk", "--json", "--out"}

	stdout, stderr, err := execute(t, tutti, append(train, t.TempDir(), "--ranks", "4")...)
	require.NoError(t, err, stderr)
	want := lines[result](t, stdout)
	require.Len(t, want, 3)

	// Without a launcher there is one rank, which is allowed but seldom intended.
	alone := []string{"bench", "allreduce", "--backend", "mpi", "--max", "8", "--rounds", "1"}
	_, stderr, err = execute(t, tutti, alone...)
	require.NoError(t, err, stderr)
	assert.Contains(t, stderr, "tutti: one rank, as no launcher started it; mpirun -n 4 tutti")
	_, stderr, err = execute(t, tutti, append(alone, "--ranks", "1")...)
	require.NoError(t, err, stderr)
	assert.NotContains(t, stderr, "one rank", "as asked for")
	_, stderr, err = execute(t, tutti, "bench", "allreduce", "--backend", "tcp", "--max", "8", "--rounds", "1")
	require.NoError(t, err, stderr)
	assert.Contains(t, stderr, "tutti: one rank, as no launcher started it; tutti launch -n 4 tutti")

	for _, mpirun := range launchers {
		t.Run(filepath.Base(mpirun), func(t *testing.T) {
			t.Parallel()
			stdout, stderr, err := execute(t, mpirun, append(append([]string{"-n", "4", tutti}, train...), t.TempDir(), "--backend", "mpi")...)
			require.NoError(t, err, stderr)
			assert.Equal(t, want, lines[result](t, stdout), "of rank 0 alone")

			stdout, stderr, err = execute(t, mpirun, "-n", "2", tutti, "bench", "allreduce", "--backend", "mpi", "--max", "8", "--rounds", "1", "--in-place", "--json")
			require.NoError(t, err, stderr)
			assert.Len(t, lines[map[string]any](t, stdout), 1, "of rank 0 alone")

			_, stderr, err = execute(t, mpirun, "-n", "1", tutti, "bench", "allreduce", "--backend", "mpi", "--max", "8", "--rounds", "1")
			require.NoError(t, err, stderr)
			assert.NotContains(t, stderr, "one rank", "as asked for")

			stdout, stderr, err = execute(t, mpirun, "-n", "2", tutti, "info", "--json")
			require.NoError(t, err, stderr)
			assert.Len(t, lines[map[string]any](t, stdout), 1, "of rank 0 alone")

			stdout, stderr, err = execute(t, mpirun, "-n", "2", tutti, "bench", "allreduce", "--backend", "mpi", "--ranks", "4")
			assert.Error(t, err)
			assert.NotContains(t, stdout, "# allreduce")
			assert.Contains(t, stdout+stderr, "--ranks 4 but mpirun started 2")

			// A rank that never reaches MPI_Init.
			const absent = `if [ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 1 ]; then exec sleep 600; fi
exec "$0" bench allreduce --backend mpi --timeout 1s`
			stdout, stderr, err = execute(t, mpirun, "-n", "2", "sh", "-c", absent, tutti)
			assert.Error(t, err)
			assert.Contains(t, stdout+stderr, "have not called MPI_Init: timed out: --timeout 1s")

			testTimeout(t, mpirun, tutti)

			// Rank 0 fails while the others wait for it, and the job ends.
			file := filepath.Join(t.TempDir(), "file")
			require.NoError(t, os.WriteFile(file, nil, 0o600))
			stdout, stderr, err = execute(t, mpirun, "-n", "2", tutti, "train", "--backend", "mpi", "--out", filepath.Join(file, "x"))
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit)
			assert.Contains(t, stdout+stderr, "cannot use --out")
		})
	}
}

// testTimeout stops a rank in the middle of a measurement. The other one aborts and names the timeout.
func testTimeout(t *testing.T, mpirun, tutti string) {
	pidFile := filepath.Join(t.TempDir(), "pid")
	const script = `if [ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 1 ]; then echo $$ > "$1"; fi
exec "$0" bench allreduce --backend mpi --timeout 5s --step 2 --rounds 50`
	cmd := command(t, mpirun, "-n", "2", "sh", "-c", script, tutti, pidFile)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	require.NoError(t, cmd.Start())
	out := bufio.NewReader(stdout)
	header, err := out.ReadString('\n')
	require.NoError(t, err)
	require.Contains(t, header, "# allreduce over 2 ranks", "the first size is measured, twenty are to follow, of a second each")

	text, err := os.ReadFile(pidFile)
	require.NoError(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	defer syscall.Kill(pid, syscall.SIGKILL) //nolint:errcheck // the launcher killed it
	_, err = io.Copy(io.Discard, out)
	require.NoError(t, err)
	require.ErrorAs(t, cmd.Wait(), new(*exec.ExitError))
	assert.Contains(t, stderr.String(), "timed out: --timeout 5s")
}
