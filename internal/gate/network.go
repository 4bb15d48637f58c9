package gate

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/internal/interfaces"
)

// Network is store.Network; nil means the system's TCP.
type Network interface {
	// Dial connects to an address.
	Dial(ctx context.Context, network, address string) (net.Conn, error)
	// Listen listens on an address.
	Listen(network, address string) (net.Listener, error)
}

// Dial connects to an address, over n unless that is nil.
func Dial(ctx context.Context, n Network, address string) (net.Conn, error) {
	if n == nil {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err != nil {
			return nil, linkError(address, linkZones(interfaces.Up()), err)
		}
		return conn, nil
	}
	conn, err := n.Dial(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return Bound(conn), nil
}

// Listen listens on an address, over n unless that is nil.
func Listen(ctx context.Context, n Network, address string) (net.Listener, error) {
	if n == nil {
		return new(net.ListenConfig).Listen(ctx, "tcp", address)
	}
	l, err := n.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	return Bind(l), nil
}

// Listener is a program's own listener. All connections that it accepts keep deadlines ([Bound]). Once it is closed,
// it returns [net.ErrClosed], whatever the program's listener returns.
type Listener struct {
	net.Listener
	closed atomic.Bool // Close was called
}

// Bind returns a program's listener as a [Listener]. Close that one instead.
func Bind(l net.Listener) *Listener {
	if bound, ok := l.(*Listener); ok {
		return bound
	}
	return &Listener{Listener: l}
}

// Accept implements [net.Listener].
func (l *Listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if l.closed.Load() {
		if err == nil {
			_ = conn.Close() // it came too late
		}
		return nil, net.ErrClosed
	}
	if err != nil {
		return nil, err
	}
	return Bound(conn), nil
}

// Close implements [net.Listener].
func (l *Listener) Close() error {
	l.closed.Store(true)
	return l.Listener.Close()
}

// Bound returns a connection that keeps its deadlines and has addresses, whatever conn does: channels of ssh refuse
// deadlines, and other connections ignore them. The only requirement on conn is that Close ends reads and writes: a
// deadline that passes during a read or write closes the connection. Connections of the system are returned unchanged.
func Bound(conn net.Conn) net.Conn {
	switch conn.(type) {
	case *net.TCPConn, *net.UnixConn, *bound:
		return conn
	}
	b := &bound{Conn: conn}
	b.read.conn = conn
	b.write.conn = conn
	return b
}

// bound is a connection of a program's own network.
type bound struct {
	net.Conn
	read  direction // deadline of Read
	write direction // deadline of Write
}

// Read implements [net.Conn].
func (b *bound) Read(p []byte) (n int, err error) {
	n, err = b.read.do(func() (int, error) { return b.Conn.Read(p) })
	return n, asNetwork("read", err)
}

// Write implements [net.Conn].
func (b *bound) Write(p []byte) (n int, err error) {
	n, err = b.write.do(func() (int, error) { return b.Conn.Write(p) })
	return n, asNetwork("write", err)
}

// asNetwork converts an error of a connection to the form of the system's connections, so that a reset stream is not
// mistaken for a peer that speaks another protocol.
func asNetwork(op string, err error) error {
	var network net.Error
	if err == nil || err == io.EOF || errors.As(err, &network) {
		return err
	}
	return &net.OpError{Op: op, Net: "network", Err: err}
}

// SetDeadline implements [net.Conn].
func (b *bound) SetDeadline(t time.Time) error {
	b.read.set(t)
	b.write.set(t)
	return nil
}

// SetReadDeadline implements [net.Conn].
func (b *bound) SetReadDeadline(t time.Time) error {
	b.read.set(t)
	return nil
}

// SetWriteDeadline implements [net.Conn].
func (b *bound) SetWriteDeadline(t time.Time) error {
	b.write.set(t)
	return nil
}

// LocalAddr implements [net.Conn].
func (b *bound) LocalAddr() net.Addr { return known(b.Conn.LocalAddr()) }

// RemoteAddr implements [net.Conn].
func (b *bound) RemoteAddr() net.Addr { return known(b.Conn.RemoteAddr()) }

// known returns a, or unknown if a connection has no address.
func known(a net.Addr) net.Addr {
	if a == nil {
		return unknown{}
	}
	return a
}

// unknown is the address of a connection without one.
type unknown struct{}

// Network implements [net.Addr].
func (unknown) Network() string { return "unknown" }

// String implements [net.Addr].
func (unknown) String() string { return "an unknown address" }

// direction is reading or writing on a connection, with its deadline.
type direction struct {
	conn net.Conn // closed at the deadline

	mu       sync.Mutex  // guards the fields below
	deadline time.Time   // zero for none; guarded by mu
	timer    *time.Timer // closes conn at the deadline; nil before the first one; guarded by mu
	active   int         // calls in flight; guarded by mu
	expired  bool        // the deadline has closed conn; guarded by mu
}

// set sets the deadline, also for calls in flight.
func (d *direction) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.deadline = t
	if d.timer != nil {
		d.timer.Stop()
	}
	if t.IsZero() {
		return
	}
	left := time.Until(t)
	if d.timer == nil {
		d.timer = time.AfterFunc(left, d.expire)
		return
	}
	d.timer.Reset(left)
}

// expire closes the connection if a call is in flight at the deadline. A later deadline may have been set in the
// meantime.
func (d *direction) expire() {
	d.mu.Lock()
	due := d.active > 0 && d.passed()
	d.expired = d.expired || due
	d.mu.Unlock()
	if due {
		_ = d.conn.Close()
	}
}

// passed reports whether the deadline has passed. The caller holds mu.
func (d *direction) passed() bool {
	return !d.deadline.IsZero() && !time.Now().Before(d.deadline)
}

// do makes a call, unless the deadline has passed.
func (d *direction) do(call func() (int, error)) (n int, err error) {
	if !d.begin() {
		return 0, os.ErrDeadlineExceeded
	}
	n, err = call()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.active--
	if err != nil && d.expired {
		err = os.ErrDeadlineExceeded
	}
	return n, err
}

// begin counts a call, unless the deadline has passed.
func (d *direction) begin() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.passed() {
		return false
	}
	d.active++
	return true
}
