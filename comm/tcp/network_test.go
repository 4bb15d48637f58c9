package tcp_test

import (
	"context"
	"errors"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/internal/jobtest"
	"github.com/tutti-go/tutti/internal/networktest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// over has ranks connect over a network.
func over(network store.Network) func(c *tcp.Config) {
	return func(c *tcp.Config) {
		c.Network = network
		c.Listen = ""
	}
}

// TestNetworks runs the suite over networks of the program's own.
func TestNetworks(t *testing.T) {
	for _, v := range []struct {
		name    string
		size    int
		network store.Network
	}{
		{"pipes", 2, new(networktest.Pipes)},
		{"sockets", 3, networktest.NewSockets(t)},
	} {
		t.Run(v.name, func(t *testing.T) {
			if !extended && v.name != "pipes" {
				t.Skip("set TUTTI_EXTENDED: sockets are those of other tests")
			}
			suite(t, v.size, v.network)
		})
	}
}

// suite runs the suite on ranks that could share memory, and do not.
func suite(t *testing.T, size int, network store.Network) {
	const calls = 512 // each takes two goroutines of both sides
	tcp.Neighbors(t, together)
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	world := newSuiteWorld(t, over(network))
	commtest.Run(t, commtest.Backend{
		Name:         "tcp",
		Sizes:        []int{size},
		Calls:        calls,
		LateMismatch: true,
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			return world.run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
			})
		},
	})
}

// Data of ranks goes over one connection of their network alone, also if there are processors for more: they share no
// memory.
func TestNetworkSharesNothing(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	tcp.Neighbors(t, together)
	network := new(networktest.Pipes)
	for _, c := range open(t, 2, over(network)) {
		slots, anything := tcp.Shares(c)
		assert.False(t, slots)
		assert.False(t, anything)
		defer func() { assert.NoError(t, c.Close()) }()
	}
	assert.EqualValues(t, 1, network.Dialed.Load())
}

// nameless is a network whose listeners do not say where they are, as those of tsnet.
type nameless struct{}

func (nameless) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, network, address)
}

func (nameless) Listen(network, _ string) (net.Listener, error) { return net.Listen(network, ":0") }

// A listener of a Network that reports no address is refused at once: the addresses of this host do not apply. An
// advertised address is published unchanged.
func TestNetworkSaysNoAddress(t *testing.T) {
	err := run(t.Context(), 2, over(nameless{}), func(context.Context, comm.Communicator) error { return nil })
	require.ErrorIs(t, err, comm.ErrArgument)
	assert.ErrorContains(t, err, "set Advertise")
}

// absent is a network whose relay does not run.
type absent struct{ address string }

func (a absent) Dial(ctx context.Context, network, _ string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, network, a.address)
}

func (a absent) Listen(_, address string) (net.Listener, error) {
	l, err := new(networktest.Pipes).Listen("tcp", address)
	return &dialing{l, a, make(chan struct{})}, err
}

// dialing is a listener that dials for each connection.
type dialing struct {
	net.Listener
	absent
	closed chan struct{}
}

func (d *dialing) Accept() (net.Conn, error) {
	conn, err := d.Dial(context.Background(), "tcp", "")
	select {
	case <-d.closed:
		return nil, net.ErrClosed
	default:
		return conn, err
	}
}

func (d *dialing) Close() error {
	close(d.closed)
	return d.Listener.Close()
}

// A Network that reaches nobody is named by both sides, when their context ends.
func TestNetworkReachesNobody(t *testing.T) {
	address := jobtest.Address(t, 1)
	accepts := "this rank cannot accept connections: dial tcp " + address
	reaches := "rank 0: cannot be reached at "
	idle := func(context.Context, comm.Communicator) error { return nil }
	for patience := 500 * time.Millisecond; ; patience *= 2 { // until both have tried
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		err := run(ctx, 2, over(absent{address}), idle)
		cancel()
		require.ErrorIs(t, err, comm.ErrTimeout)
		if text := err.Error(); strings.Contains(text, accepts) && strings.Contains(text, reaches) {
			return
		}
		require.Less(t, patience, time.Minute, "neither side is named: %v", err)
	}
}

// cut is a connection that ends after some bytes.
type cut struct {
	net.Conn
	left atomic.Int64
}

func (c *cut) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.left.Add(-int64(n)) < 0 {
		return 0, errors.Join(errCut, c.Close())
	}
	return n, err
}

var errCut = errors.New("the connection is cut")

// Connections that are lost before all ranks are connected, in the handshake or behind it, are dialed again.
func TestNetworkLosesConnections(t *testing.T) {
	t.Parallel()
	const (
		failures = 12
		step     = 200 // bytes; a handshake has some 1,500
	)
	network := new(networktest.Pipes)
	network.Conn = func(conn net.Conn) net.Conn {
		dialed := network.Dialed.Load()
		if dialed > failures {
			return conn
		}
		c := &cut{Conn: conn}
		c.left.Store(step * dialed)
		return c
	}
	err := meet(t, network)
	for network.Dialed.Load() <= failures {
		if err != nil { // it was cut behind the handshakes
			require.ErrorIs(t, err, comm.ErrPeerFailed)
		}
		err = meet(t, network)
	}
	require.NoError(t, err)
}

// meet makes two ranks connect over a network and enter a barrier. A rank that fails ends the job, as a launcher's
// rank does: a rank that is not connected would wait for one that was, and has lost it, until its context ends.
func meet(t *testing.T, network store.Network) error {
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	ctx, cancel := context.WithCancel(soon(t))
	defer cancel()
	var errs [2]error
	var all sync.WaitGroup
	for rank := range errs {
		all.Go(func() {
			c := tcp.Config{Rank: rank, WorldSize: len(errs), TLS: conf, Network: network}
			errs[rank] = enter(ctx, server, c)
			if errs[rank] != nil {
				cancel()
			}
		})
	}
	all.Wait()
	return errors.Join(errs[:]...)
}

// enter connects a rank and has it enter a barrier.
func enter(ctx context.Context, server *store.Server, config tcp.Config) error {
	c, err := tcp.New(ctx, server.Local("test"), config)
	if err != nil {
		return err
	}
	return comm.Run(ctx, []comm.Communicator{c}, func(ctx context.Context, c comm.Communicator) error { return c.Barrier(ctx) })
}

// A peer that takes a connection and says nothing holds a rank up no longer than the system's would.
func TestNetworkFallsSilent(t *testing.T) {
	t.Parallel()
	network := new(networktest.Pipes)
	var first atomic.Bool
	network.Conn = func(conn net.Conn) net.Conn {
		if first.CompareAndSwap(false, true) {
			return mute{conn}
		}
		return conn
	}
	err := run(soon(t), 2, over(network),
		func(ctx context.Context, c comm.Communicator) error { return c.Barrier(ctx) })
	require.NoError(t, err)
}

// mute is a connection that loses what is written.
type mute struct{ net.Conn }

func (mute) Write(b []byte) (int, error) { return len(b), nil }
