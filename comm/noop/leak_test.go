package noop_test

import (
	"bytes"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// buffer is what was logged.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer // guarded by mu
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// A communicator that nobody closes is found when it is garbage, if that loses something.
func TestForgottenClose(t *testing.T) {
	log := new(buffer)
	earlier := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(log, nil)))
	t.Cleanup(func() { slog.SetDefault(earlier) })
	rt := cpu.New()
	defer rt.Close()
	p, err := rt.Allocate(8)
	require.NoError(t, err)
	require.NoError(t, noop.New(rt).Barrier(t.Context())) // leaves nothing behind
	require.NoError(t, noop.New(rt).Send(p, 8, dtype.U8, 0, 0))
	require.Eventually(t, func() bool {
		runtime.GC()
		return strings.Contains(log.String(), "communicators were never closed")
	}, time.Minute, 10*time.Millisecond)
	assert.Equal(t, 1, strings.Count(log.String(), "never closed"), log.String())
	require.NoError(t, rt.Deallocate(p))
}
