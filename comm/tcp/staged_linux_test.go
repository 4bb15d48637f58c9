package tcp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/staged"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/jobtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Ranks that have slots share memory that a caller asks for, also in sub-communicators, and after Close; others share
// none.
func TestShareMemory(t *testing.T) {
	for name, v := range map[string]struct {
		machine          func(rank int) int64
		all, firstAndTwo bool
	}{
		"together": {together, true, true},
		"mixed":    {twoAndOthers, false, true},
		"apart":    {apart, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			tcp.Neighbors(t, v.machine)
			require.NoError(t, run(soon(t), 4, nil, func(ctx context.Context, c comm.Communicator) error {
				sub, err := c.Split(ctx, c.Rank()/2, 0)
				if err != nil {
					return err
				}
				err = errors.Join(checkShared(ctx, c, v.all), checkShared(ctx, sub, v.firstAndTwo))
				return errors.Join(err, sub.Close())
			}))
		})
	}
}

// checkShared has ranks write into memory that they share, and read it.
func checkShared(ctx context.Context, c comm.Communicator, shares bool) error {
	sharer, ok := comm.As[interface {
		ShareMemory(ctx context.Context, bytes int) ([]byte, error)
		UnshareMemory(memory []byte)
	}](c)
	if !ok {
		return errors.New("it shares nothing")
	}
	const bytes = 3 << 20
	for range 2 {
		memory, err := sharer.ShareMemory(ctx, bytes)
		if err != nil || !shares {
			if memory != nil {
				return errors.New("there is memory")
			}
			return err
		}
		if len(memory) != bytes || memory[bytes-1-c.Rank()] != 0 {
			return fmt.Errorf("%d bytes, of which the last is %d", len(memory), memory[bytes-1])
		}
		memory[bytes-1-c.Rank()] = byte(1 + c.Rank())
		if err := c.Barrier(ctx); err != nil {
			return err
		}
		for rank := range c.WorldSize() {
			if got := memory[bytes-1-rank]; got != byte(1+rank) {
				return fmt.Errorf("rank %d finds %d of rank %d", c.Rank(), got, rank)
			}
		}
		sharer.UnshareMemory(memory)
	}
	return nil
}

// Variables of the processes of TestLostInWindow.
const (
	windowVariable = "TUTTI_TEST_WINDOW" // how rank 1 is lost
	windowSeed     = 11
)

// TestLostInWindow loses one of three processes in the middle of what its device does with a window: the others name it,
// and everything that they had received is right.
func TestLostInWindow(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"killed", "stopped"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			host, port, err := net.SplitHostPort(jobtest.Address(t, 4))
			require.NoError(t, err)
			commands := make([]*exec.Cmd, 3)
			outputs := make([]bytes.Buffer, 3)
			for rank := range commands {
				c := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestRankOfLostInWindow$", "-test.timeout", "100s")
				c.Env = append(os.Environ(), windowVariable+"="+how, togetherVariable+"=1", fmt.Sprint("RANK=", rank),
					"WORLD_SIZE=3", "LOCAL_RANK=0", "MASTER_ADDR="+host, "MASTER_PORT="+port,
					"TUTTI_SECRET=of a test, and long enough", "TUTTI_TCP_SILENCE=5s")
				c.Stdout = &outputs[rank]
				c.Stderr = &outputs[rank]
				require.NoError(t, c.Start())
				commands[rank] = c
			}
			for _, rank := range []int{0, 2, 1} {
				if rank == 1 {
					_ = commands[rank].Process.Kill() // it may be stopped
				}
				err := commands[rank].Wait()
				if rank == 1 {
					assert.Error(t, err, "it has not been lost")
				} else {
					assert.NoError(t, err, "rank %d, seed %d: %s", rank, windowSeed, &outputs[rank])
				}
			}
		})
	}
}

// TestRankOfLostInWindow is a process of TestLostInWindow.
func TestRankOfLostInWindow(t *testing.T) {
	how := os.Getenv(windowVariable)
	if how == "" {
		t.Skip("is part of TestLostInWindow")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	base, err := tcp.FromEnv(ctx)
	require.NoError(t, err)
	rank, err := strconv.Atoi(os.Getenv("RANK"))
	require.NoError(t, err)
	random := rand.New(rand.NewPCG(windowSeed, 1))
	const longest = 1 << 20
	works := 40 + random.IntN(50) // before the loss
	memory := cpu.New()
	device := hosttest.NewDevice(memory)
	if rank == 1 {
		device.Working = func(before int) {
			switch {
			case before < works:
			case how == "killed":
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			default:
				_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
				_, _ = io.ReadAll(os.Stdin) // another thread may take the signal, later
			}
		}
	}
	c, err := staged.New(base, device, cpu.New())
	require.NoError(t, err)
	p, err := memory.Allocate(8 * longest)
	require.NoError(t, err)
	values := hostmem.Slice[int64](p, longest)
	calls := 0
	for ; ; calls++ {
		n := longest/8 + random.IntN(longest-longest/8) // the same on all ranks
		for j := range n {
			values[j] = int64(calls + j + rank)
		}
		if err = errors.Join(c.AllReduce(p, p, n, dtype.I64, comm.Sum), c.Sync(ctx)); err != nil {
			break
		}
		for j, got := range values[:n] {
			if want := int64(3*(calls+j) + 3); got != want { // no assertion for each element
				require.Equal(t, want, got, "element %d of %d", j, n)
			}
		}
	}
	assert.Positive(t, calls)
	assert.Positive(t, device.Counts().Reductions)
	require.ErrorIs(t, err, comm.ErrPeerFailed)
	require.ErrorContains(t, err, "rank 1")
	assert.Zero(t, device.Counts().Open, "a window is left")
	require.NoError(t, c.Close())
}
