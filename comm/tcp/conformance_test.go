package tcp_test

import (
	"context"
	"errors"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/internal/faulttest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/env"
	_ "github.com/tutti-go/tutti/internal/heaptest"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// extended asks for what takes long and is much like what the tests do anyway.
var extended = os.Getenv("TUTTI_EXTENDED") != ""

func TestConformance(t *testing.T) {
	// With TUTTI_EXTENDED set, two ranks over one connection make all calls: a call of three takes 50 µs of a busy machine.
	const calls = 1024
	for _, v := range []struct {
		name            string
		connections     int
		machine         func(rank int) int64
		sizes, extended []int
		calls           int
	}{
		{"connections=1", 1, apart, nil, []int{1, 2, 5}, 0},  // as TestNetworks has one
		{"connections=3", 3, apart, nil, []int{2, 3}, calls}, // as between the hosts of "mixed"
		{"shared", 0, together, []int{2}, []int{1, 2, 3, 5}, calls},
		{"mixed", 3, twoAndOthers, []int{3}, []int{3, 5}, calls},
	} {
		t.Run(v.name, func(t *testing.T) {
			tcp.Neighbors(t, v.machine)
			sizes := v.sizes
			calls := v.calls
			switch {
			case extended:
				sizes = v.extended
				calls *= 4
			case testing.Short() && v.name != "mixed":
				t.Skip("mixed has connections and shared memory, too")
			case len(sizes) == 0:
				t.Skip("set TUTTI_EXTENDED")
			}
			processors(t, slices.Max(sizes)+1)
			rt := cpu.New()
			defer func() { require.NoError(t, rt.Close()) }()
			world := newSuiteWorld(t, func(c *tcp.Config) { c.Connections = v.connections })
			commtest.Run(t, commtest.Backend{
				Name:         "tcp",
				Sizes:        sizes,
				Calls:        calls,
				LateMismatch: true,
				Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
					return world.run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
						return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
					})
				},
			})
		})
	}
}

// ofThree makes worlds of three ranks.
func ofThree(rt *cpu.Runtime) faulttest.Backend {
	return faulttest.Backend{Each: func(ctx context.Context, body func(context.Context, faulttest.Rank) error) error {
		return run(ctx, 3, nil, func(ctx context.Context, c comm.Communicator) error {
			r, err := faulttest.NewRank(c, rt)
			if err != nil {
				return err
			}
			return errors.Join(body(ctx, r), r.Free())
		})
	}}
}

func TestSoak(t *testing.T) {
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	faulttest.Soak(t, ofThree(rt))
}

func TestSoakOfTrees(t *testing.T) {
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	faulttest.SoakTrees(t, ofThree(rt))
}

// exchanges are sparse patterns of which each exchanges entries in another way: by messages, parts and alltoallv. All
// collectives of the other patterns have the suite above.
var exchanges = []string{"gtopk", "topkSA", "oktopk", "chunked"}

// TestDistributed runs the suite of package distributed, with TUTTI_EXTENDED set all cases of all patterns. Coded steps
// have the bits of those over package local, whose tests say what holds for these.
func TestDistributed(t *testing.T) {
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	world := newSuiteWorld(t, nil)
	distributedtest.Run(t, commtest.Backend{Name: "tcp", Sizes: []int{3}, LateMismatch: true,
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			return world.run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
			})
		}}, distributedtest.SameBits(func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
		return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
			return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
		})
	}), distributedtest.Cases(func(_ int, name string) bool {
		pattern, kind, ofPattern := strings.Cut(name, "/")
		return extended || !ofPattern && name != "auto" || kind == "Conservation" && slices.Contains(exchanges, pattern)
	}))
}

