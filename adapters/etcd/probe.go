package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/tutti-go/tutti/comm"
)

// probeTime bounds the time for an endpoint to show its protocol.
const probeTime = 2 * time.Second

// An HTTP/2 client begins with these bytes and its settings, which may be empty.
const http2Begin = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + "\x00\x00\x00\x04\x00\x00\x00\x00\x00"

// finding describes an endpoint that the client could not use.
type finding struct {
	sentinel error  // what errors.Is finds
	text     string // the finding and the remedy
}

// unreachable reports whether a client's error may come from a connection rather than from etcd.
func unreachable(err error) bool {
	if err == nil || fromEtcd(err) {
		return false
	}
	switch codeOf(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Unknown, codes.Internal:
		return true
	}
	return false
}

// explain adds a finding for each endpoint to the error of a client that could use none.
func (cfg *Config) explain(ctx context.Context, err error) error {
	endpoints := cfg.Client.Endpoints()
	found := make([]finding, len(endpoints))
	var all sync.WaitGroup
	for i, endpoint := range endpoints {
		all.Go(func() { found[i] = probe(ctx, endpoint, err) })
	}
	all.Wait()
	sentinel := found[0].sentinel
	texts := make([]string, len(found))
	for i, f := range found {
		texts[i] = f.text
		if f.sentinel != sentinel {
			sentinel = comm.ErrPeerFailed // one server of a cluster is down
		}
	}
	if ctx.Err() != nil {
		sentinel = comm.ContextError(ctx)
	}
	return fmt.Errorf("etcd: %w: %w; %s", sentinel, err, strings.Join(texts, "; "))
}

