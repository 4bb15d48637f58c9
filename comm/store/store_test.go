package store

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/gate"
	"github.com/tutti-go/tutti/internal/logtest"
)

// pipes is a listener without a network, whose time a bubble can have stand still.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
}

func newPipes() *pipes { return &pipes{make(chan net.Conn), make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { close(p.closed); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

// receiver is an end of a pipe that takes all of a write at once, as a socket does: who closes it leaves nobody in one.
type receiver struct {
	net.Conn
	in *bufio.Reader
}

func (r *receiver) Read(b []byte) (int, error) { return r.in.Read(b) }

// pipe is net.Pipe of receivers of writes of at most some bytes.
func pipe(bytes int) (here, there net.Conn) {
	here, there = net.Pipe()
	return &receiver{here, bufio.NewReaderSize(here, bytes)}, &receiver{there, bufio.NewReaderSize(there, bytes)}
}

// connect makes a connection, of which it returns one end.
func (p *pipes) connect() net.Conn {
	here, there := pipe(1 << 16)
	p.conns <- there
	return here
}

func mustTLS(t testing.TB, secret string) *tls.Config {
	conf, err := TLS([]byte(secret), "test")
	require.NoError(t, err)
	return conf
}

// clients runs a test with two clients of a store: in the store's process, over TLS, and by way of a proxy each. Time
// stands still while all wait.
func clients(t *testing.T, f func(t *testing.T, ctx context.Context, a, b *Client)) {
	for _, way := range []string{"local", "tls", "proxy"} {
		t.Run(way, func(t *testing.T) {
			conf := mustTLS(t, "s")
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				server := NewServer(Options{})
				var both [2]*Client
				l := newPipes()
				server.Serve(l, conf)
				var proxies []*Proxy
				for i := range both {
					if way == "local" {
						both[i] = server.Local(strconv.Itoa(i))
						continue
					}
					if way == "proxy" {
						p := NewProxy(0, func(context.Context, string) (Backend, error) { return server.Local("a session"), nil })
						l = newPipes()
						p.Serve(l, conf)
						proxies = append(proxies, p)
					}
					var err error
					both[i], err = Dialer{TLS: conf}.introduce(ctx, l.connect(), greeting{Name: strconv.Itoa(i), Version: protocol}, glance)
					require.NoError(t, err)
				}
				f(t, ctx, both[0], both[1])
				require.NoError(t, errors.Join(both[0].Close(), both[1].Close()))
				for _, p := range proxies {
					require.NoError(t, p.Close())
				}
				require.NoError(t, server.Close())
			})
		})
	}
}

func TestGetWaitsForAKey(t *testing.T) {
	clients(t, func(t *testing.T, ctx context.Context, a, b *Client) {
		began := time.Now()
		set := make(chan error, 1)
		time.AfterFunc(time.Hour, func() { set <- b.Set(ctx, "k", []byte("v")) })
		v, err := a.Get(ctx, "k")
		require.NoError(t, err)
		assert.Equal(t, "v", string(v))
		assert.Equal(t, time.Hour, time.Since(began))
		require.NoError(t, <-set)
		v, err = b.Get(ctx, "k")
		require.NoError(t, err)
		assert.Equal(t, "v", string(v))
	})
}

// A wait ends with its context, and says for what it waited.
func TestWaitsEndWithTheirContext(t *testing.T) {
	clients(t, func(t *testing.T, ctx context.Context, a, b *Client) {
		require.NoError(t, b.Set(ctx, "rank 1", nil))
		require.NoError(t, b.Set(ctx, "rank 3", nil))
		limited, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		began := time.Now()
		err := a.Wait(limited, "rank 1", "rank 2", "rank 3", "rank 4")
		assert.ErrorIs(t, err, comm.ErrTimeout)
		assert.ErrorContains(t, err, "missing: rank 2, rank 4")
		assert.Equal(t, time.Minute, time.Since(began))
		canceled, cancel := context.WithCancel(ctx)
		time.AfterFunc(time.Second, cancel)
		_, err = a.Get(canceled, "rank 2")
		assert.ErrorIs(t, err, comm.ErrCanceled)
		assert.ErrorContains(t, err, `"rank 2"`)
		require.NoError(t, b.Set(ctx, "rank 2", nil)) // for which nobody waits any more
		require.NoError(t, b.Set(ctx, "rank 4", nil))
		require.NoError(t, a.Wait(ctx, "rank 1", "rank 2", "rank 3", "rank 4"))
	})
}

func TestCountersAndSwaps(t *testing.T) {
	clients(t, func(t *testing.T, ctx context.Context, a, b *Client) {
		var wg sync.WaitGroup
		var mu sync.Mutex
		seen := map[int64]bool{}
		for i := range 100 {
			wg.Go(func() {
				n, err := []*Client{a, b}[i%2].Add(ctx, "n", 1)
				assert.NoError(t, err)
				mu.Lock()
				defer mu.Unlock()
				seen[n] = true
			})
		}
		wg.Wait()
		assert.Len(t, seen, 100)
		v, err := a.Get(ctx, "n")
		require.NoError(t, err)
		assert.Equal(t, "100", string(v))

		first, ok, err := a.CompareAndSet(ctx, "leader", 0, []byte("a"))
		require.NoError(t, err)
		require.True(t, ok)
		now, ok, err := b.CompareAndSet(ctx, "leader", 0, []byte("b"))
		require.NoError(t, err)
		assert.False(t, ok)
		assert.Equal(t, "a", string(now.Value))
		now, ok, err = b.CompareAndSet(ctx, "leader", now.Version, []byte("b"))
		require.NoError(t, err)
		assert.True(t, ok)
		assert.Greater(t, now.Version, first.Version)
		require.NoError(t, a.Delete(ctx, "leader", first.Version)) // which it no longer has
		v, err = a.Get(ctx, "leader")
		require.NoError(t, err)
		assert.Equal(t, "b", string(v))
		_, err = a.Add(ctx, "leader", 1)
		assert.ErrorIs(t, err, comm.ErrArgument)
		assert.ErrorIs(t, a.Set(ctx, "\xff", nil), comm.ErrArgument)
	})
}

// A watch sees what is there and then every change, in order; leases vanish when their owner is gone, and other keys
// of that session stay.
func TestWatchesAndLeases(t *testing.T) {
	clients(t, func(t *testing.T, ctx context.Context, a, b *Client) {
		require.NoError(t, b.Set(ctx, "m/1", []byte("b"), Lease))
		require.NoError(t, b.Set(ctx, "other", nil, Lease))
		require.NoError(t, b.Set(ctx, "m/2", []byte("stays")))
		events := make(chan string, 100)
		stop, err := a.Watch(ctx, "m/", func(e Event) { events <- fmt.Sprintf("%s=%s %v", e.Key, e.Value, e.Deleted) })
		require.NoError(t, err)
		assert.Equal(t, "m/1=b false", <-events)
		assert.Equal(t, "m/2=stays false", <-events)
		for i := range 50 {
			b.Post("m/3", []byte(strconv.Itoa(i)))
		}
		for i := range 50 {
			require.Equal(t, fmt.Sprintf("m/3=%d false", i), <-events)
		}
		require.NoError(t, b.Close())
		assert.Equal(t, "m/1=b true", <-events)
		all, err := a.List(ctx, "m/")
		require.NoError(t, err)
		require.Len(t, all, 2)
		assert.Equal(t, "stays", string(all[0].Value))
		stop()
		require.NoError(t, a.Set(ctx, "m/4", nil))
		synctest.Wait()
		assert.Empty(t, events)
		assert.ErrorIs(t, b.Set(ctx, "m/5", nil), comm.ErrClosed)
	})
}

// Both sides find out that the other one has stopped, when the silence is over, and its leases vanish.
func TestSilence(t *testing.T) {
	logtest.Capture(t)
	conf := mustTLS(t, "s")
	synctest.Test(t, func(t *testing.T) {
		const silence = 2 * time.Second
		server, l := NewServer(Options{Silence: silence}), newPipes()
		server.Serve(l, conf)
		stopped := &stoppable{Conn: l.connect(), stop: make(chan struct{})}
		c, err := Dialer{TLS: conf}.introduce(t.Context(), stopped, greeting{Name: "1", Version: protocol}, glance)
		require.NoError(t, err)
		watcher := server.Local("0")
		require.NoError(t, c.Set(t.Context(), "k", nil, Lease))
		gone := make(chan time.Time, 1)
		_, err = watcher.Watch(t.Context(), "k", func(e Event) {
			if e.Deleted {
				gone <- time.Now()
			}
		})
		require.NoError(t, err)
		time.Sleep(time.Hour)
		require.NoError(t, c.Err(), "heartbeats keep it")
		close(stopped.stop)
		began := time.Now()
		late := (<-gone).Sub(began)
		assert.Greater(t, late, silence/2)
		assert.LessOrEqual(t, late, silence)
		<-c.Done()
		assert.ErrorIs(t, c.Err(), comm.ErrPeerFailed)
		require.NoError(t, errors.Join(c.Close(), server.Close()))
	})
}

// stoppable sends nothing when it is stopped.
type stoppable struct {
	net.Conn
	stop chan struct{}
}

func (s *stoppable) Write(b []byte) (int, error) {
	select {
	case <-s.stop:
		return len(b), nil
	default:
		return s.Conn.Write(b)
	}
}

// A process that does not take what it watches loses its session; nobody waits for it.
func TestAReaderThatStops(t *testing.T) {
	conf := mustTLS(t, "s")
	synctest.Test(t, func(t *testing.T) {
		server, l := NewServer(Options{}), newPipes()
		server.Serve(l, conf)
		c, err := Dialer{TLS: conf}.introduce(t.Context(), l.connect(), greeting{Name: "1", Version: protocol}, glance)
		require.NoError(t, err)
		release := make(chan struct{})
		_, err = c.Watch(t.Context(), "k", func(Event) { <-release })
		require.NoError(t, err)
		writer := server.Local("0")
		require.NoError(t, c.Set(t.Context(), "lease", nil, Lease))
		began := time.Now()
		for range 2*mostQueued/MaxValue + 100 {
			require.NoError(t, writer.Set(t.Context(), "k", make([]byte, MaxValue)))
		}
		assert.Zero(t, time.Since(began), "the writer waited")
		synctest.Wait()
		all, err := writer.List(t.Context(), "lease")
		require.NoError(t, err)
		assert.Empty(t, all)
		close(release)
		<-c.Done()
		require.NoError(t, errors.Join(c.Close(), server.Close()))
	})
}

// When the store ends, what was said before has reached the clients, and what they wait for ends.
func TestTheEndOfAStore(t *testing.T) {
	conf := mustTLS(t, "s")
	synctest.Test(t, func(t *testing.T) {
		server, l := NewServer(Options{}), newPipes()
		server.Serve(l, conf)
		owner := server.Owner("0")
		c, err := Dialer{TLS: conf}.introduce(t.Context(), l.connect(), greeting{Name: "1", Version: protocol}, glance)
		require.NoError(t, err)
		var last string
		_, err = c.Watch(t.Context(), "", func(e Event) { last = string(e.Value) })
		require.NoError(t, err)
		for i := range 1000 {
			owner.Post("k", []byte(strconv.Itoa(i)))
		}
		require.NoError(t, owner.Close())
		_, err = c.Get(t.Context(), "never")
		assert.ErrorIs(t, err, comm.ErrPeerFailed)
		assert.ErrorContains(t, err, "the job's store does not answer: its process has ended")
		assert.Equal(t, "999", last)
		require.NoError(t, c.Close())
		_, err = Dialer{TLS: conf}.introduce(t.Context(), stillOpen(l), greeting{Name: "2", Version: protocol}, glance)
		assert.Error(t, err)
	})
}

// stillOpen is a connection that nobody accepts.
func stillOpen(*pipes) net.Conn {
	here, there := net.Pipe()
	_ = there.Close()
	return here
}

// listen has a server on a port of this host.
func listen(t testing.TB, server *Server, secret string) (address string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server.Serve(l, mustTLS(t, secret))
	t.Cleanup(func() { _ = server.Close() })
	return l.Addr().String()
}

// A client that sends a handshake byte by byte, or stops in the middle, has ten seconds; others wait for nobody
// meanwhile.
func TestSlowSenders(t *testing.T) {
	conf := mustTLS(t, "s")
	synctest.Test(t, func(t *testing.T) {
		l := newPipes()
		g := &gate.Gate{Name: "test", Places: 8}
		served := make(chan struct{})
		go g.Serve(l, conf, func(*tls.Conn) { served <- struct{}{} })
		began := time.Now()
		var slow sync.WaitGroup
		for kind := range 4 {
			conn := l.connect()
			slow.Go(func() {
				header := []byte{22, 3, 1, 2, 0} // of a record of 512 bytes
				for i := 0; ; i++ {
					b := []byte{1}
					if i < len(header) {
						b = header[i:][:1]
					}
					if _, err := conn.Write(b); err != nil {
						break
					}
					if kind%2 == 0 && i == 3 {
						_, _ = conn.Read(b) // half a header, and nothing more
					}
					time.Sleep(100 * time.Millisecond)
				}
				assert.InDelta(t, gate.Patience.Seconds(), time.Since(began).Seconds(), 0.1)
			})
		}
		assert.NoError(t, tls.Client(l.connect(), conf).HandshakeContext(t.Context()))
		<-served
		assert.Zero(t, time.Since(began), "the friend waited for no stranger")
		slow.Wait()
		synctest.Wait()
		times, due := g.Log.Count(gate.Silence)
		assert.Equal(t, 5, times, "four refusals, and this look")
		assert.False(t, due)
		require.NoError(t, l.Close())
	})
}

func TestIPv6(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skip(err)
	}
	server := NewServer(Options{})
	server.Serve(l, mustTLS(t, "s"))
	defer server.Close() //nolint:errcheck // the test is over
	c, err := dialer(t, gate.Addresses(l)[0], "s", "1").Dial(t.Context())
	require.NoError(t, err)
	require.NoError(t, c.Set(t.Context(), "key", []byte("value")))
	value, err := c.Get(t.Context(), "key")
	require.NoError(t, err)
	assert.Equal(t, "value", string(value))
	assert.Equal(t, "::1", c.LocalAddr().(*net.TCPAddr).IP.String())
	require.NoError(t, c.Close())
}

