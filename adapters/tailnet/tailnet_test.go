package tailnet_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"tailscale.com/derp/derpserver"
	"tailscale.com/ipn"
	"tailscale.com/ipn/ipnstate"
	"tailscale.com/ipn/store/mem"
	"tailscale.com/net/netns"
	"tailscale.com/net/stun/stuntest"
	"tailscale.com/tailcfg"
	"tailscale.com/tsnet"
	"tailscale.com/tstest/integration/testcontrol"
	"tailscale.com/types/key"
	"tailscale.com/types/logger"

	"github.com/tutti-go/tutti/adapters/tailnet"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// hang is longer than any test that ends.
const hang = time.Minute

// relay starts a relay (DERP) and a STUN server, by which nodes find each other, and returns their addresses.
func relay(t *testing.T) *tailcfg.DERPMap {
	derp := derpserver.New(key.NewNode(), logger.Discard)
	server := httptest.NewUnstartedServer(derpserver.Handler(derp))
	server.Config.TLSNextProto = map[string]func(*http.Server, *tls.Conn, http.Handler){} // only HTTP 1
	server.StartTLS()
	stun, closeSTUN := stuntest.Serve(t)
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
		assert.NoError(t, derp.Close())
		closeSTUN()
	})
	node := &tailcfg.DERPNode{
		Name:             "t1",
		RegionID:         1,
		HostName:         "127.0.0.1",
		IPv4:             "127.0.0.1",
		IPv6:             "none",
		STUNPort:         stun.Port,
		DERPPort:         server.Listener.Addr().(*net.TCPAddr).Port,
		InsecureForTests: true,
		STUNTestIP:       "127.0.0.1",
	}
	region := &tailcfg.DERPRegion{
		RegionID:   1,
		RegionCode: "test",
		Nodes:      []*tailcfg.DERPNode{node},
	}
	return &tailcfg.DERPMap{Regions: map[int]*tailcfg.DERPRegion{1: region}}
}

// serveControl starts a control server and returns its URL.
func serveControl(t *testing.T, control *testcontrol.Server) string {
	control.DERPMap = relay(t)
	control.DNSConfig = &tailcfg.DNSConfig{Proxied: true}
	control.MagicDNSDomain = "tail-scale.ts.net"
	control.Logf = logger.Discard
	control.HTTPTestServer = httptest.NewServer(control)
	t.Cleanup(control.HTTPTestServer.Close)
	return control.HTTPTestServer.URL
}

// nodes joins a number of nodes, rank0 and up, to a tailnet of the control server from tailscale's own tests.
func nodes(t *testing.T, size int) []*tailnet.Network {
	t.Setenv("TS_NO_LOGS_NO_SUPPORT", "1")
	netns.SetEnabled(false) // it would bind to the interface of the default route
	url := serveControl(t, new(testcontrol.Server))
	ctx, cancel := context.WithTimeout(t.Context(), hang)
	defer cancel()
	networks := make([]*tailnet.Network, size)
	for rank := range networks {
		server := &tsnet.Server{
			Dir:        t.TempDir(),
			ControlURL: url,
			Hostname:   fmt.Sprint("rank", rank),
			Store:      new(mem.Store),
			Ephemeral:  true,
			UserLogf:   logger.Discard,
		}
		t.Cleanup(func() { _ = server.Close() }) // a test may have closed it
		network, err := tailnet.Up(ctx, server)
		require.NoError(t, err)
		networks[rank] = network
	}
	return networks
}

// join connects a rank of a job. The store is at rank 0, found by its name in the tailnet.
func join(ctx context.Context, network *tailnet.Network, rank, size int) (comm.Communicator, error) {
	job := rendezvous.Job{
		Rank:      rank,
		WorldSize: size,
		Address:   "rank0:29500",
		Secret:    []byte("a secret of these tests"),
		Network:   network,
	}
	kv, err := job.Shared(ctx)
	if err != nil {
		return nil, err
	}
	security, err := job.TLS("comm/tcp")
	if err != nil {
		return nil, err
	}
	var c comm.Communicator
	err = job.Round(ctx, kv, "test", func(ctx context.Context, number string) error {
		var err error
		c, err = tcp.New(ctx, kv, tcp.Config{
			Rank:      rank,
			WorldSize: size,
			TLS:       security,
			World:     number,
			Network:   network,
		})
		return err
	})
	return c, err
}

