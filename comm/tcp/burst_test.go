package tcp_test

import (
	"context"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/logtest"
	"github.com/tutti-go/tutti/internal/networktest"
)

// TestBursts submits more short calls before a wait than the socket takes: the amount that a rank sends is bounded by
// its peer's credit, and by nothing else.
func TestBursts(t *testing.T) {
	const bytes, calls = 30 << 10, 130
	for _, processors := range []int{1, 2, 4} {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(processors))
		rt := hosttest.NewRuntime(t)
		one := func(c *tcp.Config) { c.Connections = 1 }
		require.NoError(t, run(soon(t), 2, one, func(ctx context.Context, c comm.Communicator) error {
			sent := hosttest.Allocate(t, rt, bytes)
			received := hosttest.Allocate(t, rt, bytes*calls)
			for i := range hostmem.Slice[byte](sent, bytes) {
				hostmem.Slice[byte](sent, bytes)[i] = byte(i*7 + c.Rank())
			}
			for i := range calls {
				tag := uint32(i)
				if c.Rank() == 0 {
					require.NoError(t, c.Send(sent, bytes, dtype.U8, 1, tag))
				} else {
					require.NoError(t, c.Recv(received+uintptr(i*bytes), bytes, dtype.U8, 0, tag))
				}
			}
			if err := c.Sync(ctx); err != nil {
				return err
			}
			for i, b := range hostmem.Slice[byte](received, bytes*calls) {
				if c.Rank() == 1 && b != byte(i%bytes*7) {
					t.Errorf("byte %d is %d", i, b)
					break
				}
			}
			for range calls {
				require.NoError(t, c.Broadcast(sent, bytes, dtype.U8, 0))
			}
			return c.Sync(ctx)
		}))
	}
}

// TestReversed: a rank that receives in the reverse order of the sends, and waits for each, is told that the window of
// early messages is full, and what to do.
func TestReversed(t *testing.T) {
	const count = 20_000 // of which the window takes 4 MiB / 256
	rt := hosttest.NewRuntime(t)
	p := hosttest.Allocate(t, rt, 1)
	ranks := open(t, 2, over(new(networktest.Pipes)))
	for tag := range uint32(count) {
		require.NoError(t, ranks[1].Send(p, 1, dtype.U8, 0, tag))
	}
	require.NoError(t, ranks[0].Recv(p, 1, dtype.U8, 1, count-1))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		defer cancel()
		assert.Eventually(t, func() bool { return tcp.Early(ranks[0], 1) > 0 }, time.Minute, time.Millisecond)
	}()
	err := ranks[0].Sync(ctx)
	require.ErrorIs(t, err, comm.ErrCanceled)
	require.ErrorContains(t, err, "bytes of messages have come from rank 1 before their receives, and no more fit: ")
	require.ErrorContains(t, err, "post receives in the order of the sends, or before them")
	for _, c := range ranks {
		_ = c.Close() // the rank whose sends were not received has an error
	}
}

// TestUnread: a rank whose peer does not receive says after a while what it sends to whom, and how much of that nobody
// has received: many messages that fill the window, and one that is longer than it.
func TestUnread(t *testing.T) {
	t.Parallel()
	const long = 8 << 20
	for name, c := range map[string]struct {
		messages, bytes int
		call            string // in the lines of this case alone
	}{
		"short": {20_000, 1, "send of 1 u8 to rank 0, tag"},
		"long":  {1, long, "send of 8388608 u8 to rank 0, tag 7"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			said := logtest.Capture(t)
			rt := hosttest.NewRuntime(t)
			p := hosttest.Allocate(t, rt, long)
			ranks := open(t, 2, over(new(networktest.Pipes)))
			for tag := range uint32(c.messages) {
				require.NoError(t, ranks[1].Send(p, c.bytes, dtype.U8, 0, 7+tag))
			}
			lines := func() []string {
				return slices.DeleteFunc(said.Lines("until it receives"), func(line string) bool {
					return !strings.Contains(line, c.call)
				})
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go func() {
				defer cancel()
				assert.Eventually(t, func() bool { return len(lines()) > 0 }, time.Minute, time.Millisecond)
			}()
			err := ranks[1].Sync(ctx)
			require.ErrorIs(t, err, comm.ErrCanceled)
			require.NotEmpty(t, lines(), said.Lines("until it receives"))
			first := lines()[0]
			for _, text := range []string{first, err.Error()} {
				assert.Regexp(t, `to rank 0.*[1-9]\d* bytes have gone to rank 0 without a receive, and the others wait until it receives`, text)
			}
			assert.Contains(t, first, "rank=1")
			for _, c := range ranks {
				_ = c.Close() // the rank whose sends were not received has an error
			}
		})
	}
}