func dialer(t testing.TB, address, secret, name string) Dialer {
	return Dialer{Addresses: []string{address}, TLS: mustTLS(t, secret), Name: name}
}

// Strangers are refused by a reason, learn nothing and delay nobody: garbage, silence, half a handshake, another
// secret, no certificate.
func TestStrangersAreRefused(t *testing.T) {
	right, wrong, bare, old := mustTLS(t, "right"), mustTLS(t, "wrong"), mustTLS(t, "right"), mustTLS(t, "right")
	bare.Certificates = nil
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	synctest.Test(t, func(t *testing.T) {
		log := logtest.Capture(t)
		server, l := NewServer(Options{}), newPipes()
		server.Serve(l, right)
		for _, say := range []string{"", "GET / HTTP/1.1\r\n\r\n" + strings.Repeat("x", 1000), "\x16\x03\x01\x02\x00\x01\x00"} {
			c := l.connect()
			_, _ = io.WriteString(c, say) // fails if the refusal is faster
			require.NoError(t, c.Close())
		}
		_, err := Dialer{TLS: wrong}.introduce(t.Context(), l.connect(), greeting{Name: "2", Version: protocol}, glance)
		require.ErrorIs(t, err, ErrRefused)
		require.ErrorContains(t, err, "it knows another secret")
		for _, conf := range []*tls.Config{bare, old} {
			c := tls.Client(l.connect(), conf)
			_, err = c.Read(make([]byte, 1)) // the server looks after the handshake
			require.Error(t, err)
			require.NoError(t, c.NetConn().Close())
		}
		friend, err := Dialer{TLS: right}.introduce(t.Context(), l.connect(), greeting{Name: "1", Version: protocol}, glance)
		require.NoError(t, err)
		require.NoError(t, friend.Set(t.Context(), "k", nil))
		require.NoError(t, friend.Close())
		synctest.Wait()
		for _, reason := range []string{gate.Silence, gate.Language, gate.Secret} {
			assert.Contains(t, log.String(), reason)
		}
		require.NoError(t, server.Close())
	})
}

