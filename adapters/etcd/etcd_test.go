package etcd_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/tutti-go/tutti/adapters/etcd"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/internal/jobtest"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// limit is far longer than any wait here.
const limit = time.Minute

// server is an etcd that a test starts and can stop.
type server struct {
	dir    string
	client string // addresses
	peer   string
	more   []string // arguments
	cmd    *exec.Cmd
}

func newServer(t *testing.T, more ...string) *server {
	t.Helper()
	s := prepare(t)
	s.more = more
	s.start(t)
	return s
}

// prepare chooses the addresses of an etcd that has not been started.
func prepare(t *testing.T) *server {
	t.Helper()
	if _, err := exec.LookPath("etcd"); err != nil {
		t.Skip("no etcd in PATH; install etcd-server")
	}
	return &server{dir: t.TempDir(), client: "http://" + jobtest.Address(t, 1), peer: "http://" + jobtest.Address(t, 1)}
}

func (s *server) start(t *testing.T) {
	s.cmd = exec.Command("etcd", "--name", "one", "--data-dir", s.dir, "--listen-client-urls", s.client, "--advertise-client-urls", s.client,
		"--listen-peer-urls", s.peer, "--initial-advertise-peer-urls", s.peer, "--initial-cluster", "one="+s.peer, "--logger", "zap", "--log-level", "error")
	s.cmd.Args = append(s.cmd.Args, s.more...)
	s.cmd.Stderr = os.Stderr
	require.NoError(t, s.cmd.Start())
	t.Cleanup(s.stop)
	c := s.dial(t)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	_, err := c.Get(ctx, "up", clientv3.WithSerializable())
	require.NoError(t, err)
}

func (s *server) stop() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

func (s *server) dial(t *testing.T) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.client}, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// TestStore makes the same calls on an etcd, on one behind a proxy, and on the library's own store, and expects the
// same answers.
func TestStore(t *testing.T) {
	s := newServer(t)
	own := store.NewServer(store.Options{})
	defer own.Close()
	for name, open := range map[string]func(t *testing.T) store.Store{
		"own": func(t *testing.T) store.Store { return own.Local("test") },
		"etcd": func(t *testing.T) store.Store {
			kv, err := etcd.Dial(t.Context(), etcd.Config{Client: s.dial(t), Prefix: "/test/", Silence: 2 * time.Second})
			require.NoError(t, err)
			return kv
		},
		"proxy": func(t *testing.T) store.Store {
			client := s.dial(t)
			p := store.NewProxy(2*time.Second, func(ctx context.Context, _ string) (store.Backend, error) {
				return etcd.Dial(ctx, etcd.Config{Client: client, Prefix: "/proxy/", Silence: 2 * time.Second})
			})
			conf, err := store.TLS([]byte("a secret of tests"), "proxy")
			require.NoError(t, err)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			p.Serve(l, conf)
			t.Cleanup(func() { _ = p.Close() })
			kv, err := store.Dialer{Addresses: []string{l.Addr().String()}, TLS: conf, Name: "test"}.Dial(t.Context())
			require.NoError(t, err)
			checkMore(t, kv)
			return kv
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			a, b := open(t), open(t)
			defer b.Close()

			// A get waits for its key no longer than its context.
			short, stop := context.WithTimeout(ctx, 20*time.Millisecond)
			_, err := b.Get(short, "late")
			stop()
			require.ErrorIs(t, err, comm.ErrTimeout)
			var value []byte
			var got sync.WaitGroup
			got.Go(func() { value, err = b.Get(ctx, "late") })
			require.NoError(t, a.Set(ctx, "late", []byte("here")))
			got.Wait()
			require.NoError(t, err)
			assert.Equal(t, "here", string(value))

			// Of two clients that set a missing key, one succeeds.
			first, ok, err := a.CompareAndSet(ctx, "x", 0, []byte("a"))
			require.NoError(t, err)
			assert.True(t, ok)
			now, ok, err := b.CompareAndSet(ctx, "x", 0, []byte("b"))
			require.NoError(t, err)
			assert.False(t, ok)
			assert.Equal(t, "a", string(now.Value))
			assert.Equal(t, first.Version, now.Version)
			second, ok, err := b.CompareAndSet(ctx, "x", first.Version, []byte("c"))
			require.NoError(t, err)
			assert.True(t, ok)
			assert.Greater(t, second.Version, first.Version)

			// A watch delivers the existing keys, and then each change in order. Leased keys vanish with their
			// session.
			events := make(chan string, 100)
			require.NoError(t, a.Set(ctx, "watched/1", []byte("1"), store.Lease))
			stopWatch, err := b.Watch(ctx, "watched/", func(e store.Event) { events <- fmt.Sprint(e.Key, "=", string(e.Value), " ", e.Deleted) })
			require.NoError(t, err)
			require.NoError(t, a.Set(ctx, "other", nil))
			require.NoError(t, a.Set(ctx, "watched/2", []byte("2")))
			require.NoError(t, a.Set(ctx, "watched/2", []byte("3")))
			a.Drop("watched/2")
			for _, want := range []string{"watched/1=1 false", "watched/2=2 false", "watched/2=3 false", "watched/2=3 true"} {
				assert.Equal(t, want, <-events)
			}
			require.NoError(t, a.Err())
			require.NoError(t, a.Close())
			assert.Equal(t, "watched/1=1 true", <-events)
			<-a.Done()
			require.ErrorIs(t, a.Err(), comm.ErrClosed)
			require.ErrorIs(t, a.Set(ctx, "x", nil), comm.ErrClosed)
			stopWatch()
		})
	}
}

