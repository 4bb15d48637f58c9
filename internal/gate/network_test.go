package gate

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// deaf is a connection that refuses deadlines and knows no addresses.
type deaf struct{ net.Conn }

var errDeaf = errors.New("no deadlines here")

func (deaf) SetDeadline(time.Time) error      { return errDeaf }
func (deaf) SetReadDeadline(time.Time) error  { return errDeaf }
func (deaf) SetWriteDeadline(time.Time) error { return errDeaf }
func (deaf) LocalAddr() net.Addr              { return nil }
func (deaf) RemoteAddr() net.Addr             { return nil }

// pipe is a bound connection, and its other end.
func pipe() (near, far net.Conn) {
	near, far = net.Pipe()
	return Bound(deaf{near}), far
}

// A deadline ends a read or a write in flight, and the connection with it, whatever the connection makes of deadlines.
func TestDeadlineInFlight(t *testing.T) {
	const limit = 3 * time.Second
	for name, call := range map[string]struct {
		set func(c net.Conn, t time.Time) error
		do  func(c net.Conn) (int, error)
	}{
		"read":  {net.Conn.SetReadDeadline, func(c net.Conn) (int, error) { return c.Read(make([]byte, 1)) }},
		"write": {net.Conn.SetWriteDeadline, func(c net.Conn) (int, error) { return c.Write(make([]byte, 1)) }},
		"both":  {net.Conn.SetDeadline, func(c net.Conn) (int, error) { return c.Read(make([]byte, 1)) }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				near, far := pipe()
				began := time.Now()
				require.NoError(t, call.set(near, began.Add(limit)))
				_, err := call.do(near)
				assert.ErrorIs(t, err, os.ErrDeadlineExceeded)
				assert.Equal(t, limit, time.Since(began))
				_, err = far.Read(make([]byte, 1))
				assert.ErrorIs(t, err, io.EOF, "the other side learns of it")
			})
		})
	}
}

// A deadline may be set, moved and removed while a read is in flight. One that passes between two calls fails the next
// one, and leaves the connection open for those after it.
func TestDeadlineMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := pipe()
		began := time.Now()
		failed := make(chan error)
		read := func() {
			_, err := near.Read(make([]byte, 1))
			failed <- err
		}
		require.NoError(t, near.SetReadDeadline(began.Add(time.Second)))
		go read()
		synctest.Wait()
		require.NoError(t, near.SetReadDeadline(began.Add(time.Minute)))
		time.Sleep(2 * time.Second)
		require.NoError(t, near.SetReadDeadline(time.Time{}))
		time.Sleep(2 * time.Minute)
		_, err := far.Write([]byte{1})
		require.NoError(t, err)
		require.NoError(t, <-failed)

		require.NoError(t, near.SetReadDeadline(time.Now().Add(-time.Second)))
		go read()
		require.ErrorIs(t, <-failed, os.ErrDeadlineExceeded)
		require.NoError(t, near.SetReadDeadline(time.Now().Add(time.Second)))
		time.Sleep(2 * time.Second)
		go read()
		require.ErrorIs(t, <-failed, os.ErrDeadlineExceeded)
		require.NoError(t, near.SetDeadline(time.Time{}))
		go read()
		_, err = far.Write([]byte{1})
		require.NoError(t, err)
		require.NoError(t, <-failed, "no deadline has passed during a call")
		require.NoError(t, near.Close())
		go read()
		require.ErrorIs(t, <-failed, io.ErrClosedPipe)
	})
}

// Addresses of connections that know none can be printed.
func TestAddressesOfBound(t *testing.T) {
	near, _ := pipe()
	assert.Equal(t, "an unknown address", near.RemoteAddr().String())
	assert.Equal(t, "an unknown address", near.LocalAddr().String())
	assert.Same(t, near, Bound(near))
}