// Connections that say nothing, more than the store keeps, delay nobody; some give way to others.
func TestSilentConnectionsDelayNobody(t *testing.T) {
	logtest.Capture(t)
	conf := mustTLS(t, "s")
	synctest.Test(t, func(t *testing.T) {
		const crowd, kept = 1000, 256
		server, l := NewServer(Options{}), newPipes()
		server.Serve(l, conf)
		began := time.Now()
		ends := make(chan error, crowd)
		for range crowd {
			c := l.connect()
			go func() {
				_, err := c.Read(make([]byte, 1))
				ends <- err
			}()
		}
		var c *Client
		var err error
		for range 5 { // the gate evicts handshakes by chance, also of the job's own processes, which try again
			c, err = Dialer{TLS: conf}.introduce(t.Context(), l.connect(), greeting{Name: "1", Version: protocol}, glance)
			if err == nil {
				break
			}
		}
		require.NoError(t, err)
		require.NoError(t, c.Set(t.Context(), "k", nil))
		require.NoError(t, c.Close())
		for range crowd - kept {
			assert.Error(t, <-ends)
		}
		assert.Zero(t, time.Since(began), "it waited for no stranger")
		require.NoError(t, server.Close())
	})
}

// A process of the job that has given up while this process was stopped is no stranger that says nothing.
func TestAttemptsWhileStopped(t *testing.T) {
	log := logtest.Capture(t)
	conf := mustTLS(t, "s")
	l, err := net.Listen("tcp", "localhost:0")
	require.NoError(t, err)
	conn, err := net.Dial("tcp", l.Addr().String()) // the system accepts it
	require.NoError(t, err)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(-time.Hour)))
	require.ErrorIs(t, tls.Client(conn, conf).Handshake(), os.ErrDeadlineExceeded)
	require.NoError(t, conn.Close())
	server := NewServer(Options{})
	server.Serve(l, conf)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "times=1") }, time.Minute, time.Millisecond)
	assert.Contains(t, log.String(), `reason="this process has not answered in time: was it stopped, or is its machine crowded?"`)
	require.NoError(t, server.Close())
}

