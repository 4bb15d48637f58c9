package figure

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/picture"
	"github.com/tutti-go/tutti/cmd/tutti/internal/trace"
)

// TestTrace draws the part between two times, with a lane for each track of each rank.
func TestTrace(t *testing.T) {
	const text = `{"displayTimeUnit": "ms", "otherData": {"clocks": []}, "traceEvents": [
		{"name": "thread_name", "ph": "M", "ts": 0, "pid": 0, "tid": 0, "args": {"name": "step"}},
		{"name": "step", "cat": "program", "ph": "X", "ts": 1000, "dur": 4000, "pid": 0, "tid": 0},
		{"name": "thread_name", "ph": "M", "ts": 0, "pid": 1, "tid": 0, "args": {"name": "sync"}},
		{"name": "sync", "cat": "wait", "ph": "X", "ts": 3000, "dur": 1000, "pid": 1, "tid": 0},
		{"name": "thread_name", "ph": "M", "ts": 0, "pid": 1, "tid": 1, "args": {"name": "world"}},
		{"name": "allreduce", "cat": "collective", "ph": "X", "ts": 9000, "dur": 500, "pid": 1, "tid": 1}]}`
	file := new(trace.File)
	require.NoError(t, json.Unmarshal([]byte(text), file))
	path := filepath.Join(t.TempDir(), "trace.svg")
	require.NoError(t, Trace(file, 2, 6, "a title", path))
	svg, err := os.ReadFile(path)
	require.NoError(t, err)
	for _, drawn := range []string{"a title", "rank 0: step", "rank 1: sync", ">world<", "the program&#39;s spans", ">waits<", "time (ms)"} {
		assert.Contains(t, string(svg), drawn)
	}
	assert.NotContains(t, string(svg), "collectives", "they are later")
	assert.ErrorIs(t, Trace(file, 6, 8, "", path), picture.ErrNothingToDraw)
}
