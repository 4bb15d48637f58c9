package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
)

// network is a store.Network over a relay. Its addresses are the name of a rank and a port.
type network struct{ relay, name string }

// Dial implements store.Network.
func (n network) Dial(ctx context.Context, _, address string) (net.Conn, error) {
	return n.request(ctx, "dial "+address)
}

// Listen implements store.Network.
func (n network) Listen(_, port string) (net.Listener, error) {
	if port == ":0" {
		port = fmt.Sprint(":", rand.Uint32())
	}
	ctx, end := context.WithCancel(context.Background())
	return &listener{n, address(n.name + port), ctx, end}, nil
}

// request returns a connection through the relay once the other side has arrived.
func (n network) request(ctx context.Context, line string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", n.relay)
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	_, err = fmt.Fprintln(conn, line)
	if err == nil {
		_, err = io.ReadFull(conn, make([]byte, len(joined)))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("relay: %s: %w", strings.TrimSpace(line), err), conn.Close())
	}
	return conn, nil
}

// listener requests connections from the relay, one after the other.
type listener struct {
	network
	address
	ctx context.Context    // ends at Close
	end context.CancelFunc // ends ctx
}

// Accept implements [net.Listener].
func (l *listener) Accept() (net.Conn, error) {
	conn, err := l.request(l.ctx, "accept "+string(l.address))
	if l.ctx.Err() != nil {
		return nil, net.ErrClosed
	}
	return conn, err
}

// Close implements [net.Listener].
func (l *listener) Close() error {
	l.end()
	return nil
}

// Addr implements [net.Listener].
func (l *listener) Addr() net.Addr { return l.address }

// address is an address in the network.
type address string

// Network implements [net.Addr].
func (address) Network() string { return "relay" }

// String implements [net.Addr].
func (a address) String() string { return string(a) }
