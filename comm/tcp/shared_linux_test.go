package tcp_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/jobtest"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Ranks of a machine share memory: slots in communicators that are wholly on it, rings with each other in all.
func TestWhoShares(t *testing.T) {
	for _, v := range []struct {
		name                string
		machine             func(rank int) int64
		slots, anything     bool // of the world
		subSlots, subShares bool // of the first rank's part of the world, of ranks 0 and 1
	}{
		{"together", together, true, true, true, true},
		{"mixed", twoAndOthers, false, true, true, true},
		{"apart", apart, false, false, false, false},
		{"two machines in turn", func(r int) int64 { return int64(1 + r%2) }, false, true, false, false},
	} {
		t.Run(v.name, func(t *testing.T) {
			tcp.Neighbors(t, v.machine)
			require.NoError(t, run(soon(t), 4, nil, func(ctx context.Context, c comm.Communicator) error {
				slots, anything := tcp.Shares(c)
				assert.Equal(t, v.slots, slots)
				assert.Equal(t, v.anything, anything)
				sub, err := c.Split(ctx, c.Rank()/2, 0)
				if err != nil {
					return err
				}
				slots, anything = tcp.Shares(sub)
				assert.Equal(t, v.subSlots, slots)
				assert.Equal(t, v.subShares, anything)
				return errors.Join(sub.Barrier(ctx), sub.Close())
			}))
		})
	}
}

// The waits of each rank return to another processor of its machine.
func TestHomes(t *testing.T) {
	tcp.Neighbors(t, func(rank int) int64 { return int64(1 + rank%2) })
	require.NoError(t, run(soon(t), 6, nil, func(_ context.Context, c comm.Communicator) error {
		assert.Equal(t, poll.NewHome(c.Rank()/2, 3), tcp.Home(c))
		return nil
	}))
}

// The variable keeps a rank out, and has no other value.
func TestSharedVariable(t *testing.T) {
	tcp.Neighbors(t, tcp.Machine)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	for value, shares := range map[string]bool{"": true, "off": false} {
		t.Setenv("TUTTI_TCP_SHARED", value)
		require.NoError(t, run(soon(t), 2, nil, func(_ context.Context, c comm.Communicator) error {
			slots, anything := tcp.Shares(c)
			assert.Equal(t, shares, slots)
			assert.Equal(t, shares, anything)
			assert.Equal(t, shares, tcp.Lanes(c) == 1, "connections that nothing long goes over")
			return nil
		}))
	}
	t.Setenv("TUTTI_TCP_SHARED", "no")
	err := run(soon(t), 2, nil, func(context.Context, comm.Communicator) error { return nil })
	assert.ErrorIs(t, err, comm.ErrArgument)
	assert.ErrorContains(t, err, `TUTTI_TCP_SHARED is "no"`)
}

// A machine on which memory cannot be handed over has its ranks use connections.
func TestCannotShare(t *testing.T) {
	tcp.Neighbors(t, together)
	before, err := os.Readlink("/proc/self/ns/net")
	require.NoError(t, err)
	require.NotEmpty(t, before)
	var limit, low syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_FSIZE, &limit))
	low = limit
	low.Cur = 1 << 20 // more than the log of a test has, and less than what ranks share
	require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &low))
	defer func() { require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit)) }()
	require.NoError(t, run(soon(t), 3, nil, func(ctx context.Context, c comm.Communicator) error {
		slots, anything := tcp.Shares(c)
		assert.False(t, slots)
		assert.False(t, anything)
		return c.Barrier(ctx)
	}))
}

// Nothing is allocated in the steady state, neither over slots nor over rings.
func TestSharedAllocations(t *testing.T) {
	if race.Enabled {
		t.Skip("the race detector allocates")
	}
	processors(t, 4)
	tcp.Neighbors(t, together)
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	const count = 4096
	lengths := []int{count / 2, count / 2}
	places := []int{0, count / 2}
	for name, call := range map[string]func(c comm.Communicator, p uintptr) error{
		"slots": func(c comm.Communicator, p uintptr) error { return c.AllReduce(p, p, count, dtype.F32, comm.Sum) },
		"rings": func(c comm.Communicator, p uintptr) error {
			return c.AllToAllV(p, lengths, places, p+4*count, lengths, places, dtype.F32)
		},
	} {
		const times, tries = 300, 6
		require.NoError(t, run(soon(t), 2, nil, func(ctx context.Context, c comm.Communicator) error {
			p, err := rt.Allocate(8 * count)
			if err != nil {
				return err
			}
			least := uint64(math.MaxUint64) // signs of life, and reports of ranks that wait long, go over TLS
			for range tries {
				before := allocations()
				for range times {
					err = errors.Join(err, call(c, p), c.Sync(ctx))
				}
				least = min(least, allocations()-before)
			}
			assert.Less(t, float64(least)/times, 1.0, name)
			return errors.Join(err, rt.Deallocate(p))
		}))
	}
}