// A stranger has 10 s, however slowly it speaks.
func TestSlowStrangers(t *testing.T) {
	log := logtest.Capture(t)
	conf := mustTLS(t, "s")
	synctest.Test(t, func(t *testing.T) {
		server, l := NewServer(Options{}), newPipes()
		server.Serve(l, conf)
		began := time.Now()
		c := l.connect()
		var err error
		for _, b := range []byte("\x16\x03\x01\x02\x00" + strings.Repeat("\x01", 100)) {
			if _, err = c.Write([]byte{b}); err != nil {
				break
			}
			time.Sleep(time.Second)
		}
		require.Error(t, err)
		assert.InDelta(t, gate.Patience, time.Since(began), float64(time.Second))
		synctest.Wait()
		assert.Contains(t, log.String(), gate.Silence)
		require.NoError(t, server.Close())
	})
}

// A process that knows the secret hears at once why it cannot be of the job.
func TestContradictionsAreNamed(t *testing.T) {
	log := logtest.Capture(t)
	server := NewServer(Options{Size: 3})
	server.Local("rank 0")
	address := listen(t, server, "s")
	as := func(name string, size int) Dialer {
		d := dialer(t, address, "s", name)
		d.Size = size
		return d
	}
	first, err := as("rank 1", 3).Dial(t.Context())
	require.NoError(t, err)
	for _, c := range []struct {
		d    Dialer
		says string
	}{
		{as("rank 2", 5), "rank 2 of 5 in a job of 3"},
		{as("rank 1", 3), "rank 1 is here already, from 127.0.0.1:"},
		{as("rank 0", 3), "rank 0 is here already, from this process"},
	} {
		_, err := c.d.Dial(t.Context())
		assert.ErrorIs(t, err, ErrRefused)
		assert.ErrorContains(t, err, c.says)
	}
	assert.Contains(t, log.String(), "rank 2 of 5 in a job of 3")
	last, err := first.Get(t.Context(), RefusedKey)
	require.NoError(t, err)
	assert.Contains(t, string(last), "rank 0 is here already")
	d := as("rank 2", 3)
	_, err = d.connect(t.Context(), address, greeting{Name: "rank 2", Size: 3, Version: 7}, glance)
	assert.ErrorIs(t, err, ErrRefused)
	assert.ErrorContains(t, err, "version 7 of the store's protocol, this process 3")
	gone := make(chan Event, 1)
	require.NoError(t, first.Set(t.Context(), "lease", nil, Lease))
	_, err = server.Local("observer").Watch(t.Context(), "lease", func(e Event) {
		if e.Deleted {
			gone <- e
		}
	})
	require.NoError(t, err)
	require.NoError(t, first.Close())
	<-gone // the store sees it at its own time
	again, err := as("rank 1", 3).Dial(t.Context())
	require.NoError(t, err)
	require.NoError(t, again.Close())
}

