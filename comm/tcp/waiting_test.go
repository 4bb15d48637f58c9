package tcp

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/jobtest"
	"github.com/tutti-go/tutti/internal/logtest"
)

// linesOf returns what a rank has said while it waited for others.
func linesOf(log *logtest.Log, rank int) (lines []string) {
	for _, line := range log.Lines("tcp: waiting") {
		if strings.Contains(line, fmt.Sprintf(" rank=%d ", rank)) {
			lines = append(lines, line)
		}
	}
	return lines
}

// said reports whether a rank has said texts while it waited for others, in one line.
func said(log *logtest.Log, rank int, texts ...string) bool {
	return slices.ContainsFunc(linesOf(log, rank), func(line string) bool {
		return !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) })
	})
}

// Ranks that wait for each other say so, on both sides: whom they miss, where they have tried, and how that failed. The
// worlds wait side by side, and each has lines that no other one has.
func TestWaitSpeaks(t *testing.T) {
	t.Parallel()
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	closed := jobtest.Address(t, 1)
	listening := jobtest.Address(t, 1)
	log := logtest.Capture(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var all sync.WaitGroup
	wait := func(server *store.Server, c Config) {
		c.TLS = conf
		all.Go(func() {
			_, err := New(ctx, server.Local(fmt.Sprint(c.Rank)), c)
			assert.ErrorIs(t, err, comm.ErrCanceled)
		})
	}
	newServer := func() *store.Server {
		server := store.NewServer(store.Options{})
		t.Cleanup(func() { assert.NoError(t, server.Close()) })
		return server
	}
	unserved := newServer()
	for rank := range 2 {
		wait(unserved, Config{Rank: rank, WorldSize: 2, Listen: "localhost", Advertise: []string{closed}})
	}
	wait(newServer(), Config{Rank: 0, WorldSize: 2, Listen: listening})
	withoutFirst := newServer()
	for rank := 1; rank <= 2; rank++ {
		wait(withoutFirst, Config{Rank: rank, WorldSize: 3, Listen: "localhost"})
	}
	for _, line := range []struct {
		about string
		rank  int
		texts []string
	}{
		{"a port that nobody serves", 0, []string{"no connection to rank 1", "it reports that this rank cannot be reached at [" + closed + "]"}},
		{"a port that nobody serves", 1, []string{"no connection to rank 0", "cannot be reached at [" + closed + "]", "refused"}},
		{
			"a rank that does not come", 0,
			[]string{"no connection to rank 1", "it has not connected to this rank, which listens at [" + listening + "]"},
		},
		{"a rank 0 that does not come", 2, []string{"no connection to rank 0", "it has published no address"}},
	} {
		require.Eventually(t, func() bool { return said(log, line.rank, line.texts...) }, time.Minute, 10*time.Millisecond,
			"%s: rank %d, %q in %q", line.about, line.rank, line.texts, linesOf(log, line.rank))
	}
	cancel()
	all.Wait()
}

// tardy is a store that takes the time it needs, whatever the caller has.
type tardy struct{ store.Store }

func (s tardy) Watch(ctx context.Context, prefix string, f func(store.Event)) (stop func(), err error) {
	return s.Store.Watch(context.WithoutCancel(ctx), prefix, f)
}

func (s tardy) CompareAndSet(ctx context.Context, key string, version uint64, value []byte, options ...store.Option) (store.Entry, bool, error) {
	return s.Store.CompareAndSet(context.WithoutCancel(ctx), key, version, value, options...)
}

// Without a deadline the limit of the configuration counts, and the error says whose it is and who is missing.
func TestWaitIsBounded(t *testing.T) {
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	server := store.NewServer(store.Options{})
	defer server.Close()
	c := Config{WorldSize: 2, TLS: conf, Listen: "localhost", Patience: 20 * time.Millisecond}
	_, err = New(context.Background(), tardy{server.Local("0")}, c)
	require.ErrorIs(t, err, comm.ErrTimeout)
	assert.ErrorContains(t, err, "no deadline was set, so the limit is 20ms (TUTTI_CONNECT_TIMEOUT)")
	assert.ErrorContains(t, err, "no connection to rank 1")
}

// A deadline that passes while an address is looked up is one like others, and no want of an address.
func TestDeadlineOfALookup(t *testing.T) {
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	server := store.NewServer(store.Options{})
	defer server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	_, err = New(ctx, server.Local("0"), Config{WorldSize: 2, TLS: conf, Listen: "localhost"})
	require.ErrorIs(t, err, comm.ErrTimeout)
	assert.NotErrorIs(t, err, comm.ErrUnavailable)
}

// A rank of another version is refused by name, on either side, whoever has come first.
func TestVersionsMeet(t *testing.T) {
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	for _, rank := range []int{0, 1} {
		for _, first := range []bool{true, false} {
			t.Run(fmt.Sprintf("rank %d, first %v", rank, first), func(t *testing.T) {
				server := store.NewServer(store.Options{})
				defer server.Close()
				other := 1 - rank
				text, err := json.Marshal(record{Protocol: "tutti-tcp/1", Addresses: []string{"127.0.0.1:1"}})
				require.NoError(t, err)
				publish := func() {
					key := (&Config{}).key(other)
					require.NoError(t, server.Local("other").Set(t.Context(), key, text, store.Lease))
				}
				if !first {
					publish()
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				heard := make(chan struct{}, 1)
				// As a rank does: it watches before it says where it is. A later request may find nothing, since a
				// rank that fails takes its record back.
				stop, err := server.Local("observer").Watch(ctx, (&Config{}).key(rank), func(e store.Event) {
					if !e.Deleted {
						heard <- struct{}{}
					}
				})
				require.NoError(t, err)
				defer stop()
				failed := make(chan error)
				go func() {
					_, err := New(ctx, server.Local("this"), Config{Rank: rank, WorldSize: 2, TLS: conf, Listen: "localhost"})
					failed <- err
				}()
				select {
				case <-heard:
				case <-ctx.Done():
					t.Fatal("the other one cannot hear of this rank")
				}
				if first {
					publish()
				}
				err = <-failed
				require.ErrorIs(t, err, comm.ErrMismatch)
				assert.ErrorIs(t, err, store.ErrRefused)
				assert.ErrorContains(t, err, fmt.Sprintf(`rank %d speaks "tutti-tcp/1", this one "tutti-tcp/`, other))
				assert.NoError(t, ctx.Err())
			})
		}
	}
}
