package tcp

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/jobtest"
	"github.com/tutti-go/tutti/internal/networktest"
)

// lonely is rank 0 of two, which waits for the other one, and what somebody who knows the secret may say to it.
func lonely(t *testing.T) (greets func(change func(*hello)) error, join func()) {
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	server := store.NewServer(store.Options{})
	t.Cleanup(func() { assert.NoError(t, server.Close()) })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	var all sync.WaitGroup
	start := func(rank int) {
		all.Go(func() {
			c, err := New(ctx, server.Local(string(rune('0'+rank))), Config{Rank: rank, WorldSize: 2, TLS: conf, Listen: "localhost", Connections: 2})
			if assert.NoError(t, err) {
				assert.NoError(t, c.Barrier(ctx))
				assert.NoError(t, c.Close())
			}
		})
	}
	start(0)
	text, err := server.Local("observer").Get(ctx, "tcp//0")
	require.NoError(t, err)
	var r record
	require.NoError(t, json.Unmarshal(text, &r))
	k := &connector{tls: conf.Clone()}
	k.tls.NextProtos = []string{protocol}
	greets = func(change func(*hello)) error {
		h := hello{Nonce: r.Nonce, Attempt: 1, Silence: int64(DefaultSilence), From: 1, Size: 2, Control: uint32(schedule.ControlBytes),
			Lanes: 2, Window: minWindow}
		change(&h)
		conn, err := k.dial(ctx, r.Addresses[0])
		require.NoError(t, err)
		for range pings {
			if err := greet(ctx, conn, h); err != nil || h.Lanes > 0 {
				return err
			}
		}
		return greet(ctx, conn, h)
	}
	return greets, func() {
		start(1)
		all.Wait()
	}
}

// The accepting side has a lane before it says welcome, and says why it has not.
func TestWelcome(t *testing.T) {
	greets, join := lonely(t)
	require.NoError(t, greets(func(h *hello) { h.Attempt = 5 }))
	for _, change := range []func(*hello){
		func(h *hello) { h.Attempt, h.Lane = 4, 1 },
		func(h *hello) { h.Attempt = 5 },
		func(h *hello) { h.Attempt, h.Lane, h.Lanes = 5, 1, 3 },
	} {
		err := greets(change)
		require.ErrorContains(t, err, "a later attempt has begun")
		assert.NotErrorIs(t, err, store.ErrRefused)
	}
	join()
}

// TestHalfOpen has a rank vanish, without a word, between its first lane and its second. Another process takes its place.
func TestHalfOpen(t *testing.T) {
	greets, join := lonely(t)
	for attempt := range uint64(8) {
		require.NoError(t, greets(func(h *hello) { h.Attempt = attempt + 1 }))
	}
	join()
}

// TestRestart has rank 0 end when rank 1 is connected to it and waits for rank 2. The next process of rank 0 is found.
func TestRestart(t *testing.T) {
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	own := conf.Clone()
	own.NextProtos = []string{protocol}
	server := store.NewServer(store.Options{})
	t.Cleanup(func() { assert.NoError(t, server.Close()) })
	l, err := net.Listen("tcp", "localhost:0")
	require.NoError(t, err)
	first := server.Local("first")
	text, err := json.Marshal(record{protocol, 1, []string{l.Addr().String()}})
	require.NoError(t, err)
	require.NoError(t, first.Set(t.Context(), "tcp//0", text, store.Lease))

	var all sync.WaitGroup
	start := func(rank int) {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			c, err := New(ctx, server.Local(string(rune('0'+rank))), Config{Rank: rank, WorldSize: 3, TLS: conf, Listen: "localhost", Connections: 1})
			if assert.NoError(t, err) {
				assert.NoError(t, c.Barrier(ctx))
				assert.NoError(t, c.Close())
			}
		})
	}
	start(1)
	plain, err := l.Accept()
	require.NoError(t, err)
	conn := tls.Server(plain, own)
	for h := (hello{}); h.Lanes == 0; {
		require.NoError(t, binary.Read(conn, binary.LittleEndian, &h))
		_, err := conn.Write([]byte{byte(welcome)})
		require.NoError(t, err)
	}
	require.NoError(t, conn.Close())
	plain, err = l.Accept() // rank 1 has noticed, and tries again
	require.NoError(t, err)
	require.NoError(t, plain.Close())
	require.NoError(t, l.Close())
	require.NoError(t, first.Close())
	start(0)
	start(2)
	all.Wait()
}

