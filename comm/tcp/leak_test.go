package tcp

import (
	"context"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A communicator that nobody closes is found when it is garbage, one that is closed is not.
func TestForgottenClose(t *testing.T) {
	log := logTo(t)
	found := func() bool {
		runtime.GC()
		log.mu.Lock()
		defer log.mu.Unlock()
		return strings.Contains(log.text.String(), "communicator was never closed")
	}
	create := func(closes bool) {
		c, err := New(context.Background(), nil, Config{WorldSize: 1})
		require.NoError(t, err)
		require.NoError(t, c.Barrier(t.Context()))
		if closes {
			require.NoError(t, c.Close())
		}
	}
	create(true)
	for range 3 {
		require.False(t, found())
	}
	create(false)
	require.Eventually(t, found, 20*time.Second, 10*time.Millisecond)
}
