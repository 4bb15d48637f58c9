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
	"net"
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

// A Gate lets in connections whose other side knows a secret. At most Most others may be open: beyond that, the
// oldest gives way to the newest. Refusals for one reason are logged the first, second, fourth, eighth … time.
type Gate struct {
	Name string // in the log
	Most int

	mu      sync.Mutex
	open    []net.Conn
	refused map[string]int
}

// Serve passes connections that have authenticated to serve, each in a goroutine of its own, and closes them when it
// returns. Serve returns when the listener is closed.
func (g *Gate) Serve(l net.Listener, conf *tls.Config, serve func(conn *tls.Conn)) {
	for {
		conn, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			g.giveWay(0)
			return
		case err != nil:
			// Out of descriptors, for instance: the oldest stranger frees one.
			g.mu.Lock()
			most := max(len(g.open)-1, 0)
			g.mu.Unlock()
			g.giveWay(most)
			if times, due := g.count("accept"); due {
				slog.Warn(g.Name+": cannot accept a connection now", "err", err, "times", times)
			}
			time.Sleep(10 * time.Millisecond)
			continue
		}
		g.mu.Lock()
		g.open = append(g.open, conn)
		g.mu.Unlock()
		g.giveWay(g.Most)
		go func() {
			defer conn.Close() //nolint:errcheck // nothing is lost
			secure := tls.Server(conn, conf)
			err := conn.SetDeadline(time.Now().Add(patience))
			if err == nil {
				err = secure.Handshake()
			}
			g.mu.Lock()
			g.open = slices.DeleteFunc(g.open, func(c net.Conn) bool { return c == conn })
			g.mu.Unlock()
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

// giveWay closes the oldest connections beyond most.
func (g *Gate) giveWay(most int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(g.open) > most {
		g.open[0].Close() //nolint:errcheck // nothing is lost
		g.open = slices.Delete(g.open, 0, 1)
	}
}

// Refuse logs a refusal, ever more rarely those of one class.
func (g *Gate) Refuse(conn net.Conn, class, reason string) {
	g.warn(conn, "connection refused", class, reason)
}

func (g *Gate) warn(conn net.Conn, what, class, reason string) {
	if times, due := g.count(class); due {
		slog.Warn(g.Name+": "+what, "from", conn.RemoteAddr(), "reason", reason, "times", times)
	}
}

// count returns how often an event has happened, and whether to log it: the first, second, fourth, eighth … time.
func (g *Gate) count(what string) (times int, due bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.refused == nil {
		g.refused = map[string]int{}
	}
	g.refused[what]++
	times = g.refused[what]
	return times, times&(times-1) == 0
}
