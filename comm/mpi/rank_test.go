package mpi_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/logtest"
	tuttirt "github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// The tests in this file are what one rank does in a job that a test in
// job_test.go launches.

// rank is what most of them need.
type rank struct {
	t     *testing.T
	world comm.Communicator
	rt    *cpu.Runtime
	ctx   context.Context
}

// rankTimeout bounds the waits of a rank, which a busy machine may make long. A job
// takes longer at most.
const rankTimeout = 3 * time.Minute

// newRank initializes MPI, which [TestMain] finalizes.
func newRank(t *testing.T) rank {
	t.Helper()
	onlyChild(t)
	world, err := mpi.Init(context.Background())
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), rankTimeout)
	t.Cleanup(cancel)
	return rank{t, world, cpu.New(), ctx}
}

// nameOf is the file in which a rank writes the name of its run.
func nameOf(dir string, rank int) string { return filepath.Join(dir, fmt.Sprintf("name-%d", rank)) }

// TestRankRunIsNamed writes the name that ranks have without one of the launcher.
func TestRankRunIsNamed(t *testing.T) {
	r := newRank(t)
	name := dump.RunName(func(string) string { return "" })
	require.NoError(t, os.WriteFile(nameOf(os.Getenv(childVariable), r.world.Rank()), []byte(name), 0o600))
}

// TestRankForgottenClose drops communicators, one of them closed, and waits for the line that Finalize does not repeat.
func TestRankForgottenClose(t *testing.T) {
	r := newRank(t)
	logged := logtest.Capture(t)
	lines := func() []string { return logged.Lines("communicators were never closed") }
	create := func(closes bool) {
		c, err := r.world.Split(r.ctx, 0, 0)
		require.NoError(t, err)
		require.NoError(t, c.Barrier(r.ctx))
		if closes {
			require.NoError(t, c.Close())
		}
	}
	create(true)
	for range 3 {
		runtime.GC()
		require.Empty(t, lines())
	}
	create(false)
	require.Eventually(t, func() bool {
		runtime.GC()
		return len(lines()) > 0
	}, time.Minute, 10*time.Millisecond)
	require.NoError(t, mpi.Finalize(r.ctx))
	require.Len(t, lines(), 1)
}

// floats allocates n float32 values that start as value(i).
func (r rank) floats(n int, value func(i int) float32) (uintptr, []float32) {
	r.t.Helper()
	p, err := r.rt.Allocate(4 * n)
	require.NoError(r.t, err)
	s := hostmem.Slice[float32](p, n)
	for i := range s {
		s[i] = value(i)
	}
	return p, s
}

func (r rank) sync() {
	r.t.Helper()
	require.NoError(r.t, r.world.Sync(r.ctx))
}

func TestRankLifecycle(t *testing.T) {
	onlyChild(t)
	require.NoError(t, mpi.Finalize(context.Background()), "Finalize before Init does nothing")

	before, err := mpi.Library()
	require.NoError(t, err)
	assert.Empty(t, before.Threads)
	world, err := mpi.Init(context.Background())
	require.NoError(t, err)
	again, err := mpi.Init(context.Background())
	require.NoError(t, err)
	assert.Same(t, world, again)
	after, err := mpi.Library()
	require.NoError(t, err)
	assert.Equal(t, "MPI_THREAD_MULTIPLE", after.Threads)
	assert.Equal(t, before.Library, after.Library)

	assert.NoError(t, comm.CheckDevice(world, tuttirt.Device{Kind: tuttirt.CPU}))
	err = comm.CheckDevice(world, tuttirt.Device{Kind: tuttirt.CUDA})
	require.ErrorIs(t, err, comm.ErrDevice)
	assert.ErrorContains(t, err, "nccl")
	assert.ErrorContains(t, err, "stage through host memory")

	require.NoError(t, mpi.Finalize(context.Background()))
	require.NoError(t, mpi.Finalize(context.Background()), "Finalize twice")
	ctx := context.Background()
	for name, call := range map[string]func() error{
		"Init":      func() error { _, err := mpi.Init(context.Background()); return err },
		"AllReduce": func() error { return world.AllReduce(0, 0, 0, dtype.F32, comm.Sum) },
		"Send":      func() error { return world.Send(0, 0, dtype.F32, 0, 0) },
		"Group":     func() error { return world.Group() },
		"Sync":      func() error { return world.Sync(ctx) },
		"Barrier":   func() error { return world.Barrier(ctx) },
		"Split":     func() error { _, err := world.Split(ctx, 0, 0); return err },
	} {
		assert.ErrorIs(t, call(), comm.ErrClosed, "%s after Finalize", name)
	}
	assert.NoError(t, world.Close())
}

