package store

import (
	"context"
	"crypto/tls"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/logtest"
)

// A process that ends with events unread, as at an interrupt, has its connection reset. That is no more alarming than
// the end of one that has read all.
func TestResetIsAnEnd(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("its resets have another number")
	}
	for _, way := range []string{"server", "proxy"} {
		t.Run(way, func(t *testing.T) {
			log := logtest.Capture(t)
			server := NewServer(Options{})
			address := listen(t, server, "s")
			if way == "proxy" {
				_, address = front(t, func(context.Context, string) (Backend, error) { return server.Local("a session"), nil })
			}
			ended := make(chan struct{})
			_, err := server.Local("another").Watch(t.Context(), "here", func(e Event) {
				if e.Deleted {
					close(ended)
				}
			})
			require.NoError(t, err)
			conn, err := net.Dial("tcp", address)
			require.NoError(t, err)
			hello := greeting{Name: "rank 0", Process: "p", Version: protocol}
			c, err := Dialer{TLS: mustTLS(t, "s")}.introduce(t.Context(), conn, hello, time.Minute)
			require.NoError(t, err)
			require.NoError(t, c.Set(t.Context(), "here", nil, Lease))
			require.NoError(t, conn.(*net.TCPConn).SetLinger(0))
			require.NoError(t, conn.Close())
			<-ended
			assert.Empty(t, log.String())
		})
	}
}

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

// An answer counts that has come before the session, or the caller's context, has ended: a store may close behind it.
func TestAnswerBeforeTheEnd(t *testing.T) {
	for range 100 { // each would be lost in half of them
		ctx, cancel := context.WithCancel(t.Context())
		for _, end := range []func(c *Client){func(c *Client) { c.fail(errHungUp) }, func(*Client) { cancel() }} {
			c := newClient(nil)
			c.post = func(r request) error {
				c.handle(&reply{ID: r.ID, Entries: []Entry{{Key: r.Key, Value: []byte("v")}}})
				end(c)
				return nil
			}
			value, err := c.Get(ctx, "k")
			require.NoError(t, err)
			require.Equal(t, "v", string(value))
		}
	}
}