// world connects one rank per node.
func world(ctx context.Context, networks []*tailnet.Network) ([]comm.Communicator, error) {
	comms := make([]comm.Communicator, len(networks))
	errs := make([]error, len(networks))
	var all sync.WaitGroup
	for rank, network := range networks {
		all.Go(func() { comms[rank], errs[rank] = join(ctx, network, rank, len(networks)) })
	}
	all.Wait()
	return comms, errors.Join(errs...)
}

// TestAllReduce has ranks on three nodes add vectors. When a node leaves the tailnet, the others name the lost rank
// after [tcp.DefaultSilence].
func TestAllReduce(t *testing.T) {
	const size, lost = 3, 2
	networks := nodes(t, size)
	ctx, cancel := context.WithTimeout(t.Context(), hang)
	defer cancel()
	comms, err := world(ctx, networks)
	require.NoError(t, err)
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	errs := make([]error, size)
	var all, summed sync.WaitGroup
	summed.Add(size)
	for rank, c := range comms {
		all.Go(func() {
			values := []float32{1, float32(rank), 0.5}
			tensor, err := runtime.FromSlice(rt, values)
			assert.NoError(t, err)
			defer tensor.Free()
			assert.NoError(t, distributed.AllReduce(ctx, c, tensor, comm.Sum))
			sums, err := runtime.ToSlice[float32](tensor)
			assert.NoError(t, err)
			assert.Equal(t, []float32{size, 0 + 1 + 2, 1.5}, sums)
			summed.Done()
			summed.Wait()
			if rank == lost {
				assert.NoError(t, networks[rank].Close())
			} else {
				errs[rank] = distributed.AllReduce(ctx, c, tensor, comm.Sum)
			}
			_ = c.Close() // of an aborted world
		})
	}
	all.Wait()
	for rank, err := range errs[:lost] {
		assert.ErrorIs(t, err, comm.ErrPeerFailed, "rank %d", rank)
		assert.ErrorContains(t, err, fmt.Sprint("rank ", lost))
	}
}

// TestListen checks that other nodes can dial a listener's address, whatever port was requested.
func TestListen(t *testing.T) {
	networks := nodes(t, 2)
	for _, address := range []string{":0", ":4000"} {
		l, err := networks[0].Listen("tcp", address)
		require.NoError(t, err)
		host, port, err := net.SplitHostPort(l.Addr().String())
		require.NoError(t, err)
		ip4, _ := networks[0].TailscaleIPs()
		assert.Equal(t, ip4.String(), host)
		assert.NotEqual(t, "0", port)
		sent := make(chan error, 1)
		go func() {
			conn, err := l.Accept()
			if err == nil {
				_, err = conn.Write([]byte{1})
			}
			sent <- err
		}()
		conn, err := networks[1].Dial(t.Context(), "tcp", l.Addr().String())
		require.NoError(t, err)
		n, err := conn.Read(make([]byte, 1))
		require.NoError(t, err)
		assert.Equal(t, 1, n)
		require.NoError(t, <-sent)
		require.NoError(t, conn.Close())
		require.NoError(t, l.Close())
		_, err = l.Accept()
		assert.ErrorIs(t, err, net.ErrClosed)
	}
	_, err := networks[0].Listen("tcp", "no address")
	assert.ErrorContains(t, err, "tailnet: ")
}

// TestUp checks that a node that the control server does not admit says so when the context ends.
func TestUp(t *testing.T) {
	t.Setenv("TS_NO_LOGS_NO_SUPPORT", "1")
	refusing := httptest.NewServer(http.NotFoundHandler())
	defer refusing.Close()
	server := &tsnet.Server{
		Dir:        t.TempDir(),
		ControlURL: refusing.URL,
		Store:      new(mem.Store),
		Ephemeral:  true,
		UserLogf:   logger.Discard,
	}
	defer server.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := tailnet.Up(ctx, server)
	assert.ErrorContains(t, err, "tailnet: ")
	assert.ErrorIs(t, err, context.Canceled)
}

