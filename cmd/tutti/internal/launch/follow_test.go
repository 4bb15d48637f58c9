package launch

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/store"
)

// TestSessionOfTheEnd: a launcher whose session is lost when its ranks end sends their flight records in another
// session. It may have found that session, be looking for it, or not have noticed the loss.
func TestSessionOfTheEnd(t *testing.T) {
	conf, err := store.TLS([]byte("a secret"), "store")
	require.NoError(t, err)
	server := store.NewServer(store.Options{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server.Serve(l, conf)
	t.Cleanup(func() { assert.NoError(t, server.Close()) })
	observer := server.Local("observer")
	for range 20 { // each run hits one of the three by chance
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

// TestSessionNowhere: a launcher whose session is lost for good reports that flight records stay on its machine, if
// there are any.
func TestSessionNowhere(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	for _, records := range []int{0, 1} {
		var log bytes.Buffer
		a := newAgent(Config{Join: []string{l.Addr().String()}, Wait: time.Minute, Ranks: 1, Records: t.TempDir()})
		a.notes = &log
		a.dialer = store.Dialer{Addresses: a.Join, TLS: &tls.Config{}, Name: "a launcher"}
		a.began = time.Time{}
		for i := range records {
			require.NoError(t, os.WriteFile(filepath.Join(a.Records, fmt.Sprintf("tutti-record-%d.json", i)), []byte("{}"), 0o600))
		}
		a.kv = store.NewServer(store.Options{}).Owner("a launcher")
		require.NoError(t, a.kv.Close())
		a.reconnect(t.Context())
		assert.Equal(t, records, strings.Count(log.String(), "what this machine's ranks have recorded stays here"), log.String())
	}
}