// TestRankSteadyState does thousands of small collectives, or tens of thousands: no Go
// allocation in any of them, and no growth of the process.
func TestRankSteadyState(t *testing.T) {
	const windows = 10
	warmUp, rounds, limit := 200, 200, int64(2<<20)
	if extended {
		warmUp, rounds, limit = 2000, 2000, 4<<20
	}
	r := newRank(t)
	send, in := r.floats(64, func(i int) float32 { return float32(i) })
	recv, out := r.floats(64*r.world.WorldSize(), func(int) float32 { return 0 })
	half, err := r.rt.Allocate(2 * 64)
	require.NoError(t, err)
	hostmem.Slice[uint16](half, 1)[0] = 0
	step := func() {
		err := errors.Join(
			r.world.AllReduce(send, recv, 64, dtype.F32, comm.Sum),
			r.world.AllReduce(half, half, 1, dtype.F16, comm.Avg),
			r.world.AllGather(send, recv, 16, dtype.F32),
			r.world.Sync(r.ctx),
		)
		if err != nil {
			panic(err)
		}
	}
	for range warmUp {
		step()
	}
	// Some allocations are no collective's: timers, the goroutine that keeps
	// communication going, and status reports of ranks that wait long on a busy machine.
	least := uint64(math.MaxUint64)
	resident := residentBytes(t)
	for range windows {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range rounds {
			step()
		}
		runtime.ReadMemStats(&after)
		least = min(least, after.Mallocs-before.Mallocs)
	}
	grown := residentBytes(t) - resident
	assert.Less(t, least, uint64(rounds/20), "Go allocations in %d collectives", 3*rounds)
	assert.Less(t, grown, limit, "growth of resident memory in bytes")
	assert.Equal(t, in[5], out[5])
	require.NoError(t, r.world.Barrier(r.ctx))
}

// residentBytes is the process's resident memory.
func residentBytes(t *testing.T) int64 {
	t.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0 // not this system's way
	}
	pages, err := strconv.ParseInt(strings.Fields(string(text))[1], 10, 64)
	require.NoError(t, err)
	return pages * int64(os.Getpagesize())
}

// TestRankShared finds memory shared by all ranks of the world and of its splits, or by
// none, and the same results either way.
func TestRankShared(t *testing.T) {
	onlyChild(t)
	off := os.Getenv(offVariable)
	me := cmp.Or(os.Getenv("OMPI_COMM_WORLD_RANK"), os.Getenv("PMI_RANK"))
	if me == off {
		t.Setenv(env.MPIShared, "off")
	}
	before, err := mpi.Library()
	require.NoError(t, err)
	r := newRank(t)
	after, err := mpi.Library()
	require.NoError(t, err)
	shared := off == "" && runtime.GOOS == "linux"
	switch {
	case shared:
		assert.Empty(t, before.Unshared+after.Unshared)
	case me == off:
		assert.Equal(t, "TUTTI_MPI_SHARED=off", before.Unshared)
		assert.Equal(t, "TUTTI_MPI_SHARED=off", after.Unshared)
	default:
		assert.NotEmpty(t, after.Unshared)
	}
	pair, err := r.world.Split(r.ctx, min(r.world.Rank(), 1), 0)
	require.NoError(t, err)
	for _, c := range []comm.Communicator{r.world, pair} {
		assert.Equal(t, shared && c.WorldSize() > 1, mpi.Shares(c), "%d ranks", c.WorldSize())
		// Up to where pages end, and beyond.
		for _, n := range []int{0, 1, 14, 15, 1000, 131_072, 262_144, 262_145} {
			send, _ := r.floats(n+1, func(i int) float32 { return float32(c.Rank() + i%100) })
			recv, got := r.floats(n+1, func(int) float32 { return -1 })
			all, gathered := r.floats(n*c.WorldSize()+1, func(int) float32 { return -1 })
			require.NoError(t, c.AllReduce(send, recv, n, dtype.F32, comm.Max))
			require.NoError(t, c.AllGather(send, all, n, dtype.F32))
			require.NoError(t, c.Broadcast(send, n, dtype.F32, c.WorldSize()-1))
			require.NoError(t, c.Sync(r.ctx))
			last := c.WorldSize() - 1
			for i := range n {
				if want := float32(last + i%100); got[i] != want || hostmem.Slice[float32](send, n)[i] != want {
					t.Fatalf("element %d of %d: %v and %v, want %v", i, n, got[i], hostmem.Slice[float32](send, n)[i], want)
				}
				for q := range c.WorldSize() {
					if want := float32(q + i%100); gathered[q*n+i] != want {
						t.Fatalf("element %d of %d of rank %d: %v, want %v", i, n, q, gathered[q*n+i], want)
					}
				}
			}
			assert.Equal(t, float32(-1), got[n])
			require.NoError(t, errors.Join(r.rt.Deallocate(send), r.rt.Deallocate(recv), r.rt.Deallocate(all)))
		}
	}
	require.NoError(t, pair.Close())
	require.NoError(t, r.world.Barrier(r.ctx))
}

