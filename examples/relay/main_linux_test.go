package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/internal/networktest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

const port = ":9000"

// programVariable has the test's process be the program.
const programVariable = "TUTTI_TEST_RELAY"

func TestMain(m *testing.M) {
	if os.Getenv(programVariable) != "" {
		main()
		return
	}
	m.Run()
}

// TestBehindNAT runs the program, and the conformance suite of communicators, on two hosts that are behind address
// translation and cannot reach each other.
func TestBehindNAT(t *testing.T) {
	nat := networktest.NewNAT(t, 2)
	_, err := dialFrom(nat.Hosts[0], "10.77.1.2:22")
	require.Error(t, err, "the hosts are to reach the outside alone")
	t.Run("program", func(t *testing.T) { testProgram(t, nat) })
	t.Run("conformance", func(t *testing.T) { testConformance(t, nat) })
}

// testProgram runs the program on all hosts, and as the relay outside.
func testProgram(t *testing.T, nat *networktest.NAT) {
	program, err := os.Executable()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	inside := func(n networktest.Namespace, args ...string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, "ip", append([]string{"netns", "exec", string(n), program}, args...)...)
		cmd.Env = append(os.Environ(), programVariable+"=1")
		return cmd
	}
	relay := inside(nat.Outside, "-serve", port)
	require.NoError(t, relay.Start())
	defer func() {
		_ = relay.Process.Kill()
		_ = relay.Wait()
	}()
	var all sync.WaitGroup
	for rank := range nat.Hosts {
		all.Go(func() {
			cmd := inside(nat.Hosts[rank], "-relay", nat.Address(rank)+port, "-name", fmt.Sprint("rank", rank))
			cmd.Env = append(cmd.Env, "WORLD_SIZE=2", fmt.Sprint("RANK=", rank), "MASTER_ADDR=rank0",
				"MASTER_PORT=29500", "TUTTI_SECRET=a secret of this test, and of no other")
			out, err := cmd.CombinedOutput()
			assert.NoError(t, err, "%s", out)
			assert.Contains(t, string(out), fmt.Sprintf("rank %d of 2: [2 1]\n", rank))
		})
	}
	all.Wait()
}

// dialFrom tries to connect from a host.
func dialFrom(n networktest.Namespace, address string) (conn net.Conn, err error) {
	err = n.Do(func() error {
		conn, err = net.DialTimeout("tcp", address, time.Second)
		return err
	})
	return conn, err
}

// from is a network whose sockets are in a host's namespace.
type from struct {
	network
	host networktest.Namespace
}

// Dial implements store.Network.
func (f from) Dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = f.host.Do(func() error {
		conn, err = f.network.Dial(ctx, network, address)
		return err
	})
	return conn, err
}

// Listen implements store.Network.
func (f from) Listen(network, address string) (net.Listener, error) {
	l, err := f.network.Listen(network, address)
	return accepting{l, f.host}, err
}

// accepting is a listener whose sockets are in a host's namespace.
type accepting struct {
	net.Listener
	host networktest.Namespace
}

// Accept implements [net.Listener].
func (a accepting) Accept() (conn net.Conn, err error) {
	err = a.host.Do(func() error {
		conn, err = a.Listener.Accept()
		return err
	})
	return conn, err
}

// testConformance runs the conformance suite through the relay, all cases in one world.
func testConformance(t *testing.T, nat *networktest.NAT) {
	l, err := listenOutside(nat)
	require.NoError(t, err)
	defer l.Close()
	go relayOn(l)
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	require.NoError(t, err)
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	comms, err := world(ctx, nat, conf)
	require.NoError(t, err)
	defer func() {
		for _, c := range comms {
			assert.NoError(t, c.Close())
		}
	}()
	commtest.Run(t, commtest.Backend{
		Name:         "tcp",
		Sizes:        []int{len(comms)},
		Calls:        256, // each passes the relay and the routers
		LateMismatch: true,
		Run: func(ctx context.Context, _ int, body func(context.Context, commtest.Rank) error) error {
			errs := make([]error, len(comms))
			var all sync.WaitGroup
			for rank, c := range comms {
				all.Go(func() {
					errs[rank] = body(ctx, commtest.Rank{Comm: c, Runtime: rt})
					if errs[rank] != nil {
						c.Abort(errs[rank])
					}
				})
			}
			all.Wait()
			return errors.Join(errs...)
		},
	})
}

// listenOutside listens outside the hosts' networks.
func listenOutside(nat *networktest.NAT) (l net.Listener, err error) {
	err = nat.Outside.Do(func() error {
		l, err = net.Listen("tcp", port)
		return err
	})
	return l, err
}

// world connects a rank on each of the hosts behind address translation.
func world(ctx context.Context, nat *networktest.NAT, conf *tls.Config) ([]comm.Communicator, error) {
	size := len(nat.Hosts)
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	comms := make([]comm.Communicator, size)
	errs := make([]error, size)
	var all sync.WaitGroup
	for rank := range size {
		all.Go(func() {
			n := network{nat.Address(rank) + port, fmt.Sprint("rank", rank)}
			comms[rank], errs[rank] = tcp.New(ctx, server.Local("test"), tcp.Config{
				Rank:      rank,
				WorldSize: size,
				TLS:       conf,
				Network:   from{n, nat.Hosts[rank]},
			})
		})
	}
	all.Wait()
	return comms, errors.Join(errs...)
}

// TestLines checks that the code to join through a relay stays short.
func TestLines(t *testing.T) {
	text, err := os.ReadFile("network.go")
	require.NoError(t, err)
	assert.LessOrEqual(t, bytes.Count(text, []byte("\n")), 80)
	assert.True(t, strings.HasPrefix(string(text), "package main"))
}
