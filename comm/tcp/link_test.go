package tcp

import (
	"bytes"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestIdleLinkHasNoMemory sends long and short writes over a link: all of it arrives, in order, and what the link has
// collected it in is not kept for the next time.
func TestIdleLinkHasNoMemory(t *testing.T) {
	near, far := net.Pipe()
	l := newLink(near)
	l.direct = false
	l.framing.Store(true)
	var want []byte
	arrived := make(chan []byte)
	go func() {
		all, _ := io.ReadAll(far)
		arrived <- all
	}()
	for i, length := range []int{1, 3 * flushBytes, 17, recordBytes} {
		for range 3 {
			b := bytes.Repeat([]byte{byte(i + 1)}, length)
			want = append(want, b...)
			n, err := l.Write(b)
			require.NoError(t, err)
			assert.Equal(t, length, n)
		}
		empty, err := l.flush(true)
		require.NoError(t, err)
		assert.True(t, empty)
		assert.Nil(t, l.collected)
		assert.Nil(t, l.memory)
		assert.Nil(t, l.pending)
	}
	require.NoError(t, near.Close())
	assert.Equal(t, want, <-arrived)
}
