package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// result is a line of `tutti train --json`, without the times.
type result struct {
	Pattern  string  `json:"pattern"`
	Ranks    int     `json:"ranks"`
	Accuracy float64 `json:"accuracy"`
	Elements float64 `json:"sent_elements_per_rank_step"`
	Bytes    float64 `json:"sent_bytes_per_rank_step"`
	Ratio    float64 `json:"ratio_to_dense"`
}

// execute runs a program for a bounded time.
func execute(t *testing.T, program string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	// Open MPI refuses root and more processes than processors unless told.
	cmd.Env = append(os.Environ(), "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
		"OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_MCA_mpi_yield_when_idle=1")
	cmd.WaitDelay = 5 * time.Second
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// lines reads an object from each line.
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

// Ranks that are processes of an MPI job do what ranks in one process do.
func TestMPIJobs(t *testing.T) {
	var launchers []string
	for _, name := range []string{"mpirun.openmpi", "mpirun.mpich"} {
		if path, err := exec.LookPath(name); err == nil {
			launchers = append(launchers, path)
		}
	}
	if len(launchers) == 0 {
		t.Skip("needs mpirun.openmpi or mpirun.mpich; install Debian's openmpi-bin or mpich")
	}
	tutti := filepath.Join(t.TempDir(), "tutti")
	out, err := exec.Command("go", "build", "-o", tutti, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	train := []string{"train", "--epochs", "2", "--pattern", "dense,topkA,oktopk", "--json", "--out"}

	stdout, stderr, err := execute(t, tutti, append(train, t.TempDir(), "--ranks", "4")...)
	require.NoError(t, err, stderr)
	want := lines[result](t, stdout)
	require.Len(t, want, 3)

	for _, mpirun := range launchers {
		t.Run(filepath.Base(mpirun), func(t *testing.T) {
			stdout, stderr, err := execute(t, mpirun, append(append([]string{"-n", "4", tutti}, train...), t.TempDir(), "--backend", "mpi")...)
			require.NoError(t, err, stderr)
			assert.Equal(t, want, lines[result](t, stdout), "of rank 0 alone")

			stdout, stderr, err = execute(t, mpirun, "-n", "2", tutti, "bench", "allreduce", "--backend", "mpi", "--max", "8", "--rounds", "1", "--json")
			require.NoError(t, err, stderr)
			assert.Len(t, lines[map[string]any](t, stdout), 1, "of rank 0 alone")

			stdout, stderr, err = execute(t, mpirun, "-n", "2", tutti, "info", "--json")
			require.NoError(t, err, stderr)
			assert.Len(t, lines[map[string]any](t, stdout), 1, "of rank 0 alone")

			stdout, stderr, err = execute(t, mpirun, "-n", "2", tutti, "bench", "allreduce", "--backend", "mpi", "--ranks", "4")
			assert.Error(t, err)
			assert.NotContains(t, stdout, "# allreduce")
			assert.Contains(t, stdout+stderr, "--ranks 4 but mpirun started 2")

			// Rank 0 fails while the others wait for it: the job ends.
			file := filepath.Join(t.TempDir(), "file")
			require.NoError(t, os.WriteFile(file, nil, 0o600))
			stdout, stderr, err = execute(t, mpirun, "-n", "2", tutti, "train", "--backend", "mpi", "--out", filepath.Join(file, "x"))
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit)
			assert.Contains(t, stdout+stderr, "cannot use --out")
		})
	}
}
