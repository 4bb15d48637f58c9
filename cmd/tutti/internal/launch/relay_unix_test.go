//go:build unix

package launch

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/store"
)

// TestSignalsOfLostSessions: each user signal of a launcher reaches the others once, even if each comes when a session
// of the store ends.
func TestSignalsOfLostSessions(t *testing.T) {
	const count = 200
	server := store.NewServer(store.Options{})
	a := newAgent(Config{})
	a.key = machines + "00000001"
	heard := make(chan string, 2*count)
	listener := server.Local("another launcher")
	defer listener.Close() //nolint:errcheck // nothing is lost
	_, err := listener.Watch(t.Context(), relayed, func(e store.Event) { heard <- string(e.Value) })
	require.NoError(t, err)
	for i := range count {
		kv := server.Local(fmt.Sprint("session ", i))
		require.NoError(t, a.exchangeSignals(t.Context(), kv))
		a.outgoing <- fmt.Sprint(i)
		require.NoError(t, kv.Close())
	}
	last := server.Local("the last session")
	defer last.Close() //nolint:errcheck // nothing is lost
	require.NoError(t, a.exchangeSignals(t.Context(), last))
	for i := range count {
		select {
		case name := <-heard:
			require.Equal(t, fmt.Sprint(i), name)
		case <-time.After(time.Minute):
			require.FailNow(t, "a signal is lost", "number %d", i)
		}
	}
	assert.Empty(t, heard)
}