// TestUpNamesTheCause checks that a node that is not admitted names the missing condition. The context ends when the
// node has come that far.
func TestUpNamesTheCause(t *testing.T) {
	t.Setenv("TS_NO_LOGS_NO_SUPPORT", "1")
	netns.SetEnabled(false) // it would bind to the interface of the default route
	const nobody = "http://127.0.0.1:1"
	for name, test := range map[string]struct {
		control *testcontrol.Server // nil for none
		key     string
		reached func(s *ipnstate.Status) bool
		kind    error
		text    string
	}{
		"no key": {
			&testcontrol.Server{RequireAuth: true}, "",
			func(s *ipnstate.Status) bool { return s.AuthURL != "" },
			comm.ErrCanceled, "not logged in: set AuthKey of the server or TS_AUTHKEY in the environment, or open http://",
		},
		"wrong key": {
			&testcontrol.Server{RequireAuthKey: "right"}, "wrong",
			func(*ipnstate.Status) bool { return false },
			fs.ErrPermission, "TS_AUTHKEY in the environment is wrong, used up or expired",
		},
		"not approved": {
			&testcontrol.Server{RequireMachineAuth: true}, "",
			func(s *ipnstate.Status) bool { return s.BackendState == ipn.NeedsMachineAuth.String() },
			comm.ErrCanceled, "an administrator of the tailnet has to approve this node",
		},
		"no control server": {
			nil, "",
			func(s *ipnstate.Status) bool { return strings.Contains(fmt.Sprint(s.Health), "127.0.0.1:1") },
			comm.ErrCanceled, "is ControlURL right, and does this machine reach it?",
		},
	} {
		t.Run(name, func(t *testing.T) {
			url := nobody
			if test.control != nil {
				url = serveControl(t, test.control)
			}
			server := &tsnet.Server{
				Dir: t.TempDir(), ControlURL: url, AuthKey: test.key, Store: new(mem.Store), Ephemeral: true, UserLogf: logger.Discard,
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			local, err := server.LocalClient()
			require.NoError(t, err)
			defer server.Close()
			var looking sync.WaitGroup
			looking.Go(func() {
				for ctx.Err() == nil {
					status, err := local.StatusWithoutPeers(ctx)
					if err == nil && test.reached(status) {
						cancel()
					}
					time.Sleep(10 * time.Millisecond)
				}
			})
			_, err = tailnet.Up(ctx, server)
			cancel()
			looking.Wait()
			require.ErrorIs(t, err, test.kind)
			require.ErrorContains(t, err, test.text)
		})
	}
}

// TestConformance runs the conformance suite of communicators over a tailnet. Only extended runs include it.
func TestConformance(t *testing.T) {
	if os.Getenv("TUTTI_EXTENDED") == "" {
		t.Skip("it takes a minute: TUTTI_EXTENDED=1")
	}
	const size = 2
	networks := nodes(t, size)
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	commtest.Run(t, commtest.Backend{
		Name:         "tcp",
		Sizes:        []int{size},
		Calls:        256, // each crosses two network stacks of tsnet
		LateMismatch: true,
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			comms, err := world(ctx, networks[:size])
			if err != nil {
				return err
			}
			return comm.Run(ctx, comms, func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
			})
		},
	})
}

// TestReadme checks that the README's program is the example.
func TestReadme(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	source, err := os.ReadFile("example_test.go")
	require.NoError(t, err)
	_, block, ok := strings.Cut(string(readme), "```go\n")
	require.True(t, ok)
	block, _, ok = strings.Cut(block, "```")
	require.True(t, ok)
	for line := range strings.Lines(block) {
		assert.Contains(t, string(source), strings.TrimSpace(line))
	}
}