// checkMore makes the calls that only clients have.
func checkMore(t *testing.T, kv *store.Client) {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	first, err := kv.Add(ctx, "n", 2)
	require.NoError(t, err)
	second, err := kv.Add(ctx, "n", -5)
	require.NoError(t, err)
	assert.Equal(t, first-5, second)
	kv.Post("list/b", []byte("2"))
	kv.Post("list/a", []byte("1"))
	all, err := kv.List(ctx, "list/")
	require.NoError(t, err)
	require.Len(t, all, 2)
	assert.Equal(t, "list/a", all[0].Key)
	require.NoError(t, kv.Delete(ctx, "list/a", all[1].Version))
	require.NoError(t, kv.Wait(ctx, "list/a", "list/b"), "another version is not deleted")
	require.NoError(t, kv.Delete(ctx, "list/a", all[0].Version))
	require.NoError(t, kv.Delete(ctx, "list/b", 0))
	all, err = kv.List(ctx, "list/")
	require.NoError(t, err)
	assert.Empty(t, all)
}

func TestRefusals(t *testing.T) {
	_, err := etcd.Dial(t.Context(), etcd.Config{Prefix: "/x/", Silence: time.Second})
	require.ErrorIs(t, err, comm.ErrArgument)
	s := newServer(t)
	c := s.dial(t)
	kv, err := etcd.Dial(t.Context(), etcd.Config{Client: c, Prefix: "/x/", Silence: time.Second})
	require.NoError(t, err)
	s.stop()
	select {
	case <-kv.Done(): // nothing keeps the lease alive
		require.ErrorIs(t, kv.Err(), comm.ErrPeerFailed)
	case <-time.After(limit):
		t.Error("the session of an etcd that is gone has not ended")
	}
	_ = kv.Close()
}

// A write that finds the lease gone ends the session. Otherwise a session that lasts would refuse it.
func TestWriteToALostLease(t *testing.T) {
	client := newServer(t).dial(t)
	kv, err := etcd.Dial(t.Context(), etcd.Config{Client: client, Prefix: "/lost/", Silence: time.Minute})
	require.NoError(t, err)
	all, err := client.Leases(t.Context())
	require.NoError(t, err)
	require.Len(t, all.Leases, 1)
	_, err = client.Revoke(t.Context(), all.Leases[0].ID)
	require.NoError(t, err)
	err = kv.Set(t.Context(), "key", nil, store.Lease)
	require.ErrorIs(t, err, comm.ErrPeerFailed)
	require.ErrorIs(t, kv.Err(), comm.ErrPeerFailed)
	require.ErrorContains(t, kv.Err(), "the session's lease has ended")
	_ = kv.Close()
}

