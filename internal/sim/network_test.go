package sim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// network is the network between nodes. Its connections keep the order of their bytes, as TCP does, and the seed's
// faults cut hosts off.
type network struct {
	sim         *Simulation
	netMu       sync.Mutex
	nodes       []*Node
	at          map[string]*listener
	conns       []*conn
	ports       int
	cuts        map[[2]*Node]time.Time // until then nothing passes from the first to the second
	Least, Most time.Duration          // bounds of the latency
}

// Never is the end of an endless period.
var Never = time.Unix(1<<40, 0)

// buffered is the number of bytes in flight that a connection holds.
const buffered = 256 << 10

func newNetwork(s *Simulation) network {
	return network{sim: s, at: map[string]*listener{}, cuts: map[[2]*Node]time.Time{}, Least: 20 * time.Microsecond, Most: 300 * time.Microsecond}
}

// NewNode adds a node.
func (s *Simulation) NewNode(name string) *Node {
	s.netMu.Lock()
	defer s.netMu.Unlock()
	n := &Node{sim: s, name: name, ip: [4]byte{10, 0, 0, byte(len(s.nodes) + 1)}}
	s.nodes = append(s.nodes, n)
	return n
}

// Host is the node's address.
func (n *Node) Host() string { return net.IP(n.ip[:]).String() }

// Cut stops all traffic from one node to another until a time.
func (s *Simulation) Cut(from, to *Node, until time.Time) {
	s.Event("cut: nothing goes from %s to %s until %v", from.name, to.name, until.Sub(s.Began))
	s.netMu.Lock()
	s.cuts[[2]*Node{from, to}] = until
	s.netMu.Unlock()
}

// passes returns the time at which data sent now leaves for the other node.
func (s *Simulation) passes(from, to *Node) time.Time {
	s.netMu.Lock()
	defer s.netMu.Unlock()
	return s.cuts[[2]*Node{from, to}]
}

// Kill ends a process: its goroutines stop, and its connections are reset after a while. With silent its host is
// gone, and nothing comes from it.
func (s *Simulation) Kill(n *Node, silent bool) {
	s.Event("kill %s, silent: %v", n.name, silent)
	n.Freeze()
	n.mu.Lock()
	n.dead = true
	n.mu.Unlock()
	if silent {
		for _, other := range s.nodes {
			s.Cut(n, other, Never)
			s.Cut(other, n, Never)
		}
		return
	}
	s.Hangup(func(from, to *Node) bool { return from == n || to == n })
}

// Bury completes the kill of a node, so that its goroutines can end: its connections are dead.
func (s *Simulation) Bury(n *Node) {
	s.Hangup(func(from, to *Node) bool { return from == n })
	n.mu.Lock()
	defer n.mu.Unlock()
	n.release()
}

// Hangup resets connections.
func (s *Simulation) Hangup(which func(from, to *Node) bool) {
	s.netMu.Lock()
	conns := slices.Clone(s.conns)
	s.netMu.Unlock()
	for _, c := range conns {
		if which(c.in.to, c.in.from) {
			c.reset()
		}
	}
}

// ListenConfig is net.ListenConfig.
type ListenConfig struct{}

func (*ListenConfig) Listen(_ context.Context, network, address string) (net.Listener, error) {
	return Listen(network, address)
}

// Listen is net.Listen on this node.
func Listen(network, address string) (net.Listener, error) {
	p := current()
	if p == nil {
		return net.Listen(network, address)
	}
	s := p.sim
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	s.netMu.Lock()
	defer s.netMu.Unlock()
	number, _ := strconv.Atoi(port)
	if number == 0 {
		s.ports++
		number = 40000 + s.ports
	}
	l := &listener{sim: s, node: p.node, addr: &net.TCPAddr{IP: net.IP(p.node.ip[:]), Port: number}, changed: make(chan struct{})}
	if s.at[l.addr.String()] != nil {
		return nil, &net.OpError{Op: "listen", Net: network, Err: os.NewSyscallError("bind", syscall.EADDRINUSE)}
	}
	s.at[l.addr.String()] = l
	return l, nil
}

type listener struct {
	sim  *Simulation
	node *Node
	addr *net.TCPAddr

	mu      sync.Mutex
	queue   []*conn
	closed  bool
	changed chan struct{}
}

func (l *listener) Addr() net.Addr { return l.addr }

func (l *listener) change(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		Point()
		l.mu.Lock()
		changed, closed := l.changed, l.closed
		var c *conn
		if len(l.queue) > 0 && !closed {
			c, l.queue = l.queue[0], l.queue[1:]
		}
		l.mu.Unlock()
		switch {
		case c != nil:
			l.sim.Event("accept %v", c)
			return c, nil
		case closed:
			return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.addr, Err: net.ErrClosed}
		}
		<-changed
	}
}

func (l *listener) Close() error {
	Point()
	l.sim.Event("listener %v closes", l.addr)
	l.sim.netMu.Lock()
	if l.sim.at[l.addr.String()] == l {
		delete(l.sim.at, l.addr.String())
	}
	l.sim.netMu.Unlock()
	var waiting []*conn
	l.change(func() { l.closed, waiting, l.queue = true, l.queue, nil })
	for _, c := range waiting {
		c.reset()
	}
	return nil
}

