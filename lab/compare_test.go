//go:build unix

package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestCompare sets the ranks against C under what is here: every subject is
// measured in both places, and ratios are those of the times.
func TestCompare(t *testing.T) {
	stdout, stderr, err := execute(t, "compare", "--min", "8", "--max", "8", "--runs", "2", "--json")
	require.NoError(t, err, stderr)
	type line struct {
		Bytes          int
		Place, Subject string
		Against        string
		Time           float64   `json:"time_us"`
		Runs           []float64 `json:"runs_us"`
		Best           float64   `json:"best_us"`
		Ratio          float64
	}
	wanted := []string{"floor", "local"}
	for _, name := range []string{"openmpi", "mpich"} {
		if !strings.Contains(stderr, name) { // left out, for a reason
			wanted = append(wanted, "c/"+name, "mpi/"+name)
		}
	}
	measured := map[string]line{}
	for _, l := range jsonLines[line](t, stdout) {
		require.Len(t, l.Runs, 2)
		assert.Equal(t, min(l.Runs[0], l.Runs[1]), l.Best)
		assert.InDelta(t, (l.Runs[0]+l.Runs[1])/2, l.Time, 1e-9)
		assert.Positive(t, l.Best)
		assert.Equal(t, 8, l.Bytes)
		measured[l.Subject+" "+l.Place] = l
	}
	for key, l := range measured {
		if l.Against != "" {
			assert.InDelta(t, l.Time/measured[l.Against+" "+l.Place].Time, l.Ratio, 1e-9, key)
		}
	}
	for _, subject := range wanted {
		assert.Contains(t, measured, subject+" out-of-place")
		assert.Contains(t, measured, subject+" in-place")
	}
	assert.Len(t, measured, 2*len(wanted))
}
