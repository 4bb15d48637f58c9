//go:build unix

package diagnose

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A pipe with the name of a record is not read.
func TestPipeIsNoRecord(t *testing.T) {
	dir := t.TempDir()
	record := filepath.Join(dir, "tutti-record-0.json")
	require.NoError(t, os.WriteFile(record, []byte(`{"version":"2.10","tutti":{"rank":0,"world_size":1}}`), 0o600))
	require.NoError(t, syscall.Mkfifo(filepath.Join(dir, "tutti-record-1.json"), 0o600))
	records, _, err := ReadFiles([]string{dir})
	require.NoError(t, err)
	require.Len(t, records, 1)
	assert.Equal(t, record, records[0].Name)
}
