//go:build unix

package launch

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/distributed/elastic"
)

// service is a store of several jobs behind proxies, such as a program of adapters/etcd.
type service struct {
	addresses []string
	file      string // file of the secret
	proxies   []*store.Proxy
	lost      atomic.Bool // the first proxy was lost, in a request that it runs and does not answer
	last      string      // prefix of that request's key; "" for none
	refusal   error       // answer to that request instead of the loss; nil for none
	refused   atomic.Bool // the request was refused

	mu       sync.Mutex
	stores   map[string]*store.Server // by job; guarded by mu
	sessions [][]*store.Client        // by proxy; guarded by mu
}

// open begins a session at a proxy.
func (s *service) open(proxy int, job string) *store.Client {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stores[job] == nil {
		s.stores[job] = store.NewServer(store.Options{})
	}
	kv := s.stores[job].Local("a session")
	s.sessions[proxy] = append(s.sessions[proxy], kv)
	return kv
}

// lose ends a proxy. The leases of its sessions end later.
func (s *service) lose(proxy int) {
	_ = s.proxies[proxy].Close()
	time.AfterFunc(elastic.DefaultSilence, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, kv := range s.sessions[proxy] {
			_ = kv.Close()
		}
	})
}

// refusing is a session at the first proxy. It refuses a request that it has run nevertheless, and the session lasts.
type refusing struct {
	*store.Client
	service *service
}

// refuse returns the error of a request for a key.
func (l refusing) refuse(key string, err error) error {
	if strings.HasPrefix(key, l.service.last) && !l.service.refused.Swap(true) {
		return l.service.refusal
	}
	return err
}

func (l refusing) Set(ctx context.Context, key string, value []byte, options ...store.Option) error {
	return l.refuse(key, l.Client.Set(ctx, key, value, options...))
}

func (l refusing) CompareAndSet(
	ctx context.Context,
	key string,
	version uint64,
	value []byte,
	options ...store.Option,
) (store.Entry, bool, error) {
	now, ok, err := l.Client.CompareAndSet(ctx, key, version, value, options...)
	return now, ok, l.refuse(key, err)
}

func (l refusing) List(ctx context.Context, prefix string) ([]store.Entry, error) {
	listed, err := l.Client.List(ctx, prefix)
	return listed, l.refuse(prefix, err)
}

func (l refusing) Watch(ctx context.Context, prefix string, f func(store.Event)) (stop func(), err error) {
	stop, err = l.Client.Watch(ctx, prefix, f)
	return stop, l.refuse(prefix, err)
}

// losing is a session at the first proxy, which is lost during a request: the request is run but not answered.
type losing struct {
	*store.Client
	service *service
}

// done ends the proxy if this was that request.
func (l losing) done(ctx context.Context, key string) {
	if strings.HasPrefix(key, l.service.last) {
		if !l.service.lost.Swap(true) {
			go l.service.lose(0)
		}
		<-ctx.Done() // the proxy's end waits for this request
	}
}

func (l losing) Set(ctx context.Context, key string, value []byte, options ...store.Option) error {
	err := l.Client.Set(ctx, key, value, options...)
	l.done(ctx, key)
	return err
}

func (l losing) CompareAndSet(
	ctx context.Context,
	key string,
	version uint64,
	value []byte,
	options ...store.Option,
) (store.Entry, bool, error) {
	now, ok, err := l.Client.CompareAndSet(ctx, key, version, value, options...)
	l.done(ctx, key)
	return now, ok, err
}

func (l losing) List(ctx context.Context, prefix string) ([]store.Entry, error) {
	listed, err := l.Client.List(ctx, prefix)
	l.done(ctx, prefix)
	return listed, err
}

func (l losing) Watch(ctx context.Context, prefix string, f func(store.Event)) (stop func(), err error) {
	stop, err = l.Client.Watch(ctx, prefix, f)
	l.done(ctx, prefix)
	return stop, err
}

func newService(t *testing.T) *service { return newLosingService(t, "") }

// newLosingService returns a service that loses its first proxy in a request for a key with this prefix.
func newLosingService(t *testing.T, last string) *service {
	s := &service{
		last:   last,
		file:   filepath.Join(t.TempDir(), "secret"),
		stores: map[string]*store.Server{},
	}
	secret, err := rendezvous.ReadSecret(s.file, true)
	require.NoError(t, err)
	conf, err := rendezvous.Job{Secret: []byte(secret + "\x00tutti\x00"), Hosted: true}.TLS("store")
	require.NoError(t, err)
	for i := range 2 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		p := store.NewProxy(elastic.DefaultSilence, func(_ context.Context, job string) (store.Backend, error) {
			kv := s.open(i, job)
			switch {
			case i > 0 || s.last == "":
				return kv, nil
			case s.refusal != nil:
				return refusing{kv, s}, nil
			}
			return losing{kv, s}, nil
		})
		p.Serve(l, conf)
		t.Cleanup(func() { _ = p.Close() })
		s.addresses = append(s.addresses, l.Addr().String())
		s.proxies = append(s.proxies, p)
		s.sessions = append(s.sessions, nil)
	}
	return s
}

// fixed sets the options of a launcher in a job of two machines. elastic sets them for a job of members.
func (s *service) fixed(c *Config) {
	c.Join, c.SecretFile = s.addresses, s.file
	c.Served = true
	c.Machines = 2
}

func (s *service) elastic(c *Config) {
	s.fixed(c)
	c.Machines = 1
	c.Ranks = 1
	c.Min = 2
	c.Restarts = 3
	c.Job = "elastic"
}