// allocations is how often this process has allocated.
func allocations() uint64 {
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.Mallocs
}

// Variables of the processes of TestKilledWhileSharing.
const (
	killVariable = "TUTTI_TEST_KILL"
	killSeed     = 7
)

// TestKilledWhileSharing kills one of three processes wherever it is in collectives and messages over shared memory. The
// others name it, and everything that they had received is right.
func TestKilledWhileSharing(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(killSeed, 1))
	kills := 2
	if extended {
		kills = 8
	}
	for i := range kills {
		delay := time.Duration(random.IntN(50_000)) * time.Microsecond
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			host, port, err := net.SplitHostPort(jobtest.Address(t, 4))
			require.NoError(t, err)
			var outputs [3]strings.Builder
			var readers sync.WaitGroup
			commands := make([]*exec.Cmd, 3)
			for rank := range commands {
				c := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestRankOfKilledWhileSharing$", "-test.timeout", "70s")
				c.Env = append(os.Environ(), killVariable+"=1", togetherVariable+"=1", fmt.Sprint("RANK=", rank), "WORLD_SIZE=3",
					"LOCAL_RANK=0", "MASTER_ADDR="+host, "MASTER_PORT="+port, "TUTTI_SECRET=of a test, and long enough")
				out, err := c.StdoutPipe()
				require.NoError(t, err)
				c.Stderr = os.Stderr
				require.NoError(t, c.Start())
				commands[rank] = c
				readers.Go(func() {
					lines := bufio.NewScanner(out)
					for lines.Scan() {
						fmt.Fprintln(&outputs[rank], lines.Text())
						if rank == 2 && lines.Text() == "ready" {
							time.Sleep(delay) // into the middle of something
							_ = c.Process.Kill()
						}
					}
				})
			}
			readers.Wait()
			for rank, c := range commands {
				err := c.Wait()
				if rank < 2 {
					assert.NoError(t, err, "rank %d, seed %d: %s", rank, killSeed, &outputs[rank])
				} else {
					assert.Error(t, err, "it has not been killed")
				}
			}
		})
	}
}

// TestRankOfKilledWhileSharing is a process of it.
func TestRankOfKilledWhileSharing(t *testing.T) {
	if os.Getenv(killVariable) == "" {
		t.Skip("is part of TestKilledWhileSharing")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := tcp.FromEnv(ctx)
	require.NoError(t, err)
	slots, _ := tcp.Shares(c)
	require.True(t, slots)
	rank, err := strconv.Atoi(os.Getenv("RANK"))
	require.NoError(t, err)
	rt := cpu.New()
	const longest = 1 << 19
	p, err := rt.Allocate(8 * longest)
	require.NoError(t, err)
	values := hostmem.Slice[int64](p, longest)
	random := rand.New(rand.NewPCG(killSeed, 2)) // the same on all ranks
	for i := int64(0); err == nil; i++ {
		n := 1 << random.IntN(20)
		for j := range n {
			values[j] = i + int64(j) + int64(rank)
		}
		if i == 3 {
			fmt.Println("ready")
		}
		if err = errors.Join(c.AllReduce(p, p, n, dtype.I64, comm.Sum), c.Sync(ctx)); err != nil {
			break
		}
		for j, got := range values[:n] {
			if want := 3*(i+int64(j)) + 3; got != want { // half a million elements: no assertion for each
				require.Equal(t, want, got, "element %d of %d", j, n)
			}
		}
	}
	require.ErrorIs(t, err, comm.ErrPeerFailed)
	require.ErrorContains(t, err, "rank 2")
	require.NoError(t, c.Close())
}
