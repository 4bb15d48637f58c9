// Package gate lets processes of a job in that connect, and keeps strangers out.
package gate

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tutti-go/tutti/internal/repeats"
)

// KeepAlive has the system end a connection within 25 s after its other side is cut off.
func KeepAlive(conn net.Conn) {
	c, ok := conn.(*net.TCPConn)
	if !ok {
		return
	}
	probes := net.KeepAliveConfig{
		Enable:   true,
		Idle:     CutOff * 2 / 5,
		Interval: CutOff / 5,
		Count:    3,
	}
	_ = c.SetKeepAliveConfig(probes)
	if raw, err := c.SyscallConn(); err == nil {
		_ = raw.Control(boundUnacknowledged)
	}
}

// Addresses returns where a listener can be reached: at those of its host's interfaces if it listens on all of them.
// Addresses that hold on a link alone are the list where the host has no others, without their zones, which are this
// host's (see [Zoned]). Loopback ones are where it has not even these: at another host, they lead to that one itself.
func Addresses(l net.Listener) (list []string) {
	local, ok := l.Addr().(*net.TCPAddr)
	if !ok || !local.IP.IsUnspecified() {
		return []string{l.Addr().String()}
	}
	interfaces, _ := net.InterfaceAddrs()
	add := func(suits func(net.IP) bool) {
		for _, a := range interfaces {
			if n, ok := a.(*net.IPNet); ok && suits(n.IP) {
				list = append(list, (&net.TCPAddr{IP: n.IP, Port: local.Port}).String())
			}
		}
	}
	add(func(ip net.IP) bool {
		return !ip.IsLoopback() && !ip.IsLinkLocalUnicast()
	})
	for _, suits := range []func(net.IP) bool{net.IP.IsLinkLocalUnicast, net.IP.IsLoopback} {
		if len(list) == 0 {
			add(suits)
		}
	}
	return list
}

// Zoned has each address of a link, without a zone, on all interfaces of this host that have such addresses.
func Zoned(addresses []string) (list []string) {
	for _, address := range addresses {
		a, err := netip.ParseAddrPort(address)
		if err != nil || !a.Addr().Is6() || !a.Addr().IsLinkLocalUnicast() || a.Addr().Zone() != "" {
			list = append(list, address)
			continue
		}
		for _, zone := range linkZones() {
			list = append(list, netip.AddrPortFrom(a.Addr().WithZone(zone), a.Port()).String())
		}
	}
	return list
}

// linkZones are the names of interfaces that have addresses of IPv6 on their links.
func linkZones() (names []string) {
	interfaces, _ := net.Interfaces()
	for _, i := range interfaces {
		addresses, _ := i.Addrs()
		if slices.ContainsFunc(addresses, func(a net.Addr) bool {
			n, ok := a.(*net.IPNet)
			return ok && n.IP.To4() == nil && n.IP.IsLinkLocalUnicast()
		}) {
			names = append(names, i.Name)
		}
	}
	return names
}

// ErrVersion is what a [tls.Config]'s GetConfigForClient returns to a process of another version.
var ErrVersion = errors.New("it is of another version of this library: all processes of a job use one")

// Reasons why a connection is refused.
const (
	Silence  = "it did not say who it is"
	Language = "it does not speak this protocol"
	Plain    = Language + ": what it says is no TLS"
	Nameless = "it speaks TLS, but has no certificate: it is no process of a job"
	Foreign  = "it speaks TLS, but its certificate is another program's"
	Secret   = "it knows another secret: it is of another job, " +
		"or TUTTI_SECRET or the file with the secret is not the same everywhere"
)

// Reason is what an error of a connection's handshake, or of its first answer, means.
func Reason(conn *tls.Conn, err error) string {
	reason := reasonOf(err)
	state := conn.ConnectionState()
	if reason == Secret && state.ServerName == CertificateName && state.NegotiatedProtocol == "" {
		return ErrVersion.Error() // its certificate may follow from the same secret in another way
	}
	return reason
}

// reasonOf is what the error says by itself.
func reasonOf(err error) string {
	var op *net.OpError
	isOp := errors.As(err, &op)
	var unverified *tls.CertificateVerificationError
	switch {
	case errors.Is(err, ErrVersion):
		return ErrVersion.Error()
	case errors.As(err, &unverified):
		if !slices.ContainsFunc(unverified.UnverifiedCertificates, isJobs) {
			return Foreign
		}
		return Secret
	case isOp && op.Op == "remote error": // an alert of TLS
		if strings.Contains(op.Err.Error(), "certificate") && !strings.Contains(op.Err.Error(), "required") {
			return Secret
		}
		return Language + ": " + op.Err.Error()
	case errors.As(err, new(tls.RecordHeaderError)):
		return Plain
	case strings.Contains(err.Error(), "didn't provide a certificate"): // crypto/tls has no type for it
		return Nameless
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrDeadlineExceeded):
		return Silence
	case isOp && op.Op != "local error":
		return Silence
	}
	return Language
}

// isJobs reports whether a certificate is of a process of some job.
func isJobs(c *x509.Certificate) bool {
	return slices.Equal(c.DNSNames, []string{CertificateName})
}

const (
	// CertificateName is the name in certificates of processes of jobs.
	CertificateName = "tutti"
	// Protocol is what processes of jobs speak (ALPN). Earlier versions do not say so.
	Protocol = "tutti"
)