// TestRankClosedMemory has rank 0 abort a collective and close the communicator: data that
// rank 1 sends afterwards does not arrive in the memory for it.
func TestRankClosedMemory(t *testing.T) {
	ctx, world, before := splitWorld(t)
	r := rank{t, world, cpu.New(), ctx}
	const n = 1 << 20 // floats: too long for the segment
	from, _ := r.floats(n, func(int) float32 { return 1 })
	to, got := r.floats(2*n, func(int) float32 { return 2 })
	if world.Rank() == 0 {
		require.NoError(t, before.AllGather(from, to, n, dtype.F32))
		short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, before.Sync(short), comm.ErrTimeout)
		require.NoError(t, before.Close())
		for i := range got {
			got[i] = 3
		}
		require.NoError(t, world.Send(from, 1, dtype.F32, 1, 0))
	} else {
		require.NoError(t, world.Recv(from, 1, dtype.F32, 0, 0))
		require.NoError(t, world.Sync(ctx))
		err := before.AllGather(from, to, n, dtype.F32)
		assert.ErrorIs(t, errors.Join(err, before.Sync(ctx)), comm.ErrPeerFailed)
	}
	require.NoError(t, world.Barrier(ctx))
	require.NoError(t, world.Barrier(ctx))
	if world.Rank() == 0 {
		assert.False(t, slices.ContainsFunc(got, func(x float32) bool { return x != 3 }), "it was written to")
	}
	passed(t, world)
}

// TestRankSendFirst lets both ranks send a long message before they receive,
// without a group.
func TestRankSendFirst(t *testing.T) {
	const n = 1 << 20
	r := newRank(t)
	send, _ := r.floats(n, func(i int) float32 { return float32(r.world.Rank()*n + i) })
	recv, got := r.floats(n, func(int) float32 { return -1 })
	peer := 1 - r.world.Rank()
	require.NoError(t, r.world.Send(send, n, dtype.F32, peer, 9))
	require.NoError(t, r.world.Recv(recv, n, dtype.F32, peer, 9))
	r.sync()
	assert.Equal(t, float32(peer*n), got[0])
	assert.Equal(t, float32(peer*n+n-1), got[n-1])
}

// TestRankGroupMessages has a rank come to collectives when it has received a message
// that the other one sends in a group behind its own.
func TestRankGroupMessages(t *testing.T) {
	const calls = 6
	r := newRank(t)
	c := r.world
	buf, got := r.floats(calls+1, func(int) float32 { return 1 })
	var reduce []comm.Call
	for i := range calls {
		reduce = append(reduce, comm.AllReduceCall(at(buf, i), at(buf, i), 1, dtype.F32, comm.Sum))
	}
	if c.Rank() == 0 {
		require.NoError(t, c.Group(append(reduce, comm.SendCall(at(buf, calls), 1, dtype.F32, 1, 4))...))
	} else {
		require.NoError(t, c.Recv(at(buf, calls), 1, dtype.F32, 0, 4))
		r.sync()
		require.NoError(t, c.Group(reduce...))
	}
	r.sync()
	assert.Equal(t, []float32{2, 2, 2, 2, 2, 2, 1}, got)
	require.NoError(t, c.Barrier(r.ctx))
}

