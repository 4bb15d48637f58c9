package store

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/logtest"
)

// dropped is a network that answers nothing, as behind a firewall that drops packets.
type dropped struct{}

// Dial implements Network.
func (dropped) Dial(ctx context.Context, _, _ string) (net.Conn, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// Listen implements Network.
func (dropped) Listen(string, string) (net.Listener, error) { return nil, errors.ErrUnsupported }

// A client that waits for a store says so after a few seconds, and then at increasing intervals, however long an
// attempt takes.
func TestSearchIsSaid(t *testing.T) {
	log := logtest.Capture(t)
	synctest.Test(t, func(t *testing.T) {
		d := dialer(t, "10.0.0.1:29400", "s", "rank 1")
		d.Network = dropped{}
		for range 3 {
			d.Addresses = append(d.Addresses, "10.0.0.1:29401")
		}
		ctx, cancel := context.WithCancel(t.Context())
		failed := make(chan error)
		go func() {
			_, err := d.Dial(ctx)
			failed <- err
		}()
		lines := func() int {
			synctest.Wait()
			return len(log.Lines("store: no connection yet; trying again"))
		}
		time.Sleep(2*time.Second - 1)
		assert.Zero(t, lines())
		time.Sleep(3 * time.Second)
		assert.Equal(t, 1, lines())
		time.Sleep(time.Minute)
		assert.Equal(t, 4, lines(), "after 2, 6, 14 and 30 s, and the attempt that was being made")
		cancel()
		require.ErrorIs(t, <-failed, comm.ErrCanceled)
	})
	assert.Contains(t, log.Lines("trying again")[0], "deadline exceeded")
}

// fading is a network in which a store answers once, and nobody after that.
type fading struct {
	store string       // its address
	end   func()       // called after some attempts in vain
	dials atomic.Int32 // so far
}

// Dial implements Network.
func (f *fading) Dial(ctx context.Context, network, _ string) (net.Conn, error) {
	switch f.dials.Add(1) {
	case 1:
		return new(net.Dialer).DialContext(ctx, network, f.store)
	case 7:
		f.end()
	}
	return nil, syscall.ECONNREFUSED
}

// Listen implements Network.
func (*fading) Listen(string, string) (net.Listener, error) { return nil, errors.ErrUnsupported }

// Why a store has refused this process is said at the end, though that store has ended meanwhile.
func TestRefusalOutlivesTheStore(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := NewServer(Options{})
	defer server.Close() //nolint:errcheck // nobody is served
	server.Serve(l, mustTLS(t, "another secret"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	d := dialer(t, "10.0.0.1:29400", "s", "rank 1")
	d.Addresses = append(d.Addresses, "10.0.0.1:29401")
	d.Network = &fading{store: l.Addr().String(), end: cancel}
	_, err = d.Dial(ctx)
	require.ErrorIs(t, err, comm.ErrCanceled)
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	require.ErrorContains(t, err, "it knows another secret")
}

// mute is a network whose listeners accept connections and say nothing, as the system does for a process that is
// stopped.
type mute struct{}

// Dial implements Network.
func (mute) Dial(context.Context, string, string) (net.Conn, error) {
	conn, other := net.Pipe()
	go func() { _, _ = io.Copy(io.Discard, other) }()
	return conn, nil
}

// Listen implements Network.
func (mute) Listen(string, string) (net.Listener, error) { return nil, errors.ErrUnsupported }

// A store's process that is stopped, such as a launcher by Ctrl-Z, is not taken for another program.
func TestAStoppedStoreIsNamed(t *testing.T) {
	log := logtest.Capture(t)
	synctest.Test(t, func(t *testing.T) {
		d := dialer(t, "10.0.0.1:29400", "s", "rank 1")
		d.Network = mute{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := d.Dial(ctx)
		require.ErrorIs(t, err, comm.ErrTimeout)
		for _, text := range []string{err.Error(), strings.Join(log.Lines("store: "), "\n")} {
			assert.Contains(t, text, "is its process stopped, as Ctrl-Z does to a launcher?")
			assert.NotContains(t, text, "is not the store of this job")
			assert.NotContains(t, text, "somebody else")
		}
		assert.NotEmpty(t, log.Lines("store: the job's store does not answer"))
	})
}

// refusing is a network on which nobody listens.
type refusing struct{ dropped }

// Dial implements Network.
func (refusing) Dial(context.Context, string, string) (net.Conn, error) {
	return nil, syscall.ECONNREFUSED
}

// TestReasonsAreOneLine: the error of several addresses is one line, in which a reason stands once.
func TestReasonsAreOneLine(t *testing.T) {
	log := logtest.Capture(t)
	synctest.Test(t, func(t *testing.T) {
		d := dialer(t, "10.0.0.1:29400", "s", "rank 1")
		d.Network = refusing{}
		d.Addresses = append(d.Addresses, "10.0.0.1:29401", "10.0.0.1:29402")
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := d.Dial(ctx)
		require.ErrorIs(t, err, comm.ErrTimeout)
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
		assert.NotContains(t, err.Error(), "\n")
		assert.Equal(t, 1, strings.Count(err.Error(), syscall.ECONNREFUSED.Error()))
		lines := log.Lines("store: no connection yet; trying again")
		require.NotEmpty(t, lines)
		assert.Equal(t, 1, strings.Count(lines[0], syscall.ECONNREFUSED.Error()))
	})
}

// TestNoAddresses: a store without an address is an error, not a client that is nil.
func TestNoAddresses(t *testing.T) {
	d := dialer(t, "10.0.0.1:29400", "s", "rank 1")
	d.Addresses = nil
	_, err := d.Dial(t.Context())
	assert.ErrorIs(t, err, comm.ErrArgument)
}
