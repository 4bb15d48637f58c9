package invitation

import (
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tutti-go/tutti/comm/store"
)

// A rank reaches the store of an invitation past an address at which nobody listens, and not without its secret.
func TestInvitation(t *testing.T) {
	kv, in, err := New(true)
	require.NoError(t, err)
	defer kv.Close() //nolint:errcheck // nothing is lost
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := free.Addr().String() // nobody listens there from here on
	require.NoError(t, free.Close())
	require.NoError(t, kv.Set(t.Context(), "key", []byte("value")))
	in.Addresses = append([]string{address}, in.Addresses...)
	guest, err := in.Accept(t.Context(), 1)
	require.NoError(t, err)
	value, err := guest.Get(t.Context(), "key")
	require.NoError(t, err)
	assert.Equal(t, "value", string(value))
	require.NoError(t, guest.Close())

	in.Secret = []byte("another one")
	in.Addresses = in.Addresses[1:]
	_, err = in.Accept(t.Context(), 3)
	require.ErrorIs(t, err, store.ErrRefused)
}