// TestRankProgress submits an allreduce of several steps and waits for its end
// without calling the communicator: communication goes on by itself.
func TestRankProgress(t *testing.T) {
	const n = 3 << 20
	r := newRank(t)
	buf, got := r.floats(n, func(i int) float32 { return float32(i % 100) })
	require.NoError(t, r.world.AllReduce(buf, buf, n, dtype.F32, comm.Sum))
	require.Eventually(t, func() bool { return mpi.InFlight(r.world) == 0 }, time.Minute, time.Millisecond)
	r.sync()
	assert.Equal(t, float32(99*r.world.WorldSize()), got[99])
	require.NoError(t, r.world.Barrier(r.ctx))
}

// TestRankBusyProgress makes and closes communicators beside one that keeps the progress
// goroutine busy.
func TestRankBusyProgress(t *testing.T) {
	r := newRank(t)
	idle, err := r.world.Split(r.ctx, 0, 0)
	require.NoError(t, err)
	entered, leave := mpi.BlockProgress(r.world)
	<-entered
	part, err := idle.Split(r.ctx, 0, 0)
	require.NoError(t, err)
	require.NoError(t, part.Barrier(r.ctx))
	require.NoError(t, part.Close())
	require.NoError(t, idle.Close())
	close(leave)
	r.sync()
}

// TestRankWrongLength receives less, and more, than it expects.
func TestRankWrongLength(t *testing.T) {
	r := newRank(t)
	send, _ := r.floats(8, func(int) float32 { return 1 })
	recv, _ := r.floats(8, func(int) float32 { return 0 })
	for _, tag := range []uint32{3, math.MaxUint32} {
		for _, sent := range []int{4, 8} {
			c, err := r.world.Split(r.ctx, 0, 0)
			require.NoError(t, err)
			if c.Rank() == 0 {
				require.NoError(t, c.Send(send, sent, dtype.F32, 1, tag))
				if err := c.Sync(r.ctx); err != nil { // or it is done before it can be notified
					require.ErrorIs(t, err, comm.ErrMismatch)
				}
			} else {
				require.NoError(t, c.Recv(recv, 6, dtype.F32, 0, tag))
				err := c.Sync(r.ctx)
				require.ErrorIs(t, err, comm.ErrMismatch, "%d elements, tag %d", sent, tag)
				assert.ErrorIs(t, c.Sync(r.ctx), comm.ErrBroken)
			}
			require.NoError(t, r.world.Barrier(r.ctx))
			require.NoError(t, c.Close())
		}
	}
}

// TestRankForeignHead receives less of a long message than was sent, while the head of another message is in the memory
// of its receive. The error accuses no call but the message's.
func TestRankForeignHead(t *testing.T) {
	r := newRank(t)
	c, err := r.world.Split(r.ctx, 0, 0)
	require.NoError(t, err)
	const tag = 4
	send, _ := r.floats(8000, func(int) float32 { return 1 })
	recv, _ := r.floats(8000, func(int) float32 { return 0 })
	if c.Rank() == 0 {
		require.NoError(t, c.Send(send, 1, dtype.F32, 1, 3))
		require.NoError(t, c.Send(send, 8000, dtype.F32, 1, tag))
	}
	require.NoError(t, r.world.Barrier(r.ctx)) // both messages are on their way
	if c.Rank() == 0 {
		if err := c.Sync(r.ctx); err != nil { // or it is done before it can be notified
			require.ErrorIs(t, err, comm.ErrMismatch)
		}
	} else {
		require.NoError(t, c.Recv(recv, 6000, dtype.F32, 0, tag))
		err := c.Sync(r.ctx)
		require.ErrorIs(t, err, comm.ErrMismatch)
		assert.NotContains(t, err.Error(), "tag 3")
	}
	require.NoError(t, r.world.Barrier(r.ctx))
	require.NoError(t, c.Close())
}

// TestRankAbort ends a job in which the other ranks would wait forever.
func TestRankAbort(t *testing.T) {
	onlyChild(t)
	world, err := mpi.Init(context.Background())
	require.NoError(t, err)
	if world.Rank() == 0 {
		mpi.Abort(7)
	}
	if err := world.Barrier(context.Background()); err == nil {
		t.Error("the barrier without rank 0 is done")
		return
	}
	select {} // rank 0 was gone before the launcher has ended this one
}

