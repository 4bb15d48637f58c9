package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
)

// lasting is a session of a store that ends, as a lease does, a while after the proxy that had it.
type lasting struct{ *Client }

func (lasting) Close() error { return nil }

// front serves a store by a proxy, and returns its address.
func front(t *testing.T, open func(ctx context.Context, job string) (Backend, error)) (*Proxy, string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := NewProxy(time.Second, open)
	p.Serve(l, mustTLS(t, "s"))
	t.Cleanup(func() { _ = p.Close() })
	return p, l.Addr().String()
}

// TestProxyLost: a client whose proxy is lost goes on at the next one of its addresses. A key that it leases again
// before the earlier session ends does not vanish.
func TestProxyLost(t *testing.T) {
	server := NewServer(Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	var sessions []*Client
	open := func(context.Context, string) (Backend, error) {
		sessions = append(sessions, server.Local("a session"))
		return lasting{sessions[len(sessions)-1]}, nil
	}
	first, a := front(t, open)
	_, b := front(t, open)
	d := Dialer{Addresses: []string{a, b}, TLS: mustTLS(t, "s"), Name: "one"}
	c, err := d.Dial(t.Context())
	require.NoError(t, err)
	require.NoError(t, c.Set(t.Context(), "here", []byte("1"), Lease))
	deleted := make(chan Event, 1)
	_, err = server.Local("another").Watch(t.Context(), "here", func(e Event) {
		if e.Deleted {
			deleted <- e
		}
	})
	require.NoError(t, err)

	require.NoError(t, first.Close())
	<-c.Done()
	require.ErrorIs(t, c.Err(), comm.ErrPeerFailed)
	again, err := d.Dial(t.Context())
	require.NoError(t, err)
	v, err := again.Get(t.Context(), "here")
	require.NoError(t, err, "the session of a proxy that is lost lasts")
	assert.Equal(t, "1", string(v))
	require.NoError(t, again.Set(t.Context(), "here", []byte("2"), Lease))
	require.NoError(t, sessions[0].Close()) // its lease ends
	require.NoError(t, again.Set(t.Context(), "other", nil))
	require.Empty(t, deleted)
	require.NoError(t, again.Close())
	require.NoError(t, sessions[1].Close())
	assert.Equal(t, "2", string((<-deleted).Value))
}

// orphan is a session of a store whose leases something renews until the session ends.
type orphan struct {
	*Client
	closed, orphaned chan struct{}
}

func (o orphan) Orphan() { close(o.orphaned) }

func (o orphan) Close() error {
	close(o.closed)
	return o.Client.Close()
}

// TestProxyEndsSessions: a proxy that is closed ends the sessions of its clients without their leases, and one whose
// client closes ends them with these.
func TestProxyEndsSessions(t *testing.T) {
	server := NewServer(Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	for _, closes := range []bool{true, false} {
		session := orphan{server.Local("a session"), make(chan struct{}), make(chan struct{})}
		p, address := front(t, func(context.Context, string) (Backend, error) { return session, nil })
		c, err := Dialer{Addresses: []string{address}, TLS: mustTLS(t, "s"), Name: "one"}.Dial(t.Context())
		require.NoError(t, err)
		assert.Equal(t, time.Second, c.LeaseTime())
		if closes {
			require.NoError(t, c.Close())
			<-session.closed
			require.NoError(t, p.Close())
			continue
		}
		require.NoError(t, p.Close())
		<-session.orphaned
		select {
		case <-session.closed:
			assert.Fail(t, "its leases are gone")
		default:
		}
		require.NoError(t, c.Close())
	}
}

// TestProxyFails: a proxy that has no session for a process sends it to the next one, and one that refuses it says why.
func TestProxyFails(t *testing.T) {
	server := NewServer(Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	_, broken := front(t, func(context.Context, string) (Backend, error) { return nil, errors.New("no leader") })
	_, whole := front(t, func(_ context.Context, job string) (Backend, error) {
		if job != "a" {
			return nil, fmt.Errorf("%w: no job %q", comm.ErrArgument, job)
		}
		return server.Local("a session"), nil
	})
	d := Dialer{Addresses: []string{broken, whole}, TLS: mustTLS(t, "s"), Name: "one", Job: "a"}
	c, err := d.Dial(t.Context())
	require.NoError(t, err)
	require.NoError(t, c.Close())

	d.Job = "b"
	_, err = d.Dial(t.Context())
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, `no job "b"`)

	d.Addresses = []string{broken}
	d.Once = true
	_, err = d.Dial(t.Context())
	require.ErrorContains(t, err, "cannot serve this process now: no leader")
	require.NotErrorIs(t, err, ErrRefused)
}

// failing is a session whose store does nothing.
type failing struct {
	*Client
	err error
}

func (f failing) Set(context.Context, string, []byte, ...Option) error { return f.err }

// TestProxyErrors: what the store behind a proxy has not done is an error of its kind, and the session goes on.
func TestProxyErrors(t *testing.T) {
	for name, c := range map[string]struct{ is, want error }{
		"argument":    {fmt.Errorf("%w: bad", comm.ErrArgument), comm.ErrArgument},
		"unsupported": {fmt.Errorf("%w: bad", comm.ErrUnsupported), comm.ErrUnsupported},
		"full":        {fmt.Errorf("%w: bad", ErrFull), ErrFull},
		"exhausted":   {fmt.Errorf("%w: bad", comm.ErrExhausted), comm.ErrExhausted},
		"permission":  {fmt.Errorf("%w: bad", fs.ErrPermission), fs.ErrPermission},
		"unavailable": {fmt.Errorf("%w: bad", comm.ErrUnavailable), comm.ErrUnavailable},
		"lost":        {fmt.Errorf("%w: bad", comm.ErrPeerFailed), comm.ErrPeerFailed},
		"its timeout": {fmt.Errorf("%w: bad", comm.ErrTimeout), comm.ErrPeerFailed},
		"other":       {errors.New("bad"), comm.ErrPeerFailed},
	} {
		t.Run(name, func(t *testing.T) {
			server := NewServer(Options{})
			defer server.Close() //nolint:errcheck // it is in this process
			_, address := front(t, func(context.Context, string) (Backend, error) {
				return failing{server.Local("a session"), c.is}, nil
			})
			kv, err := Dialer{Addresses: []string{address}, TLS: mustTLS(t, "s"), Name: "one"}.Dial(t.Context())
			require.NoError(t, err)
			err = kv.Set(t.Context(), "k", nil)
			requireOnly(t, err, c.want)
			require.ErrorContains(t, err, "bad")
			n, err := kv.Add(t.Context(), "n", 2)
			require.NoError(t, err)
			assert.EqualValues(t, 2, n)
			require.NoError(t, kv.Close())
		})
	}
}

// requireOnly requires that an error of a client wraps one sentinel of those that tell causes.
func requireOnly(t *testing.T, err, want error) {
	t.Helper()
	causes := []error{comm.ErrArgument, comm.ErrUnsupported, comm.ErrUnavailable, comm.ErrExhausted, comm.ErrPeerFailed,
		comm.ErrTimeout, comm.ErrCanceled, ErrFull, fs.ErrPermission}
	for _, cause := range causes {
		require.Equal(t, cause == want, errors.Is(err, cause), "%v: %v", err, cause)
	}
}

// TestProxyOpenErrors: a store behind a proxy that begins no session for a process says why, by an error of its kind.
func TestProxyOpenErrors(t *testing.T) {
	for _, cause := range []error{ErrFull, comm.ErrExhausted, fs.ErrPermission} {
		_, address := front(t, func(context.Context, string) (Backend, error) { return nil, fmt.Errorf("etcd: %w: bad", cause) })
		_, err := Dialer{Addresses: []string{address}, TLS: mustTLS(t, "s"), Name: "one", Once: true}.Dial(t.Context())
		requireOnly(t, err, cause)
		require.ErrorContains(t, err, "bad")
	}
}

// TestFailures: what an answer says is a failure unless its kind is known, and its text is printable and short.
func TestFailures(t *testing.T) {
	requireOnly(t, failure("of a later version", "x", errUndone), comm.ErrPeerFailed)
	requireOnly(t, failure(kindFull, "x", errUndone), ErrFull)
	require.EqualError(t, failure(kindArgument, "a\x1b[2J\nb", nil), comm.ErrArgument.Error()+`: a\x1b[2J\nb`)
	require.Less(t, len(failure(kindFailed, strings.Repeat("x", 1<<20), nil).Error()), 2*longestReason)
}

// ended is a session that has ended, of which nobody else has been told yet.
type ended struct {
	*Client
	err error
}

func (e ended) Err() error            { return e.err }
func (e ended) Done() <-chan struct{} { return nil }

func (e ended) Set(ctx context.Context, _ string, _ []byte, _ ...Option) error {
	return cmp.Or(e.err, ctx.Err())
}

func (e ended) Get(context.Context, string) ([]byte, error) { return nil, e.err }

// TestProxyLostWhileAnswering: a request that fails because the session of the store behind has ended is no refusal: its
// client has lost its session, too, when it is told.
func TestProxyLostWhileAnswering(t *testing.T) {
	server := NewServer(Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	_, address := front(t, func(context.Context, string) (Backend, error) {
		return ended{server.Local("a session"), fmt.Errorf("%w: the lease has ended", comm.ErrPeerFailed)}, nil
	})
	for name, ask := range map[string]func(kv *Client) error{
		"set": func(kv *Client) error { return kv.Set(t.Context(), "k", nil) },
		"get": func(kv *Client) error {
			_, err := kv.Get(t.Context(), "k")
			return err
		},
	} {
		kv, err := Dialer{Addresses: []string{address}, TLS: mustTLS(t, "s"), Name: name}.Dial(t.Context())
		require.NoError(t, err)
		require.ErrorIs(t, ask(kv), comm.ErrPeerFailed, name)
		require.ErrorIs(t, kv.Err(), comm.ErrPeerFailed, "%s: the session goes on", name)
	}
}

// TestProxyClosedWhileAnswering: nor is one that fails because the proxy is closed.
func TestProxyClosedWhileAnswering(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s := &proxied{backend: ended{}}
	s.out.limit = mostQueued
	s.out.busy = true // nobody sends what it has
	s.apply(ctx, &request{Op: opSet, ID: 1, Key: "k"})
	assert.Empty(t, s.out.list)
	s.apply(t.Context(), &request{Op: opSet, ID: 2, Key: "k"})
	require.Len(t, s.out.list, 1)
	assert.EqualValues(t, 2, s.out.list[0].ID)
}

// TestServeAfterClose: a proxy that is closed closes a listener that it is given later, on which nobody is answered.
func TestServeAfterClose(t *testing.T) {
	p := NewProxy(time.Second, func(context.Context, string) (Backend, error) { return nil, errors.New("it is closed") })
	require.NoError(t, p.Close())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	p.Serve(l, mustTLS(t, "s"))
	_, err = l.Accept()
	require.ErrorIs(t, err, net.ErrClosed)
	require.NoError(t, p.Close())
}