// TestVersions: whichever side is of another version, the process hears both, also where the store does not compare
// them, as the one of version 0.2.0.
func TestVersions(t *testing.T) {
	conf := mustTLS(t, "s")
	for answer, says := range map[string]string{
		`{}`:            "it speaks version 0 of the store's protocol, this process 3",
		`{"version":9}`: "it speaks version 9 of the store's protocol, this process 3",
		`{"version":9,"silence":-1,"refused":"2 speaks version 2 of the store's protocol, this process 9"}`: "this process 9",
	} {
		here, there := net.Pipe()
		go func() {
			defer there.Close() //nolint:errcheck // nothing is lost
			conn := tls.Server(there, conf)
			_, _ = conn.Read(make([]byte, 1<<10))
			_, _ = conn.Write([]byte(answer + "\n"))
			_, _ = io.Copy(io.Discard, conn)
		}()
		_, err := Dialer{TLS: conf}.introduce(t.Context(), here, greeting{Name: "2", Version: protocol}, glance)
		assert.ErrorIs(t, err, ErrRefused)
		assert.ErrorContains(t, err, "refused by the job's store")
		assert.ErrorContains(t, err, says)
	}
}

// A process that lost its connection before it was welcomed takes its own place.
func TestAProcessComesAgain(t *testing.T) {
	logtest.Capture(t)
	address := listen(t, NewServer(Options{}), "s")
	d, self := dialer(t, address, "s", "rank 1"), greeting{Name: "rank 1", Process: "p", Version: protocol}
	first, err := d.connect(t.Context(), address, self, glance) // stays open, as a lost host's connection does for the store
	require.NoError(t, err)
	second, err := d.connect(t.Context(), address, self, glance)
	require.NoError(t, err)
	<-first.Done()
	require.NoError(t, second.Set(t.Context(), "k", nil))
	require.NoError(t, second.Close())
}