// TestRankLateInit waits for a rank that does not initialize MPI, as long as its context
// lets it: until it has said so.
func TestRankLateInit(t *testing.T) {
	onlyChild(t)
	rank, err := strconv.Atoi(cmp.Or(os.Getenv("OMPI_COMM_WORLD_RANK"), os.Getenv("PMI_RANK")))
	require.NoError(t, err)
	if rank == 0 {
		const said = "mpi: MPI_Init has not returned\" rank=0"
		logged := logtest.Capture(t)
		ctx, cancel := context.WithCancelCause(context.Background())
		go func() {
			for len(logged.Lines(said)) == 0 {
				time.Sleep(time.Millisecond)
			}
			cancel(errors.New("rank 0 has waited enough"))
		}()
		_, err := mpi.Init(ctx)
		assert.Len(t, logged.Lines(said), 1)
		require.ErrorIs(t, err, comm.ErrCanceled)
		require.ErrorContains(t, err, "have not called MPI_Init")
		require.ErrorContains(t, err, "rank 0 has waited enough")
		_, err = mpi.Init(context.Background())
		require.ErrorIs(t, err, comm.ErrClosed)
		require.NoError(t, mpi.Finalize(context.Background()))
	}
	passedAs(t, rank, 2)
}

// TestRankLateInitIsBounded waits for a rank that does not initialize MPI, as long as the user lets it.
func TestRankLateInitIsBounded(t *testing.T) {
	onlyChild(t)
	rank, err := strconv.Atoi(cmp.Or(os.Getenv("OMPI_COMM_WORLD_RANK"), os.Getenv("PMI_RANK")))
	require.NoError(t, err)
	if rank == 0 {
		t.Setenv(env.ConnectTimeout, "soon")
		_, err := mpi.Init(context.Background())
		require.ErrorIs(t, err, comm.ErrArgument)
		require.ErrorContains(t, err, `TUTTI_CONNECT_TIMEOUT="soon": want a time`)
		t.Setenv(env.ConnectTimeout, "1s")
		_, err = mpi.Init(context.Background())
		require.ErrorIs(t, err, comm.ErrTimeout)
		require.ErrorContains(t, err, "have not called MPI_Init")
		require.ErrorContains(t, err, "no deadline was set, so the limit is 1s (TUTTI_CONNECT_TIMEOUT)")
		require.NoError(t, mpi.Finalize(context.Background()))
	}
	passedAs(t, rank, 2)
}

// TestRankMixedUp is launched by another MPI's launcher.
func TestRankMixedUp(t *testing.T) {
	onlyChild(t)
	_, err := mpi.Init(context.Background())
	require.ErrorIs(t, err, comm.ErrUnavailable)
	assert.ErrorContains(t, err, "processes were launched")
	assert.ErrorContains(t, err, env.MPILibrary)
	os.Exit(0) // MPI is initialized and cannot be finalized through this package
}

// initThread is MPI as another part of the program would initialize it.
type initThread struct {
	Init     dl.Func `sym:"MPI_Init_thread"`
	Finalize dl.Func `sym:"MPI_Finalize"`
}

// TestRankSerialized finds MPI initialized by another part of the program, with
// less thread support than Init would have asked for.
func TestRankSerialized(t *testing.T) {
	onlyChild(t)
	info, err := mpi.Library()
	require.NoError(t, err)
	lib, err := dl.Open(info.File)
	require.NoError(t, err)
	var other initThread
	require.NoError(t, lib.Bind(&other))
	const serialized = 2 // MPI_THREAD_SERIALIZED of Open MPI and MPICH
	provided := make([]int32, 1)
	require.Zero(t, other.Init.Int(0, 0, serialized, hostmem.Addr(provided)))

	r := newRank(t)
	info, err = mpi.Library()
	require.NoError(t, err)
	if provided[0] == serialized {
		assert.Equal(t, "MPI_THREAD_SERIALIZED", info.Threads)
	}
	buf, got := r.floats(1000, func(i int) float32 { return float32(i) })
	require.NoError(t, r.world.AllReduce(buf, buf, 1000, dtype.F32, comm.Sum))
	sub, err := r.world.Split(r.ctx, r.world.Rank(), 0)
	require.NoError(t, err)
	require.NoError(t, sub.Close())
	r.sync()
	assert.Equal(t, float32(999*r.world.WorldSize()), got[999])
	require.NoError(t, r.world.Barrier(r.ctx))
	require.NoError(t, mpi.Finalize(context.Background()))
	require.Zero(t, other.Finalize.Int(), "MPI_Finalize is left to who initialized MPI")
}
