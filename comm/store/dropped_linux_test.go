package store

import (
	"context"
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/jobtest"
)

// dropping returns an address of a host, which is this one, that answers nothing, as behind a firewall that drops
// packets: the kernel drops those to a listener whose backlog is full.
func dropping(t *testing.T, host string) string {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, syscall.Close(fd)) })
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: netip.MustParseAddr(host).As4()}))
	require.NoError(t, syscall.Listen(fd, 0))
	name, err := syscall.Getsockname(fd)
	require.NoError(t, err)
	address := net.JoinHostPort(host, strconv.Itoa(name.(*syscall.SockaddrInet4).Port))
	for {
		conn, err := net.DialTimeout("tcp", address, 300*time.Millisecond)
		if err != nil {
			var timeout net.Error
			require.ErrorAs(t, err, &timeout)
			require.True(t, timeout.Timeout(), "%v", err)
			return address
		}
		t.Cleanup(func() { assert.NoError(t, conn.Close()) })
	}
}

// A store that starts a little later than its first client is found although a firewall drops what goes to the further
// ports where it could be: a round of 3 s for each of them is longer than the client has.
func TestFurtherPortsAreDropped(t *testing.T) {
	t.Parallel()
	address := jobtest.Address(t, 1)
	d := dialer(t, address, "s", "one")
	host, _, err := net.SplitHostPort(address)
	require.NoError(t, err)
	dropped := dropping(t, host)
	for range 21 {
		d.Addresses = append(d.Addresses, dropped)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	server := NewServer(Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	found := make(chan error, 1)
	go func() {
		c, err := d.Dial(ctx)
		if err == nil {
			err = c.Close()
		}
		found <- err
	}()
	select {
	case err := <-found:
		t.Fatalf("nobody serves the store yet: %v", err)
	case <-time.After(50 * time.Millisecond): // the first round is at the other ports, most likely
	}
	l, err := net.Listen("tcp", address)
	require.NoError(t, err)
	server.Serve(l, d.TLS)
	require.NoError(t, <-found)
}
