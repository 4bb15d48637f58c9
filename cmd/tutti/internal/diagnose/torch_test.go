package diagnose

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/record"
)

// python runs a program, or skips the test.
func python(t *testing.T, program string, args ...string) string {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("needs python3")
	}
	out, err := exec.Command(path, append([]string{"-c", program}, args...)...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

// Python reads what was written.
func TestPickle(t *testing.T) {
	for _, text := range []string{
		`null`, `true`, `[]`, `{}`, `"é\u0000\"x"`, `[0, 1, -1, 255, -256, 9223372036854775807, -9223372036854775808, 0.25, 1e300]`,
		`{"a": [{"b": null}, [false, [[]]]], "": "x"}`,
	} {
		var v any
		require.NoError(t, json.Unmarshal([]byte(text), &v))
		content, err := pickle(json.RawMessage(text))
		require.NoError(t, err)
		path := filepath.Join(t.TempDir(), "p")
		require.NoError(t, os.WriteFile(path, content, 0o600))
		assert.JSONEq(t, text, python(t, "import json, pickle, sys; print(json.dumps(pickle.load(open(sys.argv[1], 'rb'))))", path))
	}
}

func TestForTorch(t *testing.T) {
	entry := func(group string, seq uint64, completed int64) record.Entry {
		return record.Entry{ProcessGroup: [2]string{group, "tutti"}, CollectiveSeq: seq, Completed: completed, State: "scheduled", Tutti: &record.Call{Op: "allreduce"}}
	}
	left, message := entry("0", 9, 0), entry("0", 4, 0)
	left.Tutti.Left, message.P2P = true, true
	record := func(rank int, entries ...record.Entry) Record {
		return Record{Dump: &record.Dump{Version: record.Version, Entries: entries,
			Groups: map[string]record.Group{"0": {Name: "0", Ranks: "[]"}, "0/1.0": {Ranks: "[]"}},
			Tutti:  &record.Rank{Rank: rank, Size: 4, Comms: map[string]record.Member{"0": {}, "0/1.0": {}}}}}
	}
	got := forTorch([]Record{
		record(0, entry("0", 3, 7), entry("0/1.0", 1, 0), message, entry("0", 4, 8), left),
		record(3, entry("0", 4, 0), entry("0", 5, 0)),
	})
	assert.Equal(t, "[0, 1, 2, 3]", got[0].Groups["0"].Ranks, "ranks 1 and 2 have no dump")
	assert.Equal(t, "[0, 3]", got[1].Groups["0/1.0"].Ranks)
	require.Len(t, got[0].Entries, 2, "rank 3 has forgotten collective 3")
	assert.Equal(t, "0/1.0", got[0].Entries[0].ProcessGroup[0])
	assert.Equal(t, uint64(1), got[0].Entries[1].RecordID)
	require.Len(t, got[1].Entries, 2)
	assert.Equal(t, "completed", got[1].Entries[0].State, "it is on rank 0")
	assert.Equal(t, "scheduled", got[1].Entries[1].State)
}
