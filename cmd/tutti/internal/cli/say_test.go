package cli

import (
	"context"
	"io"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/cmd/tutti/internal/launch"
)

// stuckStream is a stream without a reader until it is released.
type stuckStream struct {
	written  func() // called at the start of a Write
	released chan struct{}

	mu     sync.Mutex
	writes []string // begun so far; guarded by mu
}

// Write implements [io.Writer].
func (s *stuckStream) Write(p []byte) (int, error) {
	s.mu.Lock()
	s.writes = append(s.writes, string(p))
	s.mu.Unlock()
	s.written()
	<-s.released
	return len(p), nil
}

// The last line of a job does not wait for a reader that the launcher has already waited for.
func TestTheLastLineDoesNotWaitAgain(t *testing.T) {
	t.Setenv("TUTTI_SECRET", "of this test, and long enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	stuck := &stuckStream{
		written:  func() { cancel(launch.Signaled(syscall.SIGTERM)) },
		released: make(chan struct{}),
	}
	defer close(stuck.released)
	args := []string{"launch", "--machines", "2", "--listen", "127.0.0.1:0", "train"}
	assert.Equal(t, 143, run(ctx, args, io.Discard, stuck))
	stuck.mu.Lock()
	defer stuck.mu.Unlock()
	assert.Len(t, stuck.writes, 1, "what the launcher says at first")
}
