package store

import (
	"crypto/tls"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A store that is closed says goodbye to all at once, and without its lock: one side may take nothing.
func TestCloseWithoutLock(t *testing.T) {
	s := NewServer(Options{})
	begun := make(chan struct{}, 2)
	goOn := make(chan struct{})
	for range 2 {
		near, far := net.Pipe()
		defer near.Close() //nolint:errcheck // nothing is lost
		defer far.Close()  //nolint:errcheck // nothing is lost
		n := &session{conn: tls.Server(near, &tls.Config{})}
		n.out = outbox[reply]{limit: mostQueued, finish: func() error {
			begun <- struct{}{}
			<-goOn
			return nil
		}}
		s.mu.Lock()
		s.admit(n)
		s.mu.Unlock()
	}
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	late := time.After(time.Minute)
	for i := range 2 {
		select {
		case <-begun:
		case <-late:
			require.Fail(t, "one waits for another", "%d have begun", i)
		}
	}
	require.True(t, s.mu.TryLock(), "the store is locked meanwhile")
	for _, n := range s.sessions {
		require.True(t, n.out.mu.TryLock(), "an outbox is locked meanwhile")
		n.out.mu.Unlock()
	}
	s.mu.Unlock()
	close(goOn)
	assert.NoError(t, <-closed)
}
