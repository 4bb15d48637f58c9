package store_test

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// A process whose name or job no store accepts learns it at once, instead of trying until its context ends.
func TestNamesAreRefused(t *testing.T) {
	conf, err := store.TLS([]byte("a secret of tests"), "names")
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := store.NewServer(store.Options{})
	defer server.Close()
	server.Serve(l, conf)
	for text, d := range map[string]store.Dialer{
		"names have at most 2048 bytes, and this one has 2049": {Name: "rank 0", Job: strings.Repeat("j", 2049)},
		`unlike "rank\t0"`:       {Name: "rank\t0"},
		`unlike "two\nlines"`:    {Name: "rank 0", Job: "two\nlines"},
		`unlike "a\x1b[2J"`:      {Name: "rank 0", Title: "a\x1b[2J"},
		"a process needs a name": {},
	} {
		d.Addresses = []string{l.Addr().String()}
		d.TLS = conf
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		_, err := d.Dial(ctx)
		cancel()
		assert.ErrorIs(t, err, comm.ErrArgument)
		assert.ErrorContains(t, err, text)
	}
}
