//go:build unix

package mpi_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestRankVictim loses the last rank in the middle of a collective; the others
// have to come back from Sync.
func TestRankVictim(t *testing.T) {
	onlyChild(t)
	// The launcher may be gone when the survivors write to it.
	signal.Ignore(syscall.SIGPIPE)
	world, err := mpi.Init(context.Background())
	require.NoError(t, err)
	r := rank{t, world, cpu.New(), context.Background()}
	const n = 8 << 20
	buf, _ := r.floats(n, func(int) float32 { return 1 })
	const within = 300 * time.Millisecond
	mpi.CloseWithin(world, within) // a stopped victim hears no goodbye
	last := world.WorldSize() - 1
	victim := r.pidOf(last)
	require.NoError(t, world.Barrier(r.ctx))
	reduce := func() error { return world.AllReduce(buf, buf, n, dtype.F32, comm.Sum) }
	err = reduce()
	how := os.Getenv(lossVariable)
	if world.Rank() != last && err == nil {
		err = reduce() // which has to wait for the last rank, however fast the first one goes
	}
	if world.Rank() == last {
		switch how {
		case "killed":
			require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGKILL))
			select {}
		case "exits":
			os.Exit(0)
		case "stopped":
			require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGSTOP))
		}
	}
	ctx, cancel := context.WithTimeout(r.ctx, within)
	defer cancel()
	if err == nil { // or the peer was dead already
		err = world.Sync(ctx)
	}
	if world.Rank() == 0 && how == "stopped" {
		defer keepGoing(victim)()
	}
	if world.Rank() == last && err == nil { // all that it needed was there
		err = errors.Join(reduce(), world.Sync(ctx))
	}
	verdict := fmt.Sprintf("Sync returned %v", err)
	if errors.Is(err, comm.ErrTimeout) || errors.Is(err, comm.ErrPeerFailed) {
		verdict = "ok"
	}
	if err := mpi.Finalize(context.Background()); !errors.Is(err, comm.ErrBroken) {
		verdict = fmt.Sprintf("after %q, Finalize returned %v", verdict, err)
	}
	tell(t, world.Rank(), verdict)
	if world.Rank() == 0 && how == "stopped" {
		awaitFiles(verdictOf(os.Getenv(childVariable), last))
	}
	os.Exit(1) // as a program does that cannot go on
}

// pidOf tells all ranks the process of one of them.
func (r rank) pidOf(rank int) int {
	buf, err := r.rt.Allocate(8)
	require.NoError(r.t, err)
	pid := hostmem.Slice[int64](buf, 1)
	pid[0] = int64(os.Getpid())
	require.NoError(r.t, r.world.Broadcast(buf, 1, dtype.I64, rank))
	r.sync()
	return int(pid[0])
}

// keepGoing has a process go on if it is stopped, now or later, until the function that
// it returns is called.
func keepGoing(pid int) (stop func()) {
	done := make(chan struct{})
	go func() {
		for {
			_ = syscall.Kill(pid, syscall.SIGCONT)
			select {
			case <-done:
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	}()
	return func() { close(done) }
}

// TestArriving closes a communicator while a message is coming.
func TestArriving(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) {
		l.mustPass(t, job{ranks: 2, test: "TestRankArriving", env: l.copied})
	})
}

// TestRankArriving has rank 1 stop where it has announced a message to rank 0, which
// aborts and closes the communicator: what comes until then has come, and nothing comes
// afterwards.
func TestRankArriving(t *testing.T) {
	ctx, world, c := splitWorld(t)
	r := rank{t, world, cpu.New(), ctx}
	const n = 4 << 20
	buf, got := r.floats(n, func(int) float32 { return 2 })
	word, _ := r.floats(1, func(int) float32 { return 0 })
	mpi.CloseWithin(c, time.Second) // a stopped rank hears no goodbye
	sender := r.pidOf(1)
	if world.Rank() == 1 {
		require.NoError(t, c.Send(buf, n, dtype.F32, 0, 1))
		require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGSTOP))
		_ = c.Sync(ctx) // rank 0 may have aborted
		require.NoError(t, errors.Join(world.Send(word, 1, dtype.F32, 0, 2), world.Recv(word, 1, dtype.F32, 0, 3), world.Sync(ctx)))
		passed(t, world)
	}
	require.NoError(t, c.Recv(buf, n, dtype.F32, 1, 1))
	short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	if err := c.Sync(short); err != nil { // it may have come before rank 1 has stopped
		require.ErrorIs(t, err, comm.ErrTimeout)
	}
	defer keepGoing(sender)()
	mpi.CloseWithin(c, time.Minute) // for what is coming
	require.NoError(t, c.Close())
	for i := range got {
		got[i] = 3
	}
	require.NoError(t, errors.Join(world.Recv(word, 1, dtype.F32, 1, 2), world.Sync(ctx)))
	require.Equal(t, -1, slices.IndexFunc(got, func(x float32) bool { return x != 3 }), "an element that was written to")
	require.NoError(t, errors.Join(world.Send(word, 1, dtype.F32, 1, 3), world.Sync(ctx)))
	passed(t, world)
}