// TestSlowPeers has ranks 1 and 2 reach each other only when rank 0, which is connected to both, has heard nothing of
// them for twice Silence: ranks that still connect say nothing, and are not lost for that.
func TestSlowPeers(t *testing.T) {
	t.Parallel()
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	l, err := net.Listen("tcp", "localhost:0")
	require.NoError(t, err)
	address := jobtest.Address(t, 1)
	var open atomic.Bool
	fickle(t, l, func() string { return address }, func(int) bool { return open.Load() })
	server := store.NewServer(store.Options{})
	t.Cleanup(func() { assert.NoError(t, server.Close()) })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	config := func(rank int) Config {
		return Config{Rank: rank, WorldSize: 3, TLS: conf, Listen: "localhost", Connections: 1, Silence: time.Second}
	}
	var all sync.WaitGroup
	use := func(c comm.Communicator, err error) {
		if assert.NoError(t, err) {
			assert.NoError(t, c.Barrier(ctx))
			assert.NoError(t, c.Close())
		}
	}
	for rank := 1; rank <= 2; rank++ {
		c := config(rank)
		if rank == 1 {
			c.Listen = address
			c.Advertise = []string{l.Addr().String()}
		}
		all.Go(func() { use(New(ctx, server.Local(string(rune('0'+rank))), c)) })
	}
	kv := server.Local("0")
	n, err := newNode(ctx, kv, config(0))
	require.NoError(t, err)
	all.Go(func() { use(n.form(ctx, kv, config(0))) })
	require.Eventually(t, func() bool { return n.ticks.Load() > 2*beats }, time.Minute, n.tick)
	open.Store(true)
	all.Wait()
	for _, p := range n.pairs {
		assert.NotEqual(t, int64(unheard), p.lastReceived.Load(), "rank %d may be silent for ever", p.rank)
	}
}

// TestLostStore loses the store while one rank waits for a higher one, and one for a lower one.
func TestLostStore(t *testing.T) {
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	server := store.NewServer(store.Options{})
	l, err := net.Listen("tcp", "localhost:0")
	require.NoError(t, err)
	server.Serve(l, conf)
	observer := server.Local("observer")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var all sync.WaitGroup
	for rank := range 2 {
		world := string(rune('0' + rank))
		all.Go(func() {
			kv, err := store.Dialer{Addresses: []string{l.Addr().String()}, TLS: conf, Name: world}.Dial(ctx)
			if !assert.NoError(t, err) {
				return
			}
			_, err = New(ctx, kv, Config{Rank: rank, WorldSize: 2, World: world, TLS: conf, Listen: "localhost"})
			assert.ErrorIs(t, err, comm.ErrPeerFailed)
			assert.ErrorContains(t, err, "store")
			assert.NotErrorIs(t, err, comm.ErrTimeout)
		})
		_, err := observer.Get(ctx, (&Config{World: world}).key(rank))
		require.NoError(t, err)
	}
	require.NoError(t, server.Close())
	all.Wait()
}

// dropping is a network whose firewall drops what ranks send.
type dropping struct{ networktest.Pipes }

func (*dropping) Dial(_ context.Context, network, address string) (net.Conn, error) {
	a, err := net.ResolveTCPAddr(network, address)
	if err != nil {
		return nil, err
	}
	return nil, &net.OpError{Op: "dial", Net: network, Addr: a, Err: os.ErrDeadlineExceeded}
}

// counted is a store that tells a test of each attempt to connect, which begins with a Get.
type counted struct {
	store.Store
	attempts chan<- struct{}
}

func (c counted) Get(ctx context.Context, key string) ([]byte, error) {
	select {
	case c.attempts <- struct{}{}:
	case <-c.Done():
	case <-ctx.Done():
	}
	return c.Store.Get(ctx, key)
}

// A rank that loses the store, as rank 0 has waited in vain and ended, says first what has kept it waiting itself.
func TestLostStoreIsNoReason(t *testing.T) {
	const (
		tried = "cannot be reached at [10.0.0.1:29500 10.0.1.1:29500]: " +
			"dial tcp 10.0.0.1:29500: i/o timeout; dial tcp 10.0.1.1:29500: i/o timeout"
		gone = "; the store was lost meanwhile: peer failed: the job's store does not answer"
	)
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	for name, test := range map[string]struct {
		addresses []string // of rank 0; nil if it has published none
		attempts  int      // that rank 1 has begun when the store is lost
		want      string
	}{
		"a firewall": {
			addresses: []string{"10.0.0.1:29500", "10.0.1.1:29500"},
			attempts:  2,
			want:      "no connection to rank 0; rank 0: " + tried + " (does a firewall let the machines reach each other?)" + gone,
		},
		"no address": {
			attempts: 1,
			want:     "no connection to rank 0; rank 0: it has published no address" + gone,
		},
	} {
		t.Run(name, func(t *testing.T) {
			server := store.NewServer(store.Options{})
			l, err := net.Listen("tcp", "localhost:0")
			require.NoError(t, err)
			server.Serve(l, conf)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			observer := server.Local("observer")
			if test.addresses != nil {
				text, err := json.Marshal(record{protocol, 1, test.addresses})
				require.NoError(t, err)
				require.NoError(t, observer.Set(ctx, "tcp//0", text))
			}
			kv, err := store.Dialer{Addresses: []string{l.Addr().String()}, TLS: conf, Name: "1"}.Dial(ctx)
			require.NoError(t, err)
			attempts := make(chan struct{})
			failed := make(chan error, 1)
			go func() {
				_, err := New(ctx, counted{kv, attempts}, Config{Rank: 1, WorldSize: 2, TLS: conf, Network: new(dropping)})
				failed <- err
			}()
			for range test.attempts {
				select {
				case <-attempts:
				case err := <-failed:
					require.FailNow(t, "rank 1 does not wait", "%v", err)
				}
			}
			if test.addresses != nil {
				text, err := observer.Get(ctx, "tcp//reports/0/1")
				require.NoError(t, err)
				assert.Equal(t, tried, string(text), "what rank 0 hears")
			}
			require.NoError(t, server.Close())
			err = <-failed
			require.ErrorIs(t, err, comm.ErrPeerFailed)
			assert.NotErrorIs(t, err, comm.ErrTimeout)
			assert.ErrorContains(t, err, test.want)
		})
	}
}