// TestServedStore: launchers of which none keeps the store run a job, and then the same job again.
func TestServedStore(t *testing.T) {
	s := newService(t)
	for range 2 {
		a := begin(t, t.Context(), "fails once", func(c *Config) { s.fixed(c); c.Restarts = 1 })
		b := begin(t, t.Context(), "fails once", func(c *Config) { s.fixed(c); c.Restarts, c.Ranks = 1, 3 })
		require.NoError(t, a.wait(t), "%s%s", &a.out, &a.err)
		require.NoError(t, b.wait(t), "%s%s", &b.out, &b.err)
		for r := range 5 {
			assert.Contains(t, a.out.String()+b.out.String(), fmt.Sprintf("rank %d of 5", r))
		}
	}
}

// TestServedStoreLost: a job that is not elastic ends when its session of the store is lost, and each launcher says so.
func TestServedStoreLost(t *testing.T) {
	s := newService(t)
	a := begin(t, t.Context(), "waits", s.fixed)
	b := begin(t, t.Context(), "waits", s.fixed)
	a.says(t, "of 4")
	b.says(t, "of 4")
	s.lose(0)
	for _, launcher := range []*started{a, b} {
		err := launcher.wait(t)
		require.ErrorIs(t, err, comm.ErrPeerFailed)
		require.ErrorContains(t, err, "the store at "+s.addresses[0])
		require.ErrorContains(t, err, "that is not elastic (--min)")
	}
}

// TestServedElastic: an elastic job goes on at the next address of its store, even if a rank is killed. A machine that
// joins later is told that the job has ended.
func TestServedElastic(t *testing.T) {
	s := newService(t)
	mark := filepath.Join(t.TempDir(), "mark")
	member := func(c *Config) { // its rank begins when the file exists
		s.elastic(c)
		c.Command = []string{"sh", "-c", "until test -e " + mark + "; do sleep 0.01; done; exec " + os.Args[0]}
	}
	a := begin(t, t.Context(), "elastic", member)
	b := begin(t, t.Context(), "elastic", func(c *Config) { // it learns from the store that it is served
		member(c)
		c.Served = false
		c.Min = 0
		c.Restarts = 0
	})
	kv := s.open(1, "elastic")
	require.NoError(t, kv.Wait(t.Context(), machines+"00000001", machines+"00000002"))

	err := begin(t, t.Context(), "elastic", func(c *Config) { member(c); c.Min = 1 }).wait(t)
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.ErrorContains(t, err, "another job has another name (--job)")

	require.NoError(t, os.WriteFile(mark, nil, 0o600))
	s.lose(0)
	require.NoError(t, a.wait(t), "%s%s", &a.out, &a.err)
	require.NoError(t, b.wait(t), "%s%s", &b.out, &b.err)
	assert.Contains(t, a.out.String()+b.out.String(), "[rank 0 rank 1]")

	err = begin(t, t.Context(), "elastic", member).wait(t)
	require.ErrorIs(t, err, comm.ErrArgument)
	require.ErrorContains(t, err, "has ended")
}

// joining lists the keys of a joining launcher's requests.
var joining = []string{"elastic/", jobKey, ranksKey, machines, relayed}

// TestServedWhileJoining: launchers of an elastic job go on at the store's next address if theirs is lost during any
// request of their joining.
func TestServedWhileJoining(t *testing.T) {
	for _, key := range joining {
		t.Run(strings.Trim(key, "/"), func(t *testing.T) {
			s := newLosingService(t, key)
			a := begin(t, t.Context(), "elastic", s.elastic)
			b := begin(t, t.Context(), "elastic", s.elastic)
			require.NoError(t, a.wait(t), "%s%s", &a.out, &a.err)
			require.NoError(t, b.wait(t), "%s%s", &b.out, &b.err)
			assert.True(t, s.lost.Load(), "the first proxy was not lost: nothing was tried")
		})
	}
}

// TestElectionWhileJoining: launchers of an elastic job try again if a store that elects a leader refuses any request
// of their joining.
func TestElectionWhileJoining(t *testing.T) {
	for _, key := range joining {
		t.Run(strings.Trim(key, "/"), func(t *testing.T) {
			s := newLosingService(t, key)
			s.refusal = fmt.Errorf("etcd: %w: etcdserver: no leader", comm.ErrPeerFailed)
			a := begin(t, t.Context(), "elastic", s.elastic)
			b := begin(t, t.Context(), "elastic", s.elastic)
			require.NoError(t, a.wait(t), "%s%s", &a.out, &a.err)
			require.NoError(t, b.wait(t), "%s%s", &b.out, &b.err)
			assert.True(t, s.refused.Load(), "nothing was refused: nothing was tried")
		})
	}
}

// TestRefusedWhileJoining: a launcher ends with the store's error if the store refuses its request permanently.
func TestRefusedWhileJoining(t *testing.T) {
	s := newLosingService(t, jobKey)
	s.refusal = fmt.Errorf("etcd: %w: etcdserver: permission denied", fs.ErrPermission)
	err := begin(t, t.Context(), "elastic", s.elastic).wait(t)
	require.ErrorIs(t, err, fs.ErrPermission)
	require.ErrorContains(t, err, "permission denied")
}

// TestNoName: the store of a launcher has no job with a name.
func TestNoName(t *testing.T) {
	first, second := pair(t)
	ctx, cancel := context.WithCancel(t.Context())
	a := begin(t, ctx, "succeeds", first)
	err := begin(t, t.Context(), "succeeds", func(c *Config) { second(c); c.Job = "x" }).wait(t)
	require.ErrorIs(t, err, store.ErrRefused)
	require.ErrorContains(t, err, `looks for the job "x"`)
	cancel()
	assert.Error(t, a.wait(t))
}
