package p2p

import (
	"context"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A file descriptor reaches a peer that knows the secret, and no other.
func TestFDServer(t *testing.T) {
	fd, err := unix.MemfdCreate("memory", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	_, err = unix.Write(fd, []byte("what is shared"))
	require.NoError(t, err)
	h := hello{name: identity("a name", t.Name(), time.Now().String()), secret: identity("a secret")}
	s, err := serveFD(h, fd)
	require.NoError(t, err)

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 3 {
		require.NoError(t, fetch(ctx, h, func(fd int) error {
			got := make([]byte, 14)
			_, err := unix.Pread(fd, got, 0)
			assert.Equal(t, "what is shared", string(got))
			return err
		}))
	}
	stranger := h
	stranger.secret[3]++
	assert.Error(t, fetch(ctx, stranger, func(int) error {
		t.Error("a stranger got in")
		return nil
	}))
	// A silent connection delays nobody.
	silent, err := net.Dial("unix", h.socketName())
	require.NoError(t, err)
	require.NoError(t, fetch(ctx, h, func(int) error { return nil }))
	require.NoError(t, silent.Close())

	require.NoError(t, s.close())
	assert.Error(t, fetch(ctx, h, func(int) error { return nil }))
}

func TestHostIdentity(t *testing.T) {
	if _, err := os.Stat("/dev/shm"); err != nil {
		t.Skip("needs /dev/shm")
	}
	a, err := hostIdentity()
	require.NoError(t, err)
	b, err := hostIdentity()
	require.NoError(t, err)
	assert.Equal(t, a, b)
	assert.NotEqual(t, identity("a", "bc"), identity("ab", "c"))
}