// fickle is a forwarder that hangs up on some of those who connect, as a gate does where it is crowded.
func fickle(t *testing.T, l net.Listener, to func() string, takes func(number int) bool) {
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for number := 0; ; number++ {
			a, err := l.Accept()
			if err != nil {
				return
			}
			if !takes(number) {
				_ = a.Close()
				continue
			}
			b, err := net.Dial("tcp", to())
			if err != nil {
				_ = a.Close()
				continue
			}
			for _, ends := range [][2]net.Conn{{a, b}, {b, a}} {
				go func() {
					_, _ = io.Copy(ends[0], ends[1])
					_ = ends[0].Close()
				}()
			}
		}
	}()
}

// A lane on which the other side hangs up is made again, and not all of them.
func TestLanesAgain(t *testing.T) {
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	l, err := net.Listen("tcp", "localhost:0")
	require.NoError(t, err)
	address := jobtest.Address(t, 1)
	taken := 0 // of the forwarder's goroutine
	fickle(t, l, func() string { return address }, func(number int) bool {
		if number%3 > 0 {
			return false
		}
		taken++
		return taken <= 4
	})
	server := store.NewServer(store.Options{})
	t.Cleanup(func() { assert.NoError(t, server.Close()) })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var all sync.WaitGroup
	for rank := range 2 {
		all.Go(func() {
			c := Config{Rank: rank, WorldSize: 2, TLS: conf, Listen: address, Advertise: []string{l.Addr().String()}, Connections: 4}
			if rank == 1 {
				c.Listen = "localhost"
			}
			world, err := New(ctx, server.Local(string(rune('0'+rank))), c)
			if assert.NoError(t, err) {
				assert.Equal(t, 4, Lanes(world))
				assert.NoError(t, world.Barrier(ctx))
				assert.NoError(t, world.Close())
			}
		})
	}
	all.Wait()
}

// A peer that only measures the round trip is refused in the end: its answers would fill a connection that it does not
// read.
func TestPingsAreBounded(t *testing.T) {
	greets, join := lonely(t)
	require.ErrorContains(t, greets(func(h *hello) { h.Lanes = 0 }), "measures the round trip more than 4 times")
	join()
}

// FuzzRecord has a rank read what another one may have published.
func FuzzRecord(f *testing.F) {
	for _, text := range []string{`{"Protocol":"tutti-tcp/1","Nonce":1,"Addresses":["a:1"]}`, `{"Protocol":"tutti-tcp/5"}`, `[]`, ``,
		`{"Protocol":"tutti-tcp/1","Addresses":[]}`, `{"Protocol":"tutti-tcp/1","Addresses":["a"]}`, `{"Protocol":"tutti-tcp/1","Nonce":-1}`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := readRecord(3, text)
		if err != nil {
			assert.Contains(t, err.Error(), "rank 3")
			assert.Less(t, len(err.Error()), 1000)
			return
		}
		assert.Equal(t, protocol, r.Protocol)
		assert.NotEmpty(t, r.Addresses)
	})
}

// FuzzHello has a rank judge hellos of any kind: it welcomes none that it has no place for.
func FuzzHello(f *testing.F) {
	for _, h := range []hello{{}, {Nonce: 1, From: 2, To: 1, Size: 3, Control: uint32(schedule.ControlBytes), Silence: int64(DefaultSilence), Lane: 1, Lanes: 2, Window: minWindow}} {
		b, err := binary.Append(nil, binary.LittleEndian, h)
		require.NoError(f, err)
		f.Add(b)
	}
	k := &connector{node: &node{rank: 1, size: 3}, config: Config{Silence: DefaultSilence}, record: record{Nonce: 1}}
	f.Fuzz(func(t *testing.T, b []byte) {
		var h hello
		if _, err := binary.Decode(b, binary.LittleEndian, &h); err != nil {
			return
		}
		v, reason := k.judge(&h)
		if v != welcome {
			assert.NotEmpty(t, reason)
			assert.LessOrEqual(t, len(reason), longestReason)
			return
		}
		assert.Equal(t, []uint32{2, 1, 3}, []uint32{h.From, h.To, h.Size})
		if h.Lanes > 0 {
			assert.Less(t, h.Lane, h.Lanes)
			assert.LessOrEqual(t, h.Lanes, uint32(maxLanes))
			assert.LessOrEqual(t, h.Window, uint32(maxWindow))
		}
	})
}