// In the steady state only the standard library's TLS allocates: 24 bytes for a read.
func TestAllocations(t *testing.T) {
	if race.Enabled {
		t.Skip("the race detector allocates")
	}
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	comms := open(t, 2, nil)
	const times = 200
	step := func(c comm.Communicator, p uintptr) error {
		for range times {
			if err := errors.Join(c.AllReduce(p, p, 2, dtype.F32, comm.Sum), c.Sync(t.Context())); err != nil {
				return err
			}
		}
		return nil
	}
	require.NoError(t, comm.Run(soon(t), comms, func(_ context.Context, c comm.Communicator) error {
		p, err := rt.Allocate(8)
		if err != nil {
			return err
		}
		const tries, rounds = 3, 5
		if c.Rank() == 1 {
			for range tries * (rounds + 1) { // AllocsPerRun has one more
				err = errors.Join(err, step(c, p))
			}
			return errors.Join(err, rt.Deallocate(p))
		}
		allocs := math.Inf(1) // a record that comes in parts takes more reads, so the least counts
		for range tries {
			allocs = min(allocs, testing.AllocsPerRun(rounds, func() { err = errors.Join(err, step(c, p)) }))
		}
		assert.LessOrEqual(t, allocs/times, 2.1, "one read of a record on each of two ranks")
		return errors.Join(err, rt.Deallocate(p))
	}))
}

func TestIPv6(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skip(err)
	}
	require.NoError(t, l.Close())
	require.NoError(t, run(soon(t), 3, func(c *tcp.Config) { c.Listen = "::1" },
		func(ctx context.Context, c comm.Communicator) error { return c.Barrier(ctx) }))
}

// The environment sets what it has variables for, and names a variable that it cannot read.
func TestReadEnv(t *testing.T) {
	environment := map[string]string{
		env.TCPListen:      "[::1]:5000",
		env.TCPAdvertise:   "203.0.113.5,[2001:db8::5]:7",
		env.TCPConnections: "3",
		env.TCPSilence:     "30s",
	}
	read := func(c tcp.Config) (tcp.Config, error) {
		err := c.ReadEnv(func(name string) string { return environment[name] }, 2)
		return c, err
	}
	c, err := read(tcp.Config{Rank: 6})
	require.NoError(t, err)
	assert.Equal(t, tcp.Config{Rank: 6, Listen: "[::1]:5002", Advertise: []string{"203.0.113.5", "[2001:db8::5]:7"}, Connections: 3, Silence: 30 * time.Second}, c)
	for _, listen := range []string{"10.0.0.1", "localhost:0"} {
		environment[env.TCPListen] = listen
		c, err = read(tcp.Config{})
		require.NoError(t, err)
		assert.Equal(t, listen, c.Listen)
	}
	for _, wrong := range [][2]string{{env.TCPListen, ":port"}, {env.TCPConnections, "many"}, {env.TCPConnections, "0"},
		{env.TCPSilence, "30"}, {env.TCPSilence, "-30s"}} {
		variable, text := wrong[0], wrong[1]
		environment = map[string]string{variable: text}
		_, err = read(tcp.Config{})
		assert.ErrorIs(t, err, comm.ErrArgument)
		assert.ErrorContains(t, err, variable+"="+`"`+text+`"`)
	}
}

// An advertised address without a port has that on which the rank listens.
func TestAdvertise(t *testing.T) {
	require.NoError(t, run(soon(t), 3, func(c *tcp.Config) { c.Listen, c.Advertise = "", []string{"192.0.2.1:1", "127.0.0.1"} },
		func(ctx context.Context, c comm.Communicator) error { return c.Barrier(ctx) }))
}

// By default a rank listens on all interfaces, and publishes their addresses.
func TestAllInterfaces(t *testing.T) {
	require.NoError(t, run(soon(t), 3, func(c *tcp.Config) { c.Listen = "" },
		func(ctx context.Context, c comm.Communicator) error { return c.Barrier(ctx) }))
}

// A rank that has done its part of another collective and left is no rank to wait for.
func TestMismatchOfOneThatLeft(t *testing.T) {
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	const long = 2 << 20
	p, err := rt.Allocate(4 * long)
	require.NoError(t, err)
	for _, c := range []struct{ count, root int }{{2, 0}, {long, 1}} { // receives, sends
		comms := open(t, 2, nil)
		require.NoError(t, comms[1].Reduce(p, p, 1, dtype.F32, comm.Sum, 0))
		require.NoError(t, comms[1].Sync(soon(t)))
		require.NoError(t, comms[1].Close())
		require.NoError(t, comms[0].Reduce(p, p, c.count, dtype.F32, comm.Sum, c.root))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		err := comms[0].Sync(ctx)
		cancel()
		assert.ErrorIs(t, err, comm.ErrMismatch)
		assert.ErrorContains(t, err, "which rank 1, now gone, did not")
		assert.NoError(t, comms[0].Close())
	}
	require.NoError(t, rt.Deallocate(p))
}