// TestElastic checks that members over an etcd go on when one is killed, and while etcd restarts.
func TestElastic(t *testing.T) {
	s := newServer(t)
	conf, err := store.TLS([]byte("a secret of tests"), "etcd")
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	const members = 3
	var last atomic.Uint64 // step at which a member is lost, after all three have trained; that member sets it
	last.Store(math.MaxUint64)
	values, errs := make([]float32, members), make([]error, members)
	var all sync.WaitGroup
	for i := range members {
		all.Go(func() {
			rt, value := cpu.New(), values[i:i+1]
			tensor, err := cpu.Wrap(rt, value)
			require.NoError(t, err)
			made := 0
			var m *elastic.Member
			client := s.dial(t)
			m, err = elastic.Join(ctx, elastic.Config{Name: fmt.Sprint("member ", i), Min: 2, Runtime: rt, Tensors: []*runtime.Tensor{tensor}, Silence: time.Second,
				Dial: func(ctx context.Context) (store.Store, error) {
					return etcd.Dial(ctx, etcd.Config{Client: client, Prefix: "/job/", Silence: 2 * time.Second})
				},
				Form: func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
					return tcp.New(ctx, kv, tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: conf, Listen: "localhost", Silence: time.Second})
				},
			}, elastic.Plain{})
			if errs[i] = err; err != nil {
				return
			}
			defer m.Close()
			errs[i] = m.Run(ctx, func(ctx context.Context, e *elastic.Epoch) error {
				if m.Steps() >= last.Load() && len(e.Members) == 2 {
					m.Leave()
					return m.Commit(ctx)
				}
				if made++; i == 0 && len(e.Members) == members && made > 5 {
					last.Store(m.Steps() + 25)
					return m.Close() // as if it were killed, but faster
				}
				if i == 1 && len(e.Members) == 2 && m.Steps() == last.Load()-5 {
					s.stop()
					s.start(t)
				}
				if err := m.Commit(ctx); err != nil {
					return err
				}
				value[0]++
				return nil
			})
		})
	}
	all.Wait()
	require.NoError(t, errs[1])
	require.NoError(t, errs[2])
	assert.Equal(t, values[1], values[2])
	assert.GreaterOrEqual(t, values[1], float32(last.Load()))
}

// log forwards log lines.
type log chan string

func (l log) Write(p []byte) (int, error) {
	select {
	case l <- string(p):
	default: // nothing reads any more
	}
	return len(p), nil
}

// TestFullQuota checks that members that lose one while etcd is full log that, and go on when it has space.
func TestFullQuota(t *testing.T) {
	s := newServer(t, "--quota-backend-bytes", strconv.Itoa(16<<20))
	lines := make(log, 1000)
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(lines, nil)))
	defer slog.SetDefault(before)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	admin := s.dial(t)
	fill := func() error {
		for i := range 1000 {
			_, err := admin.Put(ctx, fmt.Sprint("/fill/", i), strings.Repeat("x", 700_000))
			if err != nil {
				assert.ErrorContains(t, err, "database space exceeded")
				return nil
			}
		}
		return errors.New("etcd has room for everything")
	}
	free := func() {
		r, err := admin.Delete(ctx, "/fill/", clientv3.WithPrefix())
		require.NoError(t, err)
		_, err = admin.Compact(ctx, r.Header.Revision)
		require.NoError(t, err)
		_, err = admin.Defragment(ctx, s.client)
		require.NoError(t, err)
		_, err = admin.AlarmDisarm(ctx, &clientv3.AlarmMember{})
		require.NoError(t, err)
	}
	var last atomic.Uint64 // step at which a member is lost, after all three have trained; that member sets it
	last.Store(math.MaxUint64)
	conf, err := store.TLS([]byte("a secret of tests"), "etcd")
	require.NoError(t, err)
	errs := make([]error, 3)
	var all sync.WaitGroup
	for i := range errs {
		all.Go(func() {
			rt := cpu.New()
			client := s.dial(t)
			m, err := elastic.Join(ctx, elastic.Config{Name: fmt.Sprint("member ", i), Min: 2, Runtime: rt, Silence: time.Second,
				Dial: func(ctx context.Context) (store.Store, error) {
					return etcd.Dial(ctx, etcd.Config{Client: client, Prefix: "/job/", Silence: 2 * time.Second})
				},
				Form: func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
					return tcp.New(ctx, kv, tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: conf, Listen: "localhost", Silence: time.Second})
				},
			}, elastic.Plain{})
			if errs[i] = err; err != nil {
				return
			}
			defer m.Close()
			made := 0
			errs[i] = m.Run(ctx, func(ctx context.Context, e *elastic.Epoch) error {
				if m.Steps() >= last.Load() && len(e.Members) == 2 {
					return io.EOF
				}
				if made++; i == 0 && len(e.Members) == 3 && made > 5 {
					last.Store(m.Steps() + 25)
					return errors.Join(fill(), m.Close())
				}
				return m.Commit(ctx)
			})
		})
	}
	for line := ""; !strings.Contains(line, "database space exceeded"); {
		select {
		case line = <-lines:
		case <-ctx.Done():
			require.NoError(t, ctx.Err(), "nothing is said of etcd's quota")
		}
	}
	free()
	all.Wait()
	assert.NoError(t, errs[1])
	assert.NoError(t, errs[2])
}