// Dialer is net.Dialer.
type Dialer struct{ Timeout time.Duration }

// DialContext makes a connection.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	p := current()
	if p == nil {
		return (&net.Dialer{Timeout: d.Timeout}).DialContext(ctx, network, address)
	}
	s := p.sim
	if d.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, d.Timeout)
		defer cancel()
	}
	fail := func(err error) (net.Conn, error) {
		s.Event("dial %s: %v", address, err)
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	sleep := func(t time.Duration) error {
		p.sleep(0)
		select {
		case <-time.After(t):
			p.sleep(0)
			return nil
		case <-ctx.Done():
			p.sleep(0)
			return ctx.Err()
		}
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return fail(err)
	}
	if host == "" {
		host = p.node.Host()
		address = net.JoinHostPort(host, port)
	}
	var to *Node
	for _, n := range s.nodes {
		if n.Host() == host {
			to = n
		}
	}
	if to == nil {
		return fail(syscall.EHOSTUNREACH)
	}
	// There and back.
	for _, way := range [][2]*Node{{p.node, to}, {to, p.node}} {
		wait := p.random.Between(s.Least, s.Most)
		if until := time.Until(s.passes(way[0], way[1])); until > 0 {
			wait += until
		}
		if err := sleep(wait); err != nil {
			return fail(err)
		}
	}
	s.netMu.Lock()
	l := s.at[address]
	s.netMu.Unlock()
	to.mu.Lock()
	dead := to.dead
	to.mu.Unlock()
	if l == nil || dead {
		return fail(os.NewSyscallError("connect", syscall.ECONNREFUSED))
	}
	here, there := s.connect(p, to, l.addr)
	refused := false
	l.change(func() {
		if refused = l.closed; !refused {
			l.queue = append(l.queue, there)
		}
	})
	if refused {
		return fail(os.NewSyscallError("connect", syscall.ECONNREFUSED))
	}
	s.Event("dial %v", here)
	p.sleep(0)
	return here, nil
}

// connect makes both sides of a connection.
func (s *Simulation) connect(p *proc, to *Node, at *net.TCPAddr) (here, there *conn) {
	s.netMu.Lock()
	defer s.netMu.Unlock()
	s.ports++
	number := len(s.conns) / 2
	way := func(from, to *Node, i uint64) *half {
		return &half{sim: s, from: from, to: to, random: Random(Mix(uint64(p.random), i)), changed: make(chan struct{})}
	}
	out, back := way(p.node, to, 1), way(to, p.node, 2)
	own := &net.TCPAddr{IP: net.IP(p.node.ip[:]), Port: 30000 + s.ports}
	side := func(out, in *half, own, peer *net.TCPAddr) *conn {
		c := &conn{name: fmt.Sprintf("c%d %v>%v", number, own, peer), index: len(s.conns), out: out, in: in, own: own, peer: peer}
		s.conns = append(s.conns, c)
		return c
	}
	return side(out, back, own, at), side(back, out, at, own)
}

// half is one direction of a connection.
type half struct {
	sim      *Simulation
	from, to *Node
	random   Random

	mu      sync.Mutex
	queue   []packet
	bytes   int
	last    time.Time // arrival of the last packet
	ended   bool      // the sender has closed it: the last packet is empty
	deaf    bool      // the receiver has closed it
	failed  error     // reset
	reading time.Time // deadlines
	writing time.Time
	changed chan struct{}
}

type packet struct {
	due   time.Time
	bytes []byte
}

// change changes a half and wakes the goroutines that wait for it. The caller holds mu.
func (h *half) change() {
	close(h.changed)
	h.changed = make(chan struct{})
}

func (h *half) set(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
	h.change()
}

// push sends bytes. The caller holds mu.
func (h *half) push(b []byte) {
	due := time.Now().Add(h.random.Between(h.sim.Least, h.sim.Most))
	if h.random.Chance(50) {
		due = due.Add(10 * h.sim.Most) // the packet was lost and is sent again
	}
	if due.Before(h.last) {
		due = h.last
	}
	h.last = due
	h.queue = append(h.queue, packet{due, slices.Clone(b)})
	h.bytes += len(b)
}

// await waits for a change, or until the earliest time.
func (h *half) await(changed <-chan struct{}, times ...time.Time) {
	first := Never
	for _, t := range times {
		if !t.IsZero() && t.Before(first) {
			first = t
		}
	}
	if first == Never {
		<-changed
	} else {
		timer := time.NewTimer(max(time.Until(first), 1))
		select {
		case <-changed:
		case <-timer.C:
		}
		timer.Stop()
	}
	Point()
}

func past(t time.Time) bool { return !t.IsZero() && !t.After(time.Now()) }

