package store

import (
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"math/big"
	mrand "math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"
)

// patience bounds the time until a connection has said who it is, and that of an answer: some round trips, beside
// 1 + 2 + 4 s of repeated packets. A stranger that says nothing takes one of the places of [Gate] no longer.
const patience = 10 * time.Second

// cutOff is the time after which a connection ends whose other side is cut off: a pulled cable that is put back within
// some 20 s costs nothing.
const cutOff = 25 * time.Second

// keepAlive has the system look whether a connection's other side is cut off.
func keepAlive(conn net.Conn) {
	if c, ok := conn.(*net.TCPConn); ok {
		_ = c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: cutOff * 2 / 5, Interval: cutOff / 5, Count: 3})
		if raw, err := c.SyscallConn(); err == nil {
			_ = raw.Control(boundUnacknowledged)
		}
	}
}

// Addresses returns where a listener can be reached: at those of its host's interfaces if it listens on all of them,
// loopback ones last.
func Addresses(l net.Listener) (list []string) {
	at := l.Addr().(*net.TCPAddr)
	if !at.IP.IsUnspecified() {
		return []string{at.String()}
	}
	interfaces, _ := net.InterfaceAddrs()
	for _, loopback := range []bool{false, true} {
		for _, a := range interfaces {
			if n, ok := a.(*net.IPNet); ok && n.IP.IsLoopback() == loopback && !n.IP.IsLinkLocalUnicast() {
				list = append(list, (&net.TCPAddr{IP: n.IP, Port: at.Port}).String())
			}
		}
	}
	return list
}

// TLS is the configuration of both sides of a connection between processes that know a secret. Each proves it by
// the key of a certificate that follows from the secret and the purpose (HKDF, Ed25519), and accepts no other.
// What they say is encrypted by keys of the connection alone (TLS 1.3).
func TLS(secret []byte, purpose string) (*tls.Config, error) {
	seed, err := hkdf.Key(sha256.New, secret, nil, "tutti 1 "+purpose, ed25519.SeedSize)
	if err != nil {
		return nil, err
	}
	const name = "tutti"
	key := ed25519.NewKeyFromSeed(seed)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{name}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		NotBefore:   time.Unix(0, 0), NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC), // whatever the clocks say
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	own := x509.NewCertPool()
	own.AddCert(leaf)
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}},
		RootCAs:      own, ServerName: name, ClientCAs: own, ClientAuth: tls.RequireAndVerifyClientCert,
		MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true,
	}, nil
}

// ErrVersion is what a [tls.Config]'s GetConfigForClient returns to a process of another version.
var ErrVersion = errors.New("it is of another version of this library: all processes of a job use one")

// Reasons why a connection is refused.
const (
	reasonSilence  = "it did not say who it is"
	reasonLanguage = "it does not speak this protocol"
	reasonSecret   = "it knows another secret: it is of another job, or TUTTI_SECRET or the file with the secret is not the same everywhere"
)

// reason is what an error of a handshake means.
func reason(err error) string {
	var alert *net.OpError
	switch remote := errors.As(err, &alert) && alert.Op == "remote error"; {
	case errors.Is(err, ErrVersion):
		return ErrVersion.Error()
	case errors.As(err, new(*tls.CertificateVerificationError)), remote:
		return reasonSecret
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrDeadlineExceeded), alert != nil && alert.Op != "local error":
		return reasonSilence
	}
	return reasonLanguage
}

// A Gate lets in connections whose other side knows a secret. At most Most handshakes may be in flight. One more has
// one of the address with the most of them end, at random. So a stranger, however fast it connects, crowds out only
// processes at its own address, and those get through after some attempts. Of IPv6, the first 64 bits count as the
// address, as one host may have all that begin with them. Refusals for one reason are logged the first, second, fourth,
// eighth … time.
type Gate struct {
	Name string // in the log
	Most int

	mu         sync.Mutex
	handshakes map[netip.Prefix][]net.Conn // in flight, by address; guarded by mu
	count      int                         // of these; guarded by mu
	refused    map[string]int              // times, by reason; guarded by mu
}

// Serve passes connections that have authenticated to serve, each in a goroutine of its own, and closes them when it
// returns. Serve returns when the listener is closed.
func (g *Gate) Serve(l net.Listener, conf *tls.Config, serve func(conn *tls.Conn)) {
	for {
		conn, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			g.evict(0)
			return
		case err != nil:
			// Out of descriptors, for instance: a stranger frees one.
			g.mu.Lock()
			most := max(g.count-1, 0)
			g.mu.Unlock()
			g.evict(most)
			if times, due := g.tally("accept"); due {
				slog.Warn(g.Name+": cannot accept a connection now", "err", err, "times", times)
			}
			time.Sleep(10 * time.Millisecond)
			continue
		}
		g.begin(conn)
		g.evict(g.Most)
		go func() {
			defer conn.Close() //nolint:errcheck // nothing is lost
			secure := tls.Server(conn, conf)
			err := conn.SetDeadline(time.Now().Add(patience))
			if err == nil {
				err = secure.Handshake()
			}
			g.end(conn)
			if err != nil {
				g.Refuse(conn, reason(err), reason(err))
				return
			}
			keepAlive(conn)
			if conn.SetDeadline(time.Time{}) == nil {
				serve(secure)
			}
		}()
	}
}

// source is what a handshake counts for: the address of its other side.
func source(conn net.Conn) netip.Prefix {
	at, ok := conn.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	address := at.AddrPort().Addr().Unmap().WithZone("")
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

// evict ends handshakes beyond most.
func (g *Gate) evict(most int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.count > most {
		from := g.busiest()
		i := mrand.IntN(len(g.handshakes[from]))
		g.handshakes[from][i].Close() //nolint:errcheck // nothing is lost
		g.remove(from, i)
	}
}

// busiest returns the address with the most handshakes in flight, one at random of those that have as many. mu is held.
func (g *Gate) busiest() (from netip.Prefix) {
	length, ties := 0, 0
	for address, list := range g.handshakes {
		if len(list) > length {
			length, ties = len(list), 0
		}
		if len(list) == length {
			ties++
			if mrand.IntN(ties) == 0 {
				from = address
			}
		}
	}
	return from
}

// Refuse logs a refusal, ever more rarely those of one class.
func (g *Gate) Refuse(conn net.Conn, class, reason string) {
	g.warn(conn, "connection refused", class, reason)
}

func (g *Gate) warn(conn net.Conn, what, class, reason string) {
	if times, due := g.tally(class); due {
		slog.Warn(g.Name+": "+what, "from", conn.RemoteAddr(), "reason", reason, "times", times)
	}
}

// tally returns how often an event has happened, and whether to log it: the first, second, fourth, eighth … time.
func (g *Gate) tally(what string) (times int, due bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.refused == nil {
		g.refused = map[string]int{}
	}
	g.refused[what]++
	times = g.refused[what]
	return times, times&(times-1) == 0
}