// Closing the client below a session ends the session with an error, whatever its watches report.
func TestClosedClient(t *testing.T) {
	client := newServer(t).dial(t)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	session, err := etcd.Dial(ctx, etcd.Config{Client: client, Prefix: "closed/", Silence: time.Second})
	require.NoError(t, err)
	for _, prefix := range []string{"a/", "b/"} {
		_, err := session.Watch(ctx, prefix, func(store.Event) {})
		require.NoError(t, err)
	}
	require.NoError(t, client.Close())
	select {
	case <-session.Done():
	case <-ctx.Done():
		require.Fail(t, "the session does not end")
	}
	require.Error(t, session.Err())
	_, err = session.Get(ctx, "a/key")
	require.Error(t, err)
	_ = session.Close()
}

// A closed proxy renews no lease, although etcd's client is open. A client that does not go on at another proxy is
// lost to the others.
func TestClosedProxy(t *testing.T) {
	const silence = 2 * time.Second
	client := newServer(t).dial(t)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	open := func(ctx context.Context, _ string) (store.Backend, error) {
		return etcd.Dial(ctx, etcd.Config{Client: client, Prefix: "orphan/", Silence: silence})
	}
	conf, err := store.TLS([]byte("a secret"), "store")
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	proxy := store.NewProxy(silence, open)
	proxy.Serve(l, conf)
	c, err := store.Dialer{Addresses: []string{l.Addr().String()}, TLS: conf, Name: "one"}.Dial(ctx)
	require.NoError(t, err)
	require.NoError(t, c.Set(ctx, "here", []byte("1"), store.Lease))
	observer, err := open(ctx, "")
	require.NoError(t, err)
	deleted := make(chan struct{})
	_, err = observer.Watch(ctx, "here", func(e store.Event) {
		if e.Deleted {
			close(deleted)
		}
	})
	require.NoError(t, err)
	require.NoError(t, proxy.Close())
	select {
	case <-deleted:
	case <-ctx.Done():
		require.Fail(t, "the lease is renewed without the proxy")
	}
	require.NoError(t, observer.Close())
}

// A session reports how long etcd keeps leases: at least as long as an election takes.
func TestLeaseTime(t *testing.T) {
	client := newServer(t).dial(t)
	for _, silence := range []time.Duration{500 * time.Millisecond, 2500 * time.Millisecond} {
		session, err := etcd.Dial(t.Context(), etcd.Config{Client: client, Prefix: "lease/", Silence: silence})
		require.NoError(t, err)
		lease := session.(interface{ LeaseTime() time.Duration }).LeaseTime()
		assert.GreaterOrEqual(t, lease, silence)
		assert.Less(t, lease, silence+3*time.Second)
		require.NoError(t, session.Close())
	}
}