// A server at the address that is not the store is not believed, whatever it says. A hang-up says nothing.
func TestAFalseStoreIsNotBelieved(t *testing.T) {
	log := logtest.Capture(t)
	for name, stranger := range map[string]func(net.Conn){
		"talks":          func(c net.Conn) { io.WriteString(c, "220 mail.example ESMTP \x1b[2J"+strings.Repeat("x", 200)) }, //nolint:errcheck
		"another secret": func(c net.Conn) { tls.Server(c, mustTLS(t, "guess")).Handshake() },                               //nolint:errcheck
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				t.Cleanup(func() { c.Close() }) //nolint:errcheck
				go stranger(c)
			}
		}()
		_, err = dialer(t, l.Addr().String(), "s", "1").Dial(t.Context())
		assert.ErrorIs(t, err, ErrRefused, name)
		assert.ErrorContains(t, err, "is not the store of this job", name)
		assert.NotContains(t, err.Error(), "\x1b")
		require.NoError(t, l.Close())
	}
	assert.Contains(t, log.String(), "found somebody else")
}

// tiredListener has no descriptors left at first.
type tiredListener struct {
	net.Listener
	failures int
}

func (l *tiredListener) Accept() (net.Conn, error) {
	if l.failures > 0 {
		l.failures--
		return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
	}
	return l.Listener.Accept()
}

