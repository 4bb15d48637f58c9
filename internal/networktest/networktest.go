// Package networktest provides networks for tests, whose connections only carry bytes and end.
package networktest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Pipes is a network within this process, of pipes that refuse deadlines and have no addresses. There are no host
// names: a port is an address.
type Pipes struct {
	// Conn replaces each connection that Dial makes, if it is set.
	Conn func(conn net.Conn) net.Conn
	// Dialed counts connections.
	Dialed atomic.Int64

	mu        sync.Mutex
	listeners map[string]*listener // by port; guarded by mu
	last      int                  // number of chosen ports; guarded by mu
}

// firstPort is the port before the first chosen one.
const firstPort = 1 << 15

// Dial implements store.Network.
func (p *Pipes) Dial(ctx context.Context, _, address string) (net.Conn, error) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	l := p.listeners[port]
	p.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("nobody listens on %s", address)
	}
	near, far := net.Pipe()
	select {
	case l.accepted <- bare{far}:
	case <-l.closed:
		return nil, fmt.Errorf("nobody listens on %s any more", address)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	p.Dialed.Add(1)
	var conn net.Conn = bare{near}
	if p.Conn != nil {
		conn = p.Conn(conn)
	}
	return conn, nil
}

// Listen implements store.Network.
func (p *Pipes) Listen(_, address string) (net.Listener, error) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if port == "0" {
		p.last++
		port = strconv.Itoa(firstPort + p.last)
	}
	if p.listeners[port] != nil {
		return nil, fmt.Errorf("the port %s is in use", port)
	}
	if p.listeners == nil {
		p.listeners = map[string]*listener{}
	}
	l := &listener{pipes: p, port: port, accepted: make(chan net.Conn), closed: make(chan struct{})}
	p.listeners[port] = l
	return l, nil
}

// listener is a listener of Pipes.
type listener struct {
	pipes    *Pipes
	port     string
	accepted chan net.Conn
	closed   chan struct{}
	once     sync.Once
}

// Accept implements [net.Listener].
func (l *listener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.accepted:
		return conn, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements [net.Listener].
func (l *listener) Close() error {
	l.once.Do(func() {
		close(l.closed)
		l.pipes.mu.Lock()
		defer l.pipes.mu.Unlock()
		delete(l.pipes.listeners, l.port)
	})
	return nil
}

// Addr implements [net.Listener].
func (l *listener) Addr() net.Addr { return address("pipe:" + l.port) }

// address is the address of a listener.
type address string

// Network implements [net.Addr].
func (address) Network() string { return "pipe" }

// String implements [net.Addr].
func (a address) String() string { return string(a) }

// errDeadline is the error of deadlines on bare connections, as on channels of ssh.
var errDeadline = errors.New("deadlines are not supported")

// bare is a connection without deadlines and addresses.
type bare struct{ net.Conn }

// SetDeadline implements [net.Conn].
func (bare) SetDeadline(time.Time) error { return errDeadline }

// SetReadDeadline implements [net.Conn].
func (bare) SetReadDeadline(time.Time) error { return errDeadline }

// SetWriteDeadline implements [net.Conn].
func (bare) SetWriteDeadline(time.Time) error { return errDeadline }

// LocalAddr implements [net.Conn].
func (bare) LocalAddr() net.Addr { return nil }

// RemoteAddr implements [net.Conn].
func (bare) RemoteAddr() net.Addr { return nil }

// Sockets is a network of Unix sockets in a folder. Its addresses are paths.
type Sockets struct {
	folder string
	last   atomic.Int64 // number of the last chosen socket
}

// NewSockets makes a network in a folder of the test's.
func NewSockets(t testing.TB) *Sockets { return &Sockets{folder: t.TempDir()} }

// Dial implements store.Network.
func (s *Sockets) Dial(ctx context.Context, _, address string) (net.Conn, error) {
	if _, port, err := net.SplitHostPort(address); err == nil {
		address = s.path(port)
	}
	return new(net.Dialer).DialContext(ctx, "unix", address)
}

// Listen implements store.Network.
func (s *Sockets) Listen(_, address string) (net.Listener, error) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	if port == "0" {
		port = fmt.Sprint("any", s.last.Add(1))
	}
	return net.Listen("unix", s.path(port))
}

// path is the path of a socket.
func (s *Sockets) path(port string) string { return filepath.Join(s.folder, port) }