// probe returns why the client could not use an endpoint, and the remedy. The client's own error is of the operation
// that failed first: if etcd closes a connection because of a certificate, a write gets a broken pipe. probe sends
// only the beginning of a connection.
func probe(ctx context.Context, endpoint string, met error) finding {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	scheme, address, found := strings.Cut(endpoint, "://")
	if !found {
		address = endpoint
		scheme = ""
	}
	address = strings.TrimSuffix(address, "/")
	plain, err := dial(ctx, scheme, address)
	if err != nil {
		return unconnected(endpoint, err)
	}
	defer plain.Close() //nolint:errcheck // nothing was written
	// Accept any server: only its protocol matters.
	conn := tls.Client(plain, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	err = conn.HandshakeContext(ctx)
	if err == nil {
		deadline, _ := ctx.Deadline()
		_ = conn.SetReadDeadline(deadline)
		_, err = conn.Read(make([]byte, 1)) // TLS 1.3 refuses a client here
	}
	var remote *net.OpError
	switch {
	case strings.Contains(met.Error(), "x509: "): // from the client, which has no other form
		return finding{fs.ErrPermission, address + " speaks TLS with a certificate " + refusal(met.Error())}
	case errors.As(err, &remote) && remote.Op == "remote error": // an alert, for which package tls has no type
		return alerted(scheme, address, remote.Err)
	case conn.ConnectionState().HandshakeComplete:
		return encrypted(scheme, address)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return finding{comm.ErrPeerFailed, address + " takes connections, and answers nothing: " +
			"is it stopped, or something else than etcd?"}
	}
	return unencrypted(ctx, scheme, address, err)
}

// dial connects to an endpoint.
func dial(ctx context.Context, scheme, address string) (net.Conn, error) {
	network := "tcp"
	if strings.HasPrefix(scheme, "unix") {
		network = "unix"
	}
	return new(net.Dialer).DialContext(ctx, network, address)
}

// unconnected describes an endpoint that does not accept connections.
func unconnected(endpoint string, err error) finding {
	var address *net.AddrError
	var name *net.DNSError
	switch {
	case errors.As(err, &address), errors.As(err, &name) && strings.Contains(name.Err, "unknown port"),
		strings.Contains(err.Error(), "missing address"):
		return finding{comm.ErrArgument, fmt.Sprintf("%v: the endpoint %q is not HOST:PORT", err, endpoint)}
	case name != nil:
		return finding{comm.ErrUnavailable, err.Error() + ": check the endpoint and this host's DNS"}
	case errors.Is(err, syscall.ECONNREFUSED):
		return finding{comm.ErrPeerFailed, err.Error() +
			": etcd does not run there, or its --listen-client-urls are others"}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return finding{comm.ErrPeerFailed, err.Error() + ": the host is down, or a firewall drops what is sent to it"}
	}
	return finding{comm.ErrPeerFailed, err.Error()}
}

// alerted describes an endpoint whose TLS refuses the client.
func alerted(scheme, address string, alert error) finding {
	if !strings.Contains(alert.Error(), "certificate") {
		return finding{comm.ErrArgument, fmt.Sprintf("%s speaks TLS, but is no etcd: %v", address, alert)}
	}
	if scheme == "http" || scheme == "unix" {
		return finding{comm.ErrArgument, address + " speaks TLS: the endpoint must begin with https://, " +
			"and etcd's client needs a TLS configuration with a certificate"}
	}
	return finding{fs.ErrPermission, fmt.Sprintf("%s speaks TLS, and asks for a client's certificate that it accepts: "+
		"%v; give the client one of an authority in etcd's --trusted-ca-file, and one that is valid now", address, alert)}
}

// encrypted describes an endpoint that speaks TLS.
func encrypted(scheme, address string) finding {
	if scheme == "https" || scheme == "unixs" {
		return finding{comm.ErrPeerFailed, address + " speaks TLS, as https:// says, and does nothing more"}
	}
	return finding{comm.ErrArgument, address + " speaks TLS: " +
		"the endpoint must begin with https://, and etcd's client needs a TLS configuration"}
}

// refusal describes a server's certificate that the client refused, and the remedy. The client's error has only the
// text of package x509.
func refusal(text string) string {
	switch {
	case strings.Contains(text, "has expired or is not yet valid"):
		return "that is not valid now: renew it, or set the clock of this host"
	case strings.Contains(text, "unknown authority"):
		return "of an authority that etcd's client does not know: add it to RootCAs of its TLS configuration"
	case strings.Contains(text, "certificate is valid for "),
		strings.Contains(text, "certificate is not valid for any names"),
		strings.Contains(text, "doesn't contain any IP SANs"):
		return "of another host: the endpoint must be one of its names"
	}
	return "that etcd's client does not accept: " +
		"give etcd one for servers that RootCAs of the client's TLS configuration sign"
}

// unencrypted describes an endpoint that does not speak TLS, according to fault.
func unencrypted(ctx context.Context, scheme, address string, fault error) finding {
	if !speaksHTTP2(ctx, scheme, address) {
		return finding{comm.ErrArgument, address + " is no etcd: it speaks neither TLS nor HTTP/2"}
	}
	if scheme == "http" || scheme == "unix" {
		return finding{comm.ErrPeerFailed, address + " speaks HTTP/2 without TLS, as http:// says, and does nothing more: " +
			needsMajority}
	}
	return finding{comm.ErrArgument, fmt.Sprintf(
		"%s does not speak TLS: %v; the endpoint must begin with http://", address, fault)}
}

// speaksHTTP2 reports whether an endpoint answers as an HTTP/2 server, as etcd does.
func speaksHTTP2(ctx context.Context, scheme, address string) bool {
	conn, err := dial(ctx, scheme, address)
	if err != nil {
		return false
	}
	defer conn.Close() //nolint:errcheck // nothing is lost
	deadline, _ := ctx.Deadline()
	if conn.SetDeadline(deadline) != nil {
		return false
	}
	if _, err := io.WriteString(conn, http2Begin); err != nil {
		return false
	}
	const settings = 4 // type of the first frame
	header := make([]byte, 9)
	_, err = io.ReadFull(conn, header)
	return err == nil && header[3] == settings
}
