//go:build unix

package record_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/record"
)

func TestWritesOnASignal(t *testing.T) {
	dir := t.TempDir()
	r := record.New(noop.New(hosttest.NewRuntime(t)), 5, dir)
	r.NotifyOn(syscall.SIGUSR1)
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGUSR1))
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(dir, "tutti-record-0.json"))
		return err == nil
	}, time.Minute, time.Millisecond)
	require.NoError(t, r.Close())
}
