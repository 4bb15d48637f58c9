package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

// probeTime bounds how long an endpoint takes to show what it is.
const probeTime = 2 * time.Second

// probe says what an endpoint is that the client could not use. The client's own errors are those of whatever failed
// first: a write to a connection that etcd has closed because of a certificate is a broken pipe. Nothing is sent but
// the beginning of a connection.
func probe(ctx context.Context, endpoint string) string {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	_, address, found := strings.Cut(endpoint, "://")
	if !found {
		address = endpoint
	}
	plain, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return err.Error()
	}
	defer plain.Close() //nolint:errcheck // nothing was written
	// Any server will do: only its protocol matters.
	conn := tls.Client(plain, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	err = conn.HandshakeContext(ctx)
	if err == nil {
		deadline, _ := ctx.Deadline()
		_ = conn.SetReadDeadline(deadline)
		_, err = conn.Read(make([]byte, 1)) // where TLS 1.3 refuses a client
	}
	var remote *net.OpError
	switch {
	case errors.As(err, &remote) && remote.Op == "remote error": // an alert, of which package tls has no type
		return fmt.Sprintf("%s speaks TLS, and asks for a client's certificate that it accepts: %v", address, remote.Err)
	case conn.ConnectionState().HandshakeComplete:
		return address + " speaks TLS, as https:// says"
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return address + " takes connections, and answers nothing"
	}
	return fmt.Sprintf("%s does not speak TLS: %v", address, err)
}
