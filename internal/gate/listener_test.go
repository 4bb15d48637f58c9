package gate

import (
	"errors"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// ending is a listener of a program that returns its own errors.
type ending struct {
	closed chan struct{}
}

func (e *ending) Accept() (net.Conn, error) {
	<-e.closed
	return nil, io.EOF // as ssh's listeners do
}

func (e *ending) Close() error {
	close(e.closed)
	return nil
}

func (e *ending) Addr() net.Addr { return nil }

// A gate ends with its listener, whatever that returns when it is closed.
func TestListenerEnds(t *testing.T) {
	l := Bind(&ending{closed: make(chan struct{})})
	assert.Same(t, l, Bind(l))
	ended := make(chan struct{})
	g := &Gate{Name: "test", Places: 4}
	go func() {
		defer close(ended)
		g.Serve(l, nil, nil)
	}()
	require.NoError(t, l.Close())
	<-ended
}

// broken is a connection whose stream was reset.
type broken struct{ net.Conn }

var errReset = errors.New("stream reset")

func (broken) Read([]byte) (int, error)  { return 0, errReset }
func (broken) Write([]byte) (int, error) { return 0, errReset }

// A stream that was reset is a connection that ended, not a stranger's.
func TestReasonOfReset(t *testing.T) {
	conn := Bound(broken{})
	_, err := conn.Read(nil)
	require.ErrorIs(t, err, errReset)
	assert.Equal(t, Silence, reasonOf(err))
	_, err = conn.Write(nil)
	require.ErrorIs(t, err, errReset)
	assert.Equal(t, Silence, reasonOf(err))
}
