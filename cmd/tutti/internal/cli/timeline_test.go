package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/trace"
)

// TestTrainTimeline finds each step of each rank in the timeline of a training.
func TestTrainTimeline(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "timeline.json")
	code, out, stderr := execute(t, "train", "--pattern", "topkA", "--epochs", "1", "--batch", "400", "--ranks", "3",
		"--out", dir, "--trace", path)
	require.Equal(t, exitOK, code, stderr)
	assert.Contains(t, out, "timeline: "+path)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var f trace.File
	require.NoError(t, json.Unmarshal(text, &f))
	steps := map[int]int{}
	for _, e := range f.Events {
		if e.Phase == "X" && e.Name == "step" {
			steps[e.Process]++
		}
	}
	assert.Len(t, steps, 3)
	assert.Equal(t, steps[0], steps[2])
	assert.Positive(t, steps[0])
	require.Len(t, f.Other.Clocks, 3)

	code, _, stderr = execute(t, "train", "--elastic", "--pattern", "topkA", "--trace", path)
	assert.Equal(t, exitUsage, code)
	assert.Contains(t, stderr, "tutti diagnose --trace")
}
