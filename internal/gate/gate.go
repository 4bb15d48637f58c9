// Package gate accepts connections of a job's processes, and keeps strangers out.
package gate

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tutti-go/tutti/internal/interfaces"
	"github.com/tutti-go/tutti/internal/repeats"
)

// KeepAlive makes the system end a connection within 25 s after its other side is cut off.
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

// Addresses returns the addresses at which a listener can be reached; if it listens on all interfaces, those of its
// host's interfaces that are up. Link-local addresses come last, without their zones, which are this host's (see
// [Zoned]). Those of virtual interfaces, such as docker0, are returned only if there are no other addresses. Loopback
// addresses are returned only if there are not even these: on another host they lead to that host itself.
func Addresses(l net.Listener) []string {
	local, ok := l.Addr().(*net.TCPAddr)
	if !ok || !local.IP.IsUnspecified() {
		return []string{l.Addr().String()}
	}
	return addresses(interfaces.Up(), local.Port)
}

// addresses is Addresses for a port of a host with these interfaces.
func addresses(all []interfaces.Interface, port int) (list []string) {
	add := func(suits func(i interfaces.Interface, ip net.IP) bool) {
		for _, i := range all {
			for _, ip := range i.IPs {
				if suits(i, ip) {
					list = append(list, (&net.TCPAddr{IP: ip, Port: port}).String())
				}
			}
		}
	}
	add(func(_ interfaces.Interface, ip net.IP) bool {
		return !ip.IsLoopback() && !ip.IsLinkLocalUnicast()
	})
	add(func(i interfaces.Interface, ip net.IP) bool {
		return !i.Virtual && ip.IsLinkLocalUnicast()
	})
	for _, suits := range []func(net.IP) bool{net.IP.IsLinkLocalUnicast, net.IP.IsLoopback} {
		if len(list) == 0 {
			add(func(_ interfaces.Interface, ip net.IP) bool { return suits(ip) })
		}
	}
	return list
}

// Zoned expands each link-local address without a zone to all interfaces of this host with such addresses, virtual ones
// only if there are no others. It keeps the address if there are none.
func Zoned(addresses []string) []string { return zoned(addresses, realZones(interfaces.Up())) }

// zoned is Zoned for a host with interfaces of these names.
func zoned(addresses, zones []string) (list []string) {
	for _, address := range addresses {
		a, ok := linkLocal(address)
		if !ok || a.Addr().Zone() != "" || len(zones) == 0 {
			list = append(list, address)
			continue
		}
		for _, zone := range zones {
			list = append(list, netip.AddrPortFrom(a.Addr().WithZone(zone), a.Port()).String())
		}
	}
	return list
}

// linkLocal returns an address if it is a link-local one of IPv6.
func linkLocal(address string) (a netip.AddrPort, ok bool) {
	a, err := netip.ParseAddrPort(address)
	return a, err == nil && a.Addr().Is6() && a.Addr().IsLinkLocalUnicast()
}

// linkError adds to the error of an attempt to connect why this host, whose interfaces with link-local IPv6 addresses
// have these names, cannot reach a link-local address.
func linkError(address string, zones []string, err error) error {
	a, ok := linkLocal(address)
	if !ok {
		return err
	}
	if len(zones) == 0 {
		return fmt.Errorf("%w: no interface of this host has a link-local IPv6 address", err)
	}
	zone := a.Addr().Zone()
	if _, notNumber := strconv.Atoi(zone); notNumber != nil && !slices.Contains(zones, zone) {
		return fmt.Errorf("%w: %q is no interface of this host with a link-local IPv6 address: these have one: %s",
			err, zone, strings.Join(zones, ", "))
	}
	return err
}

// linkZones returns the names of interfaces with link-local IPv6 addresses.
func linkZones(all []interfaces.Interface) (names []string) {
	for _, i := range all {
		if slices.ContainsFunc(i.IPs, func(ip net.IP) bool { return ip.To4() == nil && ip.IsLinkLocalUnicast() }) {
			names = append(names, i.Name)
		}
	}
	return names
}

// realZones is linkZones without virtual interfaces, unless there are no others: a host may have one for each of many
// containers, and an attempt on each takes seconds.
func realZones(all []interfaces.Interface) []string {
	isVirtual := func(i interfaces.Interface) bool { return i.Virtual }
	if names := linkZones(slices.DeleteFunc(slices.Clone(all), isVirtual)); names != nil {
		return names
	}
	return linkZones(all)
}

