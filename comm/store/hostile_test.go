package store

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/logtest"
)

// wild is a request of anything, whose keys are not those of friends if it changes one.
func wild(random *rand.Rand) []byte {
	numbers := []uint64{0, 1, 2, 3, 7, math.MaxUint64, 1 << 63, uint64(random.IntN(100))}
	number := func() uint64 { return numbers[random.IntN(len(numbers))] }
	ops := []operation{opSet, opSwap, opAdd, opGet, opList, opDelete, opWatch, opStop, opPing, "", "steal"}
	keys := []string{"x", "x/1", "x/2", "x/\x00", strings.Repeat("x", 3000)}
	r := request{ID: number(), Op: ops[random.IntN(len(ops))], Version: number(), Delta: int64(number()), Lease: random.IntN(2) == 0}
	r.Key = keys[random.IntN(len(keys))]
	if changes := []operation{opSet, opSwap, opAdd, opDelete}; !slices.Contains(changes, r.Op) && random.IntN(2) == 0 {
		r.Key = []string{"", "a", "a/", "b/news", "b"}[random.IntN(5)]
	}
	r.Value = make([]byte, []int{0, 1, 100, 1 << 16}[random.IntN(4)])
	if random.IntN(100) == 0 {
		r.Value = make([]byte, MaxValue+1)
	}
	text, _ := json.Marshal(r)
	text = append(text, '\n')
	switch random.IntN(12) {
	case 0:
		return text[:random.IntN(len(text))]
	case 1:
		text[random.IntN(len(text))] = byte(random.Uint32())
	case 2:
		return []byte("[]\n{}\nnull\n")
	case 3:
		return fmt.Appendf(nil, `{"id":%d,"op":"set","key":"x","version":-1}`+"\n", number())
	}
	return text
}

// besieged has somebody who knows the secret say anything to a store, again and again, while friends use it.
func besieged(t *testing.T, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 1))
	conf := mustTLS(t, "s")
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		server, l := NewServer(Options{Silence: 5 * time.Second}), newPipes()
		server.Serve(l, conf)
		friend := func(name string) *Client {
			c, err := Dialer{TLS: conf}.introduce(ctx, l.connect(), greeting{Name: name, Process: name, Version: protocol}, glance)
			require.NoError(t, err)
			return c
		}
		a, b := friend("a"), friend("b")
		var news atomic.Int32
		_, err := b.Watch(ctx, "a/news", func(Event) { news.Add(1) })
		require.NoError(t, err)
		require.NoError(t, a.Set(ctx, "a/lease", []byte("held"), Lease))

		over := make(chan struct{})
		go func() {
			defer close(over)
			random := rand.New(rand.NewPCG(seed, 2))
			for range 8 {
				plain := l.connect()
				conn := tls.Client(plain, conf)
				hello := greeting{Name: "x", Process: "x", Version: protocol}
				if random.IntN(3) == 0 {
					hello.Name = []string{"a", "", "x\x1b", strings.Repeat("x", 5000)}[random.IntN(4)]
				}
				if assert.NoError(t, sender[greeting](conn)([]greeting{hello})) && random.IntN(4) > 0 {
					go func() { // it reads, or does not
						b := make([]byte, 1<<16)
						for {
							if _, err := conn.Read(b); err != nil {
								return
							}
						}
					}()
				}
				for range random.IntN(40) {
					if _, err := conn.Write(wild(random)); err != nil {
						break // the store has hung up
					}
					time.Sleep(time.Duration(random.IntN(int(10 * time.Millisecond))))
				}
				_ = plain.Close()
			}
		}()

		const rounds = 50
		for i := range rounds {
			value := []byte(strconv.Itoa(i))
			require.NoError(t, a.Set(ctx, "a/news", value))
			got, err := b.Get(ctx, "a/news")
			require.NoError(t, err)
			require.Equal(t, value, got, "seed %d", seed)
			sum, err := b.Add(ctx, "b/count", 2)
			require.NoError(t, err)
			require.EqualValues(t, 2*(i+1), sum, "seed %d", seed)
			later := fmt.Sprint("b/later/", i)
			time.AfterFunc(time.Millisecond, func() { b.Post(later, value) })
			got, err = a.Get(ctx, later)
			require.NoError(t, err)
			require.Equal(t, value, got, "seed %d", seed)
			now, ok, err := b.CompareAndSet(ctx, "b/lock", 0, value, Lease)
			require.NoError(t, err)
			require.True(t, ok, "seed %d", seed)
			require.NoError(t, b.Delete(ctx, "b/lock", now.Version))
			held, err := b.List(ctx, "a/lease")
			require.NoError(t, err)
			require.Len(t, held, 1, "seed %d", seed)
			time.Sleep(time.Duration(random.IntN(int(20 * time.Millisecond))))
		}
		<-over
		time.Sleep(time.Minute)
		require.EqualValues(t, rounds, news.Load(), "seed %d", seed)
		server.mu.Lock()
		assert.Len(t, server.sessions, 2, "seed %d: others have ended", seed)
		assert.Len(t, server.state.sessions, 3, "seed %d", seed)
		assert.Len(t, server.state.watches, 1, "seed %d", seed)
		assert.Empty(t, server.state.waiting, "seed %d", seed)
		for key, e := range server.state.entries {
			assert.False(t, e.lease && server.state.sessions[e.session] == nil, "seed %d: the lease of %q", seed, key)
		}
		server.mu.Unlock()
		require.NoError(t, errors.Join(a.Close(), b.Close(), server.Close()))
	})
}

// TestBesieged has somebody who knows the secret say anything to a store: what others have there stays right, and nothing of it is
// left when it has gone.
func TestBesieged(t *testing.T) {
	logtest.Capture(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for i := range uint64(20) {
		if besieged(t, seed+i); t.Failed() {
			return
		}
	}
}

// FuzzBesieged is TestBesieged for other seeds.
func FuzzBesieged(f *testing.F) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	f.Add(uint64(1))
	f.Fuzz(besieged)
}

// A sum beyond 64 bits is refused.
func TestCountersDoNotWrap(t *testing.T) {
	var s state
	s.Open(1)
	for _, c := range [][2]int64{{math.MaxInt64, 1}, {math.MaxInt64, math.MaxInt64}, {math.MinInt64, -1}, {math.MinInt64, math.MinInt64}, {-1, math.MinInt64}} {
		s.Apply(1, &request{Op: opSet, Key: "k", Value: strconv.AppendInt(nil, c[0], 10)})
		answer := s.Apply(1, &request{ID: 1, Op: opAdd, Key: "k", Delta: c[1]})
		assert.Contains(t, answer[0].Fault, "no counter", "%d", c)
		assert.Equal(t, strconv.FormatInt(c[0], 10), string(s.entries["k"].value))
	}
}
