//go:build unix

package inquiry

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/logtest"
)

// TestAnswer: a process that is asked writes where its ranks wait, and goes on; when the waits have ended, nothing.
func TestAnswer(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(env.Record, "100")
	t.Setenv(env.RecordDir, filepath.Join(dir, "records"))
	t.Setenv(env.Run, "a run")
	logged := logtest.Capture(t)
	end := Begin(Wait{Rank: 2, Size: 3, Text: func() string { return "in a round" }})
	inner := Begin(Wait{Rank: -1, Text: func() string { return "looking for the store" }})
	ask := func(lines int) {
		require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGUSR1))
		require.Eventually(t, func() bool { return len(logged.Lines("wrote where")) == lines }, time.Minute, time.Millisecond)
	}
	ask(1)
	read := func() (f dump.File) {
		text, err := os.ReadFile(filepath.Join(dir, "records", "tutti-record-2.json"))
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(text, &f))
		return f
	}
	f := read()
	assert.Equal(t, 2, f.Tutti.Rank)
	assert.Equal(t, 3, f.Tutti.Size)
	assert.Equal(t, "a run", f.Tutti.Job)
	require.Len(t, f.Tutti.Waiting, 2)
	assert.Contains(t, f.Tutti.Waiting[0], "in a round, for ")
	assert.Contains(t, f.Tutti.Waiting[1], "looking for the store, for ")
	inner()
	ask(2)
	assert.Len(t, read().Tutti.Waiting, 1)
	end()
	answer("again")
	assert.Len(t, logged.Lines("wrote where"), 2)
}

// TestEndWaitsForTheAnswer: the file of an answer that has begun is whole when the wait ends: the process may end then.
func TestEndWaitsForTheAnswer(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(env.RecordDir, dir)
	logtest.Capture(t)
	asked := make(chan struct{})
	release := make(chan struct{})
	end := Begin(Wait{Rank: 1, Size: 2, Text: func() string {
		close(asked)
		<-release
		return "in a round"
	}})
	go answer("a test")
	<-asked
	found := make(chan error, 1)
	go func() {
		end()
		_, err := os.Stat(dump.Path(dir, 1))
		found <- err
	}()
	runtime.Gosched()
	close(release)
	require.NoError(t, <-found)
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Len(t, files, 1)
}

// TestReserved: the record of a communicator is not replaced by a later wait's, which is logged.
func TestReserved(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(env.RecordDir, dir)
	logged := logtest.Capture(t)
	path := dump.Path(dir, 1)
	Reserve(path)
	require.NoError(t, os.WriteFile(path, []byte("of a communicator"), 0o600))
	end := Begin(Wait{Rank: 1, Size: 2, Text: func() string { return "in a round" }})
	defer end()
	answer("a test")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "of a communicator", string(text))
	assert.Len(t, logged.Lines("waits for a further communicator"), 1)
}

// TestNobodyAsks: without flight records, the signal does what it did before.
func TestNobodyAsks(t *testing.T) {
	t.Setenv(env.Record, "0")
	listened := waits.listens
	waits.listens = false
	defer func() { waits.listens = listened }()
	Begin(Wait{Rank: 0, Size: 1})()
	assert.False(t, waits.listens)
}
