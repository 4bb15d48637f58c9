//go:build unix

package record_test

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
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

// A dump that a signal has begun is whole when the Recorder is closed: the process may end then.
func TestCloseWaitsForTheDump(t *testing.T) {
	dir := t.TempDir()
	r := record.New(noop.New(hosttest.NewRuntime(t)), 5, dir)
	r.NotifyOn(syscall.SIGUSR1)
	release := r.HoldWrites()
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGUSR1))
	require.Eventually(t, func() bool {
		stacks := make([]byte, 1<<20)
		return strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), "(*Recorder).Save(")
	}, time.Minute, time.Millisecond)
	closed := make(chan error, 1)
	go func() { closed <- r.Close() }()
	release()
	require.NoError(t, <-closed)
	assert.FileExists(t, filepath.Join(dir, "tutti-record-0.json"))
}