// ErrVersion is the error that a [tls.Config]'s GetConfigForClient returns to a process of another version.
var ErrVersion = errors.New("it is of another version of this library: all processes of a job use one")

// Reasons why a connection is refused.
const (
	Silence  = "it did not say who it is"
	Language = "it does not speak this protocol"
	Plain    = Language + ": it does not use TLS"
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

// late is why a process of a job closes a connection before this process has answered.
const late = "this process has not answered in time: was it stopped, or is its machine crowded?"

// hungUp reports whether a process of a job has begun the handshake of a connection, and then closed it.
func hungUp(conn *tls.Conn, err error) bool {
	if errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrDeadlineExceeded) {
		return false // this process has
	}
	return conn.ConnectionState().ServerName == CertificateName
}

// isJobs reports whether a certificate belongs to a process of any job.
func isJobs(c *x509.Certificate) bool {
	return slices.Equal(c.DNSNames, []string{CertificateName})
}

const (
	// CertificateName is the name in certificates of processes of jobs.
	CertificateName = "tutti"
	// Protocol is what processes of jobs speak (ALPN). Earlier versions do not say so.
	Protocol = "tutti"
)

// A Gate accepts connections whose other side knows a secret. At most Places handshakes may be in flight. One more
// evicts a random handshake of the address with the most of them. So a stranger, however fast it connects, only
// displaces processes at its own address, and those succeed after some attempts. For IPv6, the first 64 bits count as
// the address, since one host may have all addresses that begin with them.
type Gate struct {
	Name   string      // in the log
	Places int         // limit of handshakes in flight
	Log    repeats.Log // counts lines that repeat
	// Refused is called for each connection whose handshake has failed, with the reason, unless the other side has hung
	// up. It may be nil.
	Refused func(conn net.Conn, reason string)

	mu         sync.Mutex                  // guards the fields below
	handshakes map[netip.Prefix][]net.Conn // in flight, by address; guarded by mu
	count      int                         // of these; guarded by mu
	trouble    error                       // error of the last Accept, nil if it succeeded; guarded by mu
	troubled   time.Time                   // when that was; guarded by mu
}

// Trouble returns the reason why no connection can be accepted now. It is nil if the last Accept succeeded, or if none
// has failed for a while: a lasting error recurs after a pause, and an Accept that waits for a connection has no
// trouble.
func (g *Gate) Trouble() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if time.Since(g.troubled) > 2*longestAcceptPause {
		return nil
	}
	return g.trouble
}

// setTrouble records the outcome of an Accept.
func (g *Gate) setTrouble(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.trouble = err
	g.troubled = time.Now()
}

// Serve passes authenticated connections to serve, each in its own goroutine, and closes them when it returns. Serve
// returns when the listener is closed.
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

// refused frees a stranger's descriptor, because the process may have none left for a new connection.
func (g *Gate) refused(err error) {
	g.mu.Lock()
	places := max(g.count-1, 0)
	g.mu.Unlock()
	g.evict(places)
	if times, due := g.Log.Count("accept"); due {
		slog.Warn(g.Name+": cannot accept a connection now", "err", err, "times", times)
	}
}

// admit performs the handshake of a connection, and serves it.
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
		if reason == Silence && hungUp(secure, err) {
			g.Warn(conn, "connection lost", late, late)
			return
		}
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

// source returns the address for which a handshake counts.
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
	prefix, _ := address.Prefix(bits) // a zero Prefix for an invalid address
	return prefix
}

// begin records that a handshake begins.
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

// end records that a handshake has ended, unless it was evicted.
func (g *Gate) end(conn net.Conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	from := source(conn)
	if i := slices.Index(g.handshakes[from], conn); i >= 0 {
		g.remove(from, i)
	}
}

// remove removes a handshake. The caller holds mu.
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

// surplus removes handshakes beyond a number of places, and returns their connections.
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

// busiest returns the address with the most handshakes in flight, a random one of several. The caller holds mu.
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

// Refuse logs a refusal, at increasing intervals for each class.
func (g *Gate) Refuse(conn net.Conn, class, reason string) {
	g.Warn(conn, "connection refused", class, reason)
}

// Warn logs an event, at increasing intervals for each class.
func (g *Gate) Warn(conn net.Conn, event, class, reason string) {
	if times, due := g.Log.Count(class); due {
		slog.Warn(g.Name+": "+event, "from", conn.RemoteAddr(), "reason", reason, "times", times)
	}
}
