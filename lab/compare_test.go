//go:build unix

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/lab/compare"
)

// TestCompare compares the ranks with C under the MPI libraries that are installed. It checks that every subject is
// measured in both places, and that ratios match the times.
func TestCompare(t *testing.T) {
	stdout, stderr, err := execute(t, "compare", "--ranks", "2", "--min", "8", "--max", "8", "--runs", "2", "--json")
	require.NoError(t, err, stderr)
	first, stdout, _ := strings.Cut(stdout, "\n")
	var ran compare.Provenance
	require.NoError(t, json.Unmarshal([]byte(first), &ran))
	assert.Equal(t, 2, ran.Runs)
	assert.Equal(t, runtime.NumCPU(), ran.Online)
	assert.Contains(t, ran.String(), "tutti devel, go")
	type line struct {
		Bytes          int
		Place, Subject string
		Ranks          int
		Against        string
		Time           float64   `json:"time_us"`
		Runs           []float64 `json:"runs_us"`
		Best           float64   `json:"best_us"`
		Ratio          float64
	}
	wanted := []string{"floor", "local", "tcp", "shared"}
	canBind := runtime.GOOS == "linux" && runtime.NumCPU() >= 2
	if canBind {
		wanted = append(wanted, "shared/bound")
	}
	for _, name := range []string{"openmpi", "mpich"} {
		if !strings.Contains(stderr, name) { // left out, with a reason
			wanted = append(wanted, "c/"+name, "mpi/"+name)
			if canBind && name == "openmpi" {
				wanted = append(wanted, "mpi/openmpi/bound")
			}
		}
	}
	measured := map[string]line{}
	key := func(subject, place string, ranks int) string { return fmt.Sprint(subject, " ", place, " ", ranks) }
	for _, l := range jsonLines[line](t, stdout) {
		require.Len(t, l.Runs, 2)
		assert.Equal(t, min(l.Runs[0], l.Runs[1]), l.Best)
		assert.InDelta(t, (l.Runs[0]+l.Runs[1])/2, l.Time, 1e-9)
		assert.Positive(t, l.Best)
		assert.Equal(t, 8, l.Bytes)
		measured[key(l.Subject, l.Place, l.Ranks)] = l
	}
	for name, l := range measured {
		if l.Against != "" {
			assert.InDelta(t, l.Time/measured[key(l.Against, l.Place, l.Ranks)].Time, l.Ratio, 1e-9, name)
		}
	}
	for _, subject := range wanted {
		assert.Contains(t, measured, key(subject, "out-of-place", 2))
		assert.Contains(t, measured, key(subject, "in-place", 2))
	}
	gloo := 0
	if !strings.Contains(stderr, "PyTorch") {
		gloo = 1 // only in place
	}
	assert.Len(t, measured, 2*len(wanted)+gloo)
}

// TestCompareLeavesOutWhatFails checks that local is measured although ranks over TCP fail. PyTorch is there.
func TestCompareLeavesOutWhatFails(t *testing.T) {
	dir := t.TempDir()
	cfg := compare.Config{
		Ranks: []int{2, 3}, Low: 8, High: 8, Step: 2, Runs: 3,
		Tutti: filepath.Join(dir, "tutti"), Python: filepath.Join(dir, "python"),
	}
	require.NoError(t, os.WriteFile(cfg.Tutti, []byte(`#!/bin/sh
case "$*" in
*mpi* | *--bind*) exit 1 ;;
*tcp*) [ -z "$TUTTI_TCP_SHARED" ] || { echo broken >&2; exit 1; }
	echo '{"bytes":8,"place":"in-place","time_us":10}' ;;
*) echo '{"bytes":8,"place":"in-place","time_us":1}' ;;
esac
`), 0o700))
	require.NoError(t, os.WriteFile(cfg.Python, []byte(`#!/bin/sh
case "$*" in
*"import torch"*) echo PyTorch 2.x ;;
*"gloo.py 3 [8]") echo '{"bytes":8,"place":"in-place","time_us":40}' ;;
*) exit 1 ;;
esac
`), 0o700))
	t.Setenv("PATH", dir) // no MPI
	results, missing, err := compare.Run(t.Context(), cfg)
	require.NoError(t, err)
	assert.ErrorContains(t, errors.Join(missing...), "tcp, 3 ranks")
	assert.ErrorContains(t, errors.Join(missing...), "broken")
	times := map[string]float64{}
	for _, r := range results {
		if r.Place == "in-place" && r.Ranks == 3 {
			times[r.Subject] = r.Time
		}
	}
	assert.InDelta(t, 1, times["local"], 0)
	assert.InDelta(t, 10, times["shared"], 0)
	assert.InDelta(t, 40, times["gloo"], 0)
	assert.Len(t, results, 9, "of each number of ranks the floor in both places, local and shared; and gloo of 3")
	assert.NotContains(t, times, "tcp")
}
