package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Ways in which a rank dies.
const (
	early     = "early"     // before its first collective
	inTheMid  = "mid"       // in the middle of collectives
	symmetric = "symmetric" // the same on symmetric buffers, which NCCL cannot end
)

// One process of a job is killed: the waits of the others end at their
// deadlines, and they go on without it, if NCCL can end what they did.
func TestAKilledRank(t *testing.T) {
	if way := os.Getenv(gputest.VictimVariable); way != "" {
		rankOfAKilledJob(t, way)
		return
	}
	ways := []string{early, inTheMid, gputest.First}
	if n, _ := cuda.Count(); n > 1 { // there are windows where GPUs reach each other
		ways = append(ways, symmetric)
	}
	gputest.LoseARank(t, 3, ways...)
}

// One that ends in peace, and one that stands still, are no different.
func TestAnExitedRank(t *testing.T) { gputest.LoseARank(t, 3, gputest.Exits) }
func TestAStoppedRank(t *testing.T) { gputest.LoseARank(t, 3, gputest.Stops) }

// rankOfAKilledJob is what each of the processes does.
func rankOfAKilledJob(t *testing.T, way string) {
	j := gputest.Job(t)
	victim := gputest.Victim(way, j.WorldSize)
	rt := gputest.Own(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := nccl.FromEnv(ctx, rt)
	require.NoError(t, err)
	elements := 1 << 26
	if way == symmetric {
		elements = 1 << 10
	}
	allocate, _ := buffers(ctx, c, way == symmetric)
	buf, err := allocate(elements * 4)
	require.NoError(t, err)
	require.NoError(t, c.Barrier(ctx))
	gputest.Meet(t)
	for i := range 100 {
		if j.Rank == victim && (i == 10 || way == early) {
			gputest.BeLost(t, way)
		}
		if err = c.AllReduce(buf, buf, elements, dtype.F32, comm.Sum); err != nil { // NCCL knows already
			break
		}
	}
	const deadline = 5 * time.Second
	wait, cancelWait := context.WithTimeout(ctx, deadline)
	defer cancelWait()
	began := time.Now()
	if err == nil {
		err = c.Sync(wait)
	}
	t.Logf("after %v: %v", time.Since(began).Round(time.Millisecond), err)
	require.True(t, errors.Is(err, comm.ErrTimeout) || errors.Is(err, comm.ErrPeerFailed), "%v", err)
	if way == gputest.First { // which tells the others of each other
		require.ErrorIs(t, err, comm.ErrPeerFailed)
		require.Regexp(t, "rank 0 aborted: its process has ended", err.Error())
		require.NotErrorIs(t, err, comm.ErrTimeout, "nobody waits for a deadline")
	}
	if errors.Is(err, comm.ErrTimeout) && way != gputest.Stops {
		require.ErrorContains(t, err, fmt.Sprintf("rank %d: its process has ended", victim))
	}
	require.ErrorIs(t, c.AllReduce(buf, buf, 1, dtype.F32, comm.Sum), comm.ErrBroken)
	if way == symmetric {
		require.ErrorContains(t, err, "restart the process")
		t.Log("went on to say so")
		return // nothing else can be done with this GPU
	}

	survivors, err := c.Shrink(ctx, victim, victim) // named twice is excluded once
	require.NoError(t, err)
	require.Equal(t, j.WorldSize-1, survivors.WorldSize())
	const n = 100_000
	require.NoError(t, write(rt, buf, survivors.Rank(), n))
	require.NoError(t, survivors.AllReduce(buf, buf, n, dtype.F32, comm.Sum))
	require.NoError(t, survivors.Sync(ctx))
	require.NoError(t, wantSum(rt, buf, survivors.WorldSize(), 0, n))
	t.Log("went on")
	require.NoError(t, rt.Deallocate(buf))
	assert.NoError(t, survivors.Close())
	assert.NoError(t, c.Close())
	assert.NoError(t, rt.Close())
}

// impostor pretends to be rank 1 of two and to receive a unique id that is none.
type impostor struct {
	comm.Communicator
	id []byte
}

func (impostor) Rank() int                                                           { return 1 }
func (impostor) WorldSize() int                                                      { return 2 }
func (impostor) AllReduce(_, _ uintptr, _ int, _ dtype.DType, _ comm.ReduceOp) error { return nil }
func (impostor) Sync(context.Context) error                                          { return nil }
func (m impostor) Broadcast(buf uintptr, count int, _ dtype.DType, _ int) error {
	copy(hostmem.Slice[byte](buf, count), m.id)
	return nil
}

// A wrong unique id is an error, at the latest at the deadline.
func TestAWrongUniqueID(t *testing.T) {
	runtimes := openGPUs(t)
	noise := make([]byte, 128)
	const seed = 5
	rng := rand.New(rand.NewPCG(seed, 0))
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	for name, id := range map[string][]byte{"zeros": make([]byte, 128), "noise": noise} {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		_, err := nccl.From(ctx, impostor{id: id}, runtimes[0])
		cancel()
		t.Logf("%s: %v", name, err)
		assert.Error(t, err, "%s, seed %d", name, seed)
	}
	// The process goes on.
	world, err := nccl.InProcess(t.Context(), runtimes[:1])
	require.NoError(t, err)
	assert.NoError(t, world[0].Close())
}

// Tensors in memory that a communicator does not reach are refused.
func TestTensorsOfOtherDevices(t *testing.T) {
	runtimes := openGPUs(t)
	ctx := t.Context()
	world, err := nccl.InProcess(ctx, runtimes[:1])
	require.NoError(t, err)
	defer world[0].Close() //nolint:errcheck
	host := cpu.New()
	defer host.Close() //nolint:errcheck
	onHost, err := runtime.New(host, dtype.F32, 8)
	require.NoError(t, err)
	defer onHost.Free() //nolint:errcheck
	onGPU, err := runtime.New(runtimes[0], dtype.F32, 8)
	require.NoError(t, err)
	defer onGPU.Free() //nolint:errcheck

	err = distributed.AllReduce(ctx, world[0], onHost, comm.Sum)
	assert.ErrorIs(t, err, comm.ErrDevice)
	assert.ErrorContains(t, err, "cpu:0")
	err = local.Run(ctx, 1, func(ctx context.Context, c comm.Communicator) error {
		return distributed.AllReduce(ctx, c, onGPU, comm.Sum)
	})
	assert.ErrorIs(t, err, comm.ErrDevice)
	assert.ErrorContains(t, err, fmt.Sprint(runtimes[0].Device()))
}

// NCCL refuses two ranks on one GPU, which must not end in a wait.
func TestTwoRanksOnOneGPU(t *testing.T) {
	runtimes := openGPUs(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err := nccl.InProcess(ctx, []*cuda.Runtime{runtimes[0], runtimes[0]})
	t.Log(err)
	var native *nccl.Error
	assert.ErrorAs(t, err, &native)
	_, err = nccl.InProcess(ctx, []*cuda.Runtime{nil})
	assert.ErrorIs(t, err, comm.ErrArgument)
}