func TestAFailedAcceptIsSurvived(t *testing.T) {
	log := logtest.Capture(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := NewServer(Options{})
	server.Serve(&tiredListener{l, 5}, mustTLS(t, "s"))
	c, err := dialer(t, l.Addr().String(), "s", "1").Dial(t.Context())
	require.NoError(t, err)
	require.NoError(t, errors.Join(c.Close(), server.Close()))
	assert.Contains(t, log.String(), "cannot accept")
}

// A store that hangs up at first, out of descriptors for instance, is tried again.
func TestAProcessTriesAgain(t *testing.T) {
	t.Parallel()
	logtest.Capture(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := NewServer(Options{})
	server.Serve(&busyListener{l, 7}, mustTLS(t, "s"))
	c, err := dialer(t, l.Addr().String(), "s", "1").Dial(t.Context())
	require.NoError(t, err)
	require.NoError(t, errors.Join(c.Close(), server.Close()))
}

// busyListener closes the first connections.
type busyListener struct {
	net.Listener
	closes int
}

func (l *busyListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil && l.closes > 0 {
		l.closes--
		_ = conn.Close()
	}
	return conn, err
}

// The certificate follows from the secret and the purpose alone.
func TestCertificates(t *testing.T) {
	of := func(secret, purpose string) []byte {
		conf, err := TLS([]byte(secret), purpose)
		require.NoError(t, err)
		return conf.Certificates[0].Certificate[0]
	}
	assert.Equal(t, of("s", "a"), of("s", "a"))
	assert.NotEqual(t, of("s", "a"), of("s", "b"))
	assert.NotEqual(t, of("s", "a"), of("t", "a"))
}

// FuzzSession has someone who knows the secret send anything: it hurts nobody else.
func FuzzSession(f *testing.F) {
	f.Add([]byte(`{"id":1,"op":"set","key":"k","value":"dg=="}` + "\n" + `{"id":2,"op":"get","key":"none"}` + "\n"))
	f.Add([]byte(`{"op":"steal","key":"x"}` + "\n" + `{"id":1,"op":"watch","key":""}` + "\n" + `{"id":1,"op":"stop","version":1}` + "\n"))
	f.Add([]byte(`{"id":18446744073709551615,"op":"add","key":"k","delta":-1}` + "\n[]\n\n{"))
	f.Add([]byte(`{"id":1,"op":"set","key":"news"}` + "\n" + `{"id":1,"op":"swap","key":"news","version":9}` + "\n"))
	slog.SetDefault(slog.New(slog.DiscardHandler))
	server := NewServer(Options{})
	address := listen(f, server, "s")
	conf := mustTLS(f, "s")
	friend := server.Local("friend")
	f.Fuzz(func(t *testing.T, data []byte) {
		conn, err := tls.Dial("tcp", address, conf)
		require.NoError(t, err)
		require.NoError(t, sender[greeting](conn)([]greeting{{Name: "fuzz", Process: "p", Version: protocol}}))
		_, _ = conn.Write(data)
		_ = conn.Close() // the server may have hung up
		require.NoError(t, friend.Set(t.Context(), "friend", []byte(t.Name())))
		v, err := friend.Get(t.Context(), "friend")
		require.NoError(t, err)
		require.Equal(t, t.Name(), string(v))
	})
}

// FuzzReplies has a client read anything from a store: it ends, or goes on.
func FuzzReplies(f *testing.F) {
	f.Add([]byte(`{"id":1,"entries":[{"key":"k","version":1}]}`))
	f.Add([]byte(`{"id":1}` + `{"event":true,"deleted":true}`))
	f.Add([]byte(`{"id":1,"fault":"no"}` + "\n[]"))
	conf := mustTLS(f, "s")
	f.Fuzz(func(t *testing.T, data []byte) {
		here, there := net.Pipe()
		go func() {
			conn := tls.Server(there, conf)
			defer there.Close() //nolint:errcheck // nothing is lost
			if conn.Handshake() == nil {
				_, _ = conn.Read(make([]byte, 1<<10))
				_, _ = conn.Write(append(fmt.Appendf(nil, `{"version":%d}`+"\n", protocol), data...))
				_ = conn.CloseWrite()
				_, _ = io.Copy(io.Discard, conn)
			}
		}()
		c, err := Dialer{TLS: conf}.introduce(t.Context(), here, greeting{Name: "1", Version: protocol}, glance)
		require.NoError(t, err)
		_, _ = c.Get(t.Context(), "k")
		<-c.Done()
	})
}