// A Gate lets in connections whose other side knows a secret. At most Places handshakes may be in flight. One more has
// one of the address with the most of them end, at random. So a stranger, however fast it connects, crowds out only
// processes at its own address, and those get through after some attempts. Of IPv6, the first 64 bits count as the
// address, as one host may have all that begin with them.
type Gate struct {
	Name   string      // in the log
	Places int         // for handshakes at a time
	Log    repeats.Log // counts lines that repeat
	// Refused is told of each connection whose handshake has failed, and why. nil tells nobody.
	Refused func(conn net.Conn, reason string)

	mu         sync.Mutex                  // guards the fields below
	handshakes map[netip.Prefix][]net.Conn // in flight, by address; guarded by mu
	count      int                         // of these; guarded by mu
	trouble    error                       // of the last Accept that has ended, nil if it has succeeded; guarded by mu
	troubled   time.Time                   // when that was; guarded by mu
}

// Trouble is why no connection can be accepted now, nil if the last one was, or if none has failed for a while: what
// lasts fails again after a pause, and an Accept that waits for somebody to connect has no trouble.
func (g *Gate) Trouble() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if time.Since(g.troubled) > 2*longestAcceptPause {
		return nil
	}
	return g.trouble
}

// setTrouble is the outcome of an Accept.
func (g *Gate) setTrouble(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.trouble = err
	g.troubled = time.Now()
}

// Serve passes connections that have authenticated to serve, each in its goroutine, and closes them when it
// returns. Serve returns when the listener is closed.
func (g *Gate) Serve(l net.Listener, conf *tls.Config, serve func(conn *tls.Conn)) {
	pause := acceptPause
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			g.evict(0)
			return
		}
		g.setTrouble(err)
		if err != nil {
			g.refused(err)
			time.Sleep(pause)
			pause = min(2*pause, longestAcceptPause)
			continue
		}
		pause = acceptPause
		g.begin(conn)
		g.evict(g.Places)
		go g.admit(conn, conf, serve)
	}
}

// refused frees a descriptor, a stranger's, as the process may have none left for a new connection.
func (g *Gate) refused(err error) {
	g.mu.Lock()
	places := max(g.count-1, 0)
	g.mu.Unlock()
	g.evict(places)
	if times, due := g.Log.Count("accept"); due {
		slog.Warn(g.Name+": cannot accept a connection now", "err", err, "times", times)
	}
}

// admit makes the handshake of a connection, and serves it.
func (g *Gate) admit(conn net.Conn, conf *tls.Config, serve func(conn *tls.Conn)) {
	defer conn.Close() //nolint:errcheck // nothing is lost
	secure := tls.Server(conn, conf)
	err := conn.SetDeadline(time.Now().Add(Patience))
	if err == nil {
		err = secure.Handshake()
	}
	g.end(conn)
	if err != nil {
		reason := Reason(secure, err)
		g.Refuse(conn, reason, reason)
		if g.Refused != nil {
			g.Refused(conn, reason)
		}
		return
	}
	KeepAlive(conn)
	if conn.SetDeadline(time.Time{}) == nil {
		serve(secure)
	}
}

// source is what a handshake counts for: the address of its other side.
func source(conn net.Conn) netip.Prefix {
	remote, ok := conn.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	address := remote.AddrPort().Addr().Unmap().WithZone("")
	bits := address.BitLen()
	if address.Is6() {
		bits = 64
	}
	prefix, _ := address.Prefix(bits) // of no address, none
	return prefix
}

// begin notes that a handshake begins.
func (g *Gate) begin(conn net.Conn) {
	from := source(conn)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.handshakes == nil {
		g.handshakes = map[netip.Prefix][]net.Conn{}
	}
	g.handshakes[from] = append(g.handshakes[from], conn)
	g.count++
}

// end notes that a handshake has ended, unless it was evicted.
func (g *Gate) end(conn net.Conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	from := source(conn)
	if i := slices.Index(g.handshakes[from], conn); i >= 0 {
		g.remove(from, i)
	}
}

// remove forgets a handshake. mu is held.
func (g *Gate) remove(from netip.Prefix, i int) {
	list := g.handshakes[from]
	last := len(list) - 1
	list[i] = list[last]
	list[last] = nil
	g.handshakes[from] = list[:last]
	g.count--
	if last == 0 {
		delete(g.handshakes, from)
	}
}

// evict ends handshakes beyond a number of places.
func (g *Gate) evict(places int) {
	for _, conn := range g.surplus(places) {
		conn.Close() //nolint:errcheck // nothing is lost
	}
}

// surplus forgets handshakes beyond a number of places, and returns their connections.
func (g *Gate) surplus(places int) (list []net.Conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.count > places {
		from := g.busiest()
		i := rand.IntN(len(g.handshakes[from]))
		list = append(list, g.handshakes[from][i])
		g.remove(from, i)
	}
	return list
}

// busiest returns the address with the most handshakes in flight, one at random of those that have as many. mu is held.
func (g *Gate) busiest() (from netip.Prefix) {
	length := 0
	ties := 0
	for address, list := range g.handshakes {
		if len(list) > length {
			length = len(list)
			ties = 0
		}
		if len(list) == length {
			ties++
			if rand.IntN(ties) == 0 {
				from = address
			}
		}
	}
	return from
}

// Refuse logs a refusal, ever less often for one class.
func (g *Gate) Refuse(conn net.Conn, class, reason string) {
	g.Warn(conn, "connection refused", class, reason)
}

// Warn logs an event, ever less often for one class.
func (g *Gate) Warn(conn net.Conn, event, class, reason string) {
	if times, due := g.Log.Count(class); due {
		slog.Warn(g.Name+": "+event, "from", conn.RemoteAddr(), "reason", reason, "times", times)
	}
}
