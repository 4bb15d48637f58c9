package launch

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/store"
)

// TestSessionOfTheEnd: a launcher whose session is lost when its ranks end sends their flight records in another one,
// whether it had found that, was looking for it, or had not noticed.
func TestSessionOfTheEnd(t *testing.T) {
	conf, err := store.TLS([]byte("a secret"), "store")
	require.NoError(t, err)
	server := store.NewServer(store.Options{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server.Serve(l, conf)
	t.Cleanup(func() { assert.NoError(t, server.Close()) })
	observer := server.Local("observer")
	for range 20 { // which of the three is chance
		var log bytes.Buffer
		a := newAgent(Config{Join: []string{l.Addr().String()}, Wait: time.Minute, Ranks: 1, Records: t.TempDir(), Err: &log})
		a.dialer = store.Dialer{Addresses: a.Join, TLS: conf, Name: "a launcher"}
		a.key = "machine"
		a.began = time.Time{}
		require.NoError(t, os.WriteFile(filepath.Join(a.Records, "tutti-record-0.json"), []byte("{}"), 0o600))
		a.kv, err = a.dialer.Dial(t.Context())
		require.NoError(t, err)
		require.NoError(t, a.kv.Close())
		assert.Equal(t, End{}, a.follow(t.Context(), &group{}, make(chan End, 1)))
		a.reconnect(t.Context())
		a.sendDumps()
		require.NoError(t, a.kv.Close())
		assert.Empty(t, log.String())
		sent, err := observer.List(t.Context(), dumps)
		require.NoError(t, err)
		assert.Len(t, sent, 1)
		for _, e := range sent {
			require.NoError(t, observer.Delete(t.Context(), e.Key, 0))
		}
	}
}
