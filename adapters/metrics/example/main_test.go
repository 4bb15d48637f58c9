package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestRun checks that members join, that one is lost, and that the picture is drawn.
func TestRun(t *testing.T) {
	*listen, *length, *picture = "localhost:0", 4*time.Second, filepath.Join(t.TempDir(), "dashboard.png")
	require.NoError(t, run(t.Context()))
	data, err := os.ReadFile(*picture)
	require.NoError(t, err)
	assert.Greater(t, len(data), 10000)
}
