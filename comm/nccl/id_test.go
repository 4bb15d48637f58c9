package nccl

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// A rank takes a whole id from the store, and nothing else: rank 0 sends no bytes where it cannot make one.
func TestReceivedIDs(t *testing.T) {
	kv := store.NewServer(store.Options{}).Owner("rank 1")
	defer kv.Close() //nolint:errcheck // nothing is lost
	var whole uniqueID
	for i := range whole {
		whole[i] = byte(i + 1)
	}
	for _, sent := range [][]byte{nil, whole[:1], whole[:len(whole)-1], append(slices.Clone(whole[:]), 1)} {
		require.NoError(t, kv.Set(t.Context(), "id", sent))
		_, err := receiveID(t.Context(), kv, "id")
		assert.ErrorIs(t, err, comm.ErrPeerFailed, "%d bytes", len(sent))
	}
	require.NoError(t, kv.Set(t.Context(), "id", whole[:]))
	id, err := receiveID(t.Context(), kv, "id")
	require.NoError(t, err)
	assert.Equal(t, whole, id)
}
