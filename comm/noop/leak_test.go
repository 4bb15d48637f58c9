package noop_test

import (
	"bytes"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/noop"
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

// A communicator that nobody closes is found when it is garbage.
func TestForgottenClose(t *testing.T) {
	log := new(buffer)
	earlier := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(log, nil)))
	t.Cleanup(func() { slog.SetDefault(earlier) })
	rt := cpu.New()
	defer rt.Close()
	require.NoError(t, noop.New(rt).Barrier(t.Context()))
	require.Eventually(t, func() bool {
		runtime.GC()
		return strings.Contains(log.String(), "communicator was never closed")
	}, 20*time.Second, 10*time.Millisecond)
}