// read takes bytes that have arrived.
func (h *half) read(b []byte) (int, error) {
	Point()
	for {
		pass := h.sim.passes(h.from, h.to)
		h.mu.Lock()
		var due time.Time
		switch {
		case h.deaf:
			h.mu.Unlock()
			return 0, net.ErrClosed
		case past(h.reading):
			h.mu.Unlock()
			return 0, os.ErrDeadlineExceeded
		case h.failed != nil:
			defer h.mu.Unlock()
			return 0, h.failed
		case len(h.queue) > 0:
			p := &h.queue[0]
			if due = p.due; due.Before(pass) {
				due = pass
			}
			if past(due) {
				defer h.mu.Unlock()
				if p.bytes == nil {
					return 0, io.EOF
				}
				n := min(len(b), len(p.bytes))
				if n > 1 && h.random.Chance(8) {
					n = 1 + h.random.IntN(n)
				}
				copy(b, p.bytes[:n])
				if p.bytes = p.bytes[n:]; len(p.bytes) == 0 {
					h.queue = h.queue[1:]
				}
				h.bytes -= n
				h.change()
				return n, nil
			}
		}
		changed, deadline := h.changed, h.reading
		h.mu.Unlock()
		h.await(changed, due, deadline)
	}
}

// write sends bytes. Without wait it sends only as many as fit.
func (h *half) write(b []byte, wait bool) (n int, err error) {
	Point()
	for {
		h.mu.Lock()
		switch {
		case h.ended:
			err = net.ErrClosed
		case h.failed != nil:
			err = h.failed
		case past(h.writing):
			err = os.ErrDeadlineExceeded
		default:
			if room := min(buffered-h.bytes, len(b)-n); room > 0 {
				h.push(b[n : n+room])
				n += room
				h.change()
			}
		}
		changed, deadline := h.changed, h.writing
		h.mu.Unlock()
		if err != nil || n == len(b) || !wait {
			return n, err
		}
		h.await(changed, deadline)
	}
}

// conn is one side of a connection.
type conn struct {
	name      string
	index     int
	in, out   *half
	own, peer net.Addr
}

func (c *conn) String() string { return c.name }

func (c *conn) error(op string, err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	return &net.OpError{Op: op, Net: "tcp", Source: c.own, Addr: c.peer, Err: err}
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.in.read(b)
	c.in.sim.Event("%v read %d %v", c, n, err)
	return n, c.error("read", err)
}

func (c *conn) Write(b []byte) (int, error) {
	n, err := c.out.write(b, true)
	c.out.sim.Event("%v write %d of %d %v", c, n, len(b), err)
	return n, c.error("write", err)
}

func (c *conn) LocalAddr() net.Addr  { return c.own }
func (c *conn) RemoteAddr() net.Addr { return c.peer }

func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *conn) SetReadDeadline(t time.Time) (err error) {
	c.in.set(func() {
		if c.in.reading = t; c.in.deaf {
			err = net.ErrClosed
		}
	})
	return c.error("set", err)
}

func (c *conn) SetWriteDeadline(t time.Time) (err error) {
	c.out.set(func() {
		if c.out.writing = t; c.out.ended {
			err = net.ErrClosed
		}
	})
	return c.error("set", err)
}

// Close says that nothing follows. If unread data lies here or comes later, the connection is reset, and the other
// side loses its unread data.
func (c *conn) Close() error {
	Point()
	c.out.sim.Event("%v close", c)
	unread, twice := false, false
	c.in.set(func() {
		twice, unread, c.in.deaf = c.in.deaf, len(c.in.queue) > 0 && c.in.queue[0].bytes != nil, true
	})
	if twice {
		return c.error("close", net.ErrClosed)
	}
	if unread {
		c.out.set(func() { c.out.queue, c.out.ended, c.out.failed = nil, true, syscall.ECONNRESET })
		return nil
	}
	c.out.set(func() {
		if !c.out.ended {
			c.out.push(nil)
			c.out.ended = true
		}
	})
	// Later data from the other side resets it.
	c.in.set(func() {
		if c.in.failed == nil && !c.in.ended {
			c.in.failed = syscall.EPIPE
		}
	})
	return nil
}

// reset ends both directions at once.
func (c *conn) reset() {
	c.in.sim.Event("%v reset", c)
	for _, h := range []*half{c.in, c.out} {
		h.set(func() { h.queue, h.failed = nil, syscall.ECONNRESET })
	}
}

// SyscallConn lets [TrySend] find the connection.
func (c *conn) SyscallConn() (syscall.RawConn, error) { return raw{c}, nil }

type raw struct{ c *conn }

func (r raw) Control(func(uintptr)) error   { return nil }
func (r raw) Read(func(uintptr) bool) error { return nil }
func (r raw) Write(f func(uintptr) bool) error {
	f(uintptr(r.c.index))
	return nil
}

// TrySend sends as much as the connection accepts without waiting.
func TrySend(index uintptr, b []byte) (int, error) {
	p := current()
	if p == nil {
		return 0, net.ErrClosed
	}
	p.sim.netMu.Lock()
	c := p.sim.conns[index]
	p.sim.netMu.Unlock()
	n, err := c.out.write(b, false)
	p.sim.Event("%v send %d of %d %v", c, n, len(b), err)
	return n, err
}
