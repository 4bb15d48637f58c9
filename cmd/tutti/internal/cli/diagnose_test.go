package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/dtype"
)

// TestDiagnose reads the dumps of two ranks, one of which has made no calls.
func TestDiagnose(t *testing.T) {
	dir := t.TempDir()
	comms, err := local.New(2)
	require.NoError(t, err)
	for rank, c := range comms {
		r := record.New(c, 10, "")
		if rank == 1 {
			require.NoError(t, r.Broadcast(0, 0, dtype.F32, 0))
		}
		f, err := os.Create(filepath.Join(dir, "tutti-record-"+string(rune('0'+rank))+".json"))
		require.NoError(t, err)
		require.NoError(t, r.WriteJSON(f))
		require.NoError(t, f.Close())
	}
	for _, c := range comms {
		_ = c.Close() // the broadcast is still in flight
	}
	code, out, stderr := execute(t, "diagnose", dir)
	require.Equal(t, exitOK, code, stderr)
	assert.Contains(t, out, "rank 0 has not called broadcast #1 (0 B f32, root 0, diagnose_test.go:")
	assert.Contains(t, out, "it has called none; rank 1 waits\n")
	code, out, _ = execute(t, "diagnose", "--json", dir)
	require.Equal(t, exitOK, code)
	report := jsonLines(t, out)[0]
	assert.Equal(t, "not_called", report["findings"].([]any)[0].(map[string]any)["kind"])

	timeline := filepath.Join(t.TempDir(), "timeline.json")
	code, out, stderr = execute(t, "diagnose", "--trace", timeline, dir)
	require.Equal(t, exitOK, code, stderr)
	assert.Contains(t, out, "timeline: "+timeline+" (open it in https://ui.perfetto.dev)\n"+
		"  clock of rank 1: not moved: nothing compares its clock with the others'\n")
	text, err := os.ReadFile(timeline)
	require.NoError(t, err)
	assert.Contains(t, string(text), `"name":"broadcast","cat":"collective","ph":"X"`)
	code, _, stderr = execute(t, "diagnose", "--trace", filepath.Join(dir, "no", "t.json"), dir)
	assert.Equal(t, exitFailure, code)
	assert.Contains(t, stderr, "no such file or directory")

	// Without findings, the output does not say that there were no errors.
	dir2 := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir2, "tutti-record-0.json"), []byte(`{"version":"2.10","tutti":{"rank":0,"world_size":1,
		"communicators":{"0":{"rank":0,"size":1,"failure":{"error":"rank 1 aborted","wait":true,"peer":true}}}}}`), 0o600))
	code, out, stderr = execute(t, "diagnose", dir2)
	require.Equal(t, exitOK, code, stderr)
	assert.Contains(t, out, "the errors below have another cause")
	assert.NotContains(t, out, "nothing waits")

	code, _, stderr = execute(t, "diagnose", filepath.Join(dir, "none"))
	assert.Equal(t, exitFailure, code)
	assert.Contains(t, stderr, "none")
	t.Chdir(dir2)
	code, out, stderr = execute(t, "diagnose")
	require.Equal(t, exitOK, code, stderr)
	assert.Contains(t, out, "the errors below have another cause")
	t.Chdir(t.TempDir())
	code, _, stderr = execute(t, "diagnose")
	assert.Equal(t, exitFailure, code)
	assert.Contains(t, stderr, "has no file tutti-record-*.json")
	assert.Contains(t, strings.Join(strings.Fields(stderr), " "), "TUTTI_RECORD=1000 and send its launcher SIGUSR1")
}
